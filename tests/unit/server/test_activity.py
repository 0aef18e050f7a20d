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


async def test_sessions_of_clients_that_train_by_verbs(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        verbs = Verbs(server.config, server.ledger, server.service, lambda: no_engine(server))
        await verbs.begin()
        opened = verbs.service.opened
        session = await opened.create_session(None)
        model = opened.new_model(session, 0)
        (told,) = (await server.service.activity()).sessions
        assert (told.id, told.models[0].id, told.models[0].base) == (session, model.id, None)
        model.spec = ModelSpec(base="tiny", rank=8, seed=0)
        opened.know_sampler(f"{session}:sample:0", "tiny", None)
        (told,) = (await server.service.activity()).sessions
        assert (told.models[0].base, told.models[0].rank, told.models[0].steps) == ("tiny", 8, 0)
        assert told.samplers == 1
        assert told.silent_seconds < 60 < told.let_go_seconds <= 600
        await opened.finish(session)
        assert (await server.service.activity()).sessions == []
        await verbs.shut_down()


async def test_a_loop_elsewhere(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        loop = LoopElsewhere(id="p", owner="run at laptop", silent_seconds=1.0, calls=2)
        server.service.loop_elsewhere = lambda: loop
        assert (await server.service.activity()).loop_elsewhere == loop
        assert (await server.service.status()).loop_elsewhere == "run at laptop"


async def test_clients_are_told_by_their_keys_with_what_went_wrong_last() -> None:
    ring, keys = keyring()
    async with client_of(app_of(FakeService(), ring)) as client:
        as_reader = {"X-API-Key": keys[Role.READ]}
        await client.get("/checkpoints", headers={"X-API-Key": keys[Role.TRAIN]})
        for looks in ("/status", "/activity", "/metrics", "/healthz"):
            looked = await client.get(looks, headers={"X-API-Key": keys[Role.TRAIN]})
            assert looked.status_code == 200
        assert (await client.post("/start", json={}, headers=as_reader)).status_code == 403
        assert (await client.get("/status", headers={"X-API-Key": "gw-unknown"})).status_code == 401
        answer = await client.get("/activity", headers=as_reader)
        found = ActivityAnswer.model_validate_json(answer.content)
        again = await client.get("/activity", headers=as_reader)
    assert found.run_id == RUN
    reader, trainer = found.clients  # the last first, and nobody who has no key
    assert (reader.role, reader.requests, reader.refused) == ("read", 1, 1)
    assert (reader.last_request, reader.last_problem) == ("POST /start", "forbidden")
    assert (trainer.role, trainer.requests, trainer.refused) == ("train", 1, 0)
    assert (trainer.last_request, trainer.last_problem) == ("GET /checkpoints", None)
    known = ActivityAnswer.model_validate_json(again.content).clients
    assert [each.requests for each in known] == [1, 1], "whoever only looks asks for nothing"


async def seen(server: Served, what: Callable[[ActivityAnswer], object]) -> ActivityAnswer:
    """The first activity that has it."""
    while not what(found := await server.service.activity()):  # noqa: ASYNC110 — it has no event
        await asyncio.sleep(0.002)
    return found


async def test_groups_are_told_with_their_leases_and_rewards_until_they_end(tmp_path: Path) -> None:
    async with served(tmp_path, completions_wait=5.0) as server:
        run = await server.start(staleness=1, lease_seconds=60.0)
        first, second = await server.ask("abc"), await server.ask("x" * 400)
        found = await server.service.activity()
        assert (found.run_id, found.capacity, found.sampling) == (run, 4, 0)
        assert [each.group_id for each in found.groups] == [first.group_id, second.group_id]
        told = {(each.state, each.key_id, each.members) for each in found.groups}
        assert told == {("open", "me", 4)}
        assert all(50 < (each.lease_seconds or 0) <= 60 for each in found.groups)
        assert [len(each.prompt) for each in found.groups] == [3, 300]
        await server.reward(first, [1.0, None, 0.0, 0.5], include="hold")
        groups = (await server.service.activity()).groups
        (held,) = [each for each in groups if each.state == "held"]
        assert (held.group_id, held.lease_seconds, held.mean_reward) == (first.group_id, None, 0.5)
        await server.service.give_up(second.group_id)
        await server.service.give_up(first.group_id)
        assert (await server.service.activity()).groups == []


async def test_who_waits_for_room_and_steps_that_are_planned_are_told(tmp_path: Path) -> None:
    async with served(tmp_path, completions_wait=20.0) as server:
        await server.start()
        full = [await server.ask(), await server.ask()]
        waiting = asyncio.create_task(server.ask(draw=3))
        found = await seen(server, lambda activity: activity.waiting)
        (request,) = found.waiting
        assert (request.key_id, request.groups, request.draws) == ("me", 1, [3])
        assert 0 <= request.seconds < 20
        goes_on = server.engines[0].hold("step")
        for each in full:
            await server.reward(each)
        found = await seen(server, lambda activity: activity.planned)
        (plan,) = found.planned
        assert (plan.step, plan.engines_lost) == (0, 0)
        assert plan.group_ids == [each.group_id for each in full]
        assert {each.state for each in found.groups} == {"planned"}
        goes_on.set()
        assert (await waiting).draw == 3
        found = await server.service.activity()
        assert (found.waiting, found.planned) == ([], [])
