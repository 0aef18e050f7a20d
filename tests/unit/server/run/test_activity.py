"""What goes on in a server at one instant: groups and their leases, who waits, steps to come, clients and their sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from groupwise.api.schemas.activity import ActivityAnswer
from tests.unit.server.serving import Served, served


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
