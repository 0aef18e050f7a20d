"""A server's activity at one instant: groups and their leases, waiting requests, coming steps, clients and their sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from groupwise.api.schemas.activity import ActivityAnswer
from tests.unit.server.serving import Served, served


async def seen(server: Served, what: Callable[[ActivityAnswer], object]) -> ActivityAnswer:
    """The first activity that has it."""
    while not what(activity := await server.service.activity()):  # noqa: ASYNC110 — it has no event
        await asyncio.sleep(0.002)
    return activity


async def test_groups_requests_and_steps_are_reported_until_they_end(tmp_path: Path) -> None:
    async with served(tmp_path, completions_wait=20.0) as server:
        run = await server.start(lease_seconds=60.0)
        first, second = await server.ask("abc"), await server.ask("x" * 400)
        current = await server.service.activity()
        assert (current.run_id, current.capacity, current.sampling) == (run, 2, 0)
        assert [each.group_id for each in current.groups] == [first.group_id, second.group_id]
        facts = {(each.state, each.key_id, each.rewarded, each.members) for each in current.groups}
        assert facts == {("open", "me", 0, 4)}
        assert all(50 < (each.lease_seconds or 0) <= 60 for each in current.groups)
        assert [len(each.prompt) for each in current.groups] == [3, 300]
        waiting = asyncio.create_task(server.ask(draw=3))
        current = await seen(server, lambda activity: activity.waiting)
        (request,) = current.waiting
        assert (request.key_id, request.groups, request.draws) == ("me", 1, [3])
        assert 0 <= request.seconds < 20
        goes_on = server.engines[0].hold("step")
        await server.reward(first, [1.0, None, 0.0, 0.5])
        await server.reward(second)
        current = await seen(server, lambda activity: activity.planned)
        (plan,) = current.planned
        assert (plan.step, plan.engines_lost) == (0, 0)
        assert plan.group_ids == [first.group_id, second.group_id]
        planned = {each.group_id: each for each in current.groups}
        rewarded = planned[first.group_id]
        assert (rewarded.state, rewarded.rewarded, rewarded.mean_reward) == ("planned", 4, 0.5)
        goes_on.set()
        last = await waiting
        await server.reward(last, include="hold")
        (held,) = (await server.service.activity()).groups
        assert (held.group_id, held.state, held.lease_seconds) == (last.group_id, "held", None)
        await server.service.give_up(last.group_id)
        current = await server.service.activity()
        assert (current.groups, current.waiting, current.planned) == ([], [], [])
