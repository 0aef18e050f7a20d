"""What goes on in a server at one instant: groups and their leases, who waits, steps to come, clients and their sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from groupwise.server.verbs.mount import Verbs
from groupwise.server.verbs.port import ModelSpec
from groupwise.wire.activity import ActivityAnswer, LoopElsewhere
from groupwise.wire.keys import Role
from tests.unit.server.asking import app_of, client_of, keyring
from tests.unit.server.fake_service import RUN, FakeService
from tests.unit.server.serving import Served, served
from tests.unit.server.verbs.test_mount import no_engine


async def test_sessions_of_clients_that_train_by_verbs_and_a_loop_elsewhere(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        loop = LoopElsewhere(id="p", owner="run at laptop", silent_seconds=1.0, calls=2)
        server.service.loop_elsewhere = lambda: loop
        verbs = Verbs(server.config, server.ledger, server.service, lambda: no_engine(server))
        await verbs.begin()
        opened = verbs.service.opened
        session = await opened.create_session(None)
        model = opened.new_model(session, 0)
        (told,) = (await server.service.activity()).sessions
        assert (told.id, told.models[0].id, told.models[0].base) == (session, model.id, None)
        model.spec = ModelSpec(base="tiny", rank=8, seed=0)
        opened.know_sampler(f"{session}:sample:0", "tiny", None)
        activity = await server.service.activity()
        (told,) = activity.sessions
        assert (told.models[0].base, told.models[0].rank, told.models[0].steps) == ("tiny", 8, 0)
        assert told.samplers == 1
        assert told.silent_seconds < 60 < told.let_go_seconds <= 600
        assert activity.loop_elsewhere == loop
        assert (await server.service.status()).loop_elsewhere == "run at laptop"
        await opened.finish(session)
        assert (await server.service.activity()).sessions == []
        await verbs.shut_down()


async def test_clients_are_told_by_their_keys_with_what_went_wrong_last() -> None:
    ring, keys = keyring()
    reader_key, trainer_key = ({"X-API-Key": keys[role]} for role in (Role.READ, Role.TRAIN))
    async with client_of(app_of(FakeService(), ring)) as client:
        await client.get("/checkpoints", headers=trainer_key)
        for looks in ("/status", "/activity", "/metrics", "/healthz"):
            assert (await client.get(looks, headers=trainer_key)).status_code == 200
        assert (await client.post("/start", json={}, headers=reader_key)).status_code == 403
        assert (await client.get("/status", headers={"X-API-Key": "gw-unknown"})).status_code == 401
        told = [(await client.get("/activity", headers=reader_key)).json() for _ in range(2)]
    assert told[0]["run_id"] == RUN
    names = ("role", "requests", "refused", "last_request", "last_problem")
    for each in told:  # the last first, nobody who has no key; whoever only looks asks for nothing
        assert [tuple(known[name] for name in names) for known in each["clients"]] == [
            ("read", 1, 1, "POST /start", "forbidden"),
            ("train", 1, 0, "GET /checkpoints", None),
        ]


async def seen(server: Served, what: Callable[[ActivityAnswer], object]) -> ActivityAnswer:
    """The first activity that has it."""
    while not what(found := await server.service.activity()):  # noqa: ASYNC110 — it has no event
        await asyncio.sleep(0.002)
    return found


async def test_groups_requests_and_steps_are_told_until_they_end(tmp_path: Path) -> None:
    async with served(tmp_path, completions_wait=20.0) as server:
        run = await server.start(lease_seconds=60.0)
        first, second = await server.ask("abc"), await server.ask("x" * 400)
        found = await server.service.activity()
        assert (found.run_id, found.capacity, found.sampling) == (run, 2, 0)
        assert [each.group_id for each in found.groups] == [first.group_id, second.group_id]
        told = {(each.state, each.key_id, each.members) for each in found.groups}
        assert told == {("open", "me", 4)}
        assert all(50 < (each.lease_seconds or 0) <= 60 for each in found.groups)
        assert [len(each.prompt) for each in found.groups] == [3, 300]
        waiting = asyncio.create_task(server.ask(draw=3))
        found = await seen(server, lambda activity: activity.waiting)
        (request,) = found.waiting
        assert (request.key_id, request.groups, request.draws) == ("me", 1, [3])
        assert 0 <= request.seconds < 20
        goes_on = server.engines[0].hold("step")
        await server.reward(first, [1.0, None, 0.0, 0.5])
        await server.reward(second)
        found = await seen(server, lambda activity: activity.planned)
        (plan,) = found.planned
        assert (plan.step, plan.engines_lost) == (0, 0)
        assert plan.group_ids == [first.group_id, second.group_id]
        planned = {each.group_id: each for each in found.groups}
        told = (planned[first.group_id].state, planned[first.group_id].mean_reward)
        assert told == ("planned", 0.5)
        goes_on.set()
        last = await waiting
        await server.reward(last, include="hold")
        (held,) = (await server.service.activity()).groups
        assert (held.group_id, held.state, held.lease_seconds) == (last.group_id, "held", None)
        await server.service.give_up(last.group_id)
        found = await server.service.activity()
        assert (found.groups, found.waiting, found.planned) == ([], [], [])
