"""Which requests may sample now, which wait, which are refused."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from groupwise.api.schemas.problems import Refusal
from groupwise.server.run import admission as admission_module
from groupwise.server.run.admission import Admission, Capacity, Traffic

TIMEOUT_S = 30.0


def admission(size: int = 2, staleness: int = 1, manual: bool = False, **state: int) -> Admission:
    room = Capacity(groups_per_step=size, staleness=staleness, manual=manual, max_open_groups=5)
    return Admission(room, Traffic(**state), next_draw=0)


class Client:
    """Asks, and keeps what it got until it leaves."""

    def __init__(
        self, room: Admission, draws: Sequence[int | None], limit: float = TIMEOUT_S
    ) -> None:
        self._left = asyncio.Event()
        self.draws: tuple[int, ...] | None = None
        self.task = asyncio.create_task(self._ask(room, draws, limit))

    async def _ask(self, room: Admission, draws: Sequence[int | None], limit: float) -> None:
        async with room.admit(draws, limit, "somebody") as self.draws:
            await self._left.wait()

    async def leave(self) -> None:
        self._left.set()
        await self.task


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_as_many_groups_are_let_in_as_the_next_steps_take_in_the_order_of_arrival() -> None:
    room = admission()
    clients = [Client(room, [None]) for _ in range(6)]
    await settled()
    assert [client.draws for client in clients] == [(0,), (1,), (2,), (3,), None, None]
    assert (room.sampling, room.waiting) == (4, 2)
    room.update(Traffic(steps_done=0, under_way=1))
    await clients[0].leave()  # its group is open now: no room
    await settled()
    assert clients[4].draws is None
    room.update(Traffic(steps_done=1, under_way=0))  # a step took it; three are still being sampled
    await settled()
    assert [client.draws for client in clients[4:]] == [(4,), None]
    for client in clients[1:5]:
        await client.leave()
    room.update(Traffic(steps_done=2, under_way=0))
    await clients[5].leave()


async def test_named_draws_wait_for_their_step_without_delaying_others() -> None:
    room = admission(size=2, staleness=0)
    late, first, second = Client(room, [2]), Client(room, [1]), Client(room, [0])
    await settled()
    assert [client.draws for client in (late, first, second)] == [None, (1,), (0,)]
    await first.leave()
    await second.leave()
    room.update(Traffic(steps_done=1, under_way=0))
    await settled()
    assert late.draws == (2,)
    after, later = Client(room, [None]), Client(room, [5])
    await settled()
    assert (after.draws, later.draws) == ((3,), None)
    await late.leave()
    await after.leave()
    room.update(Traffic(steps_done=1, lost=2))  # draws that are lost make later ones due
    await settled()
    assert later.draws == (5,)
    await later.leave()


async def refusal_of(
    room: Admission, draws: Sequence[int | None], limit: float = TIMEOUT_S
) -> Refusal:
    """What is said to somebody who is not let in."""
    with pytest.raises(Refusal) as refused:
        async with room.admit(draws, limit, "somebody"):
            raise AssertionError("there was no room")
    return refused.value


async def test_a_refusal_has_its_reason_and_a_retry_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission_module, "IDLE_SECONDS", 0.01)
    many = await refusal_of(admission(), [None] * 5)
    assert (many.code, [error.field for error in many.errors]) == ("invalid_request", ["prompts"])
    room = admission(size=1, staleness=0, under_way=1)
    refusal = await refusal_of(room, [None], 0.01)
    assert (refusal.code, refusal.headers["Retry-After"], room.waiting) == ("too_busy", "2", 0)
    room = admission(size=1, staleness=1)
    async with asyncio.timeout(TIMEOUT_S / 2):
        refusal = await refusal_of(room, [3])
    assert "draw 3: 0 steps" in refusal.detail
    assert (refusal.code, refusal.retry_after, room.waiting) == ("too_busy", 2, 0)
    room.update(Traffic(under_way=1))  # somebody is about to post rewards
    waiting = Client(room, [3])  # whose idle time is over before the next one's limit
    await settled()
    assert "1 of their groups" in (await refusal_of(room, [3], 0.05)).detail
    assert not waiting.task.done()
    room.update(Traffic(steps_done=2))
    await settled()
    assert waiting.draws == (3,)
    await waiting.leave()
    room.update(Traffic(steps_done=2, under_way=2))
    waiting = Client(room, [None])
    await settled()
    room.end(Refusal("finished"))
    with pytest.raises(Refusal) as ended:
        await waiting.task
    assert ended.value.code == (await refusal_of(room, [None])).code == "finished"


async def test_a_request_that_fails_or_is_given_up_leaves_its_room_to_others() -> None:
    room = admission(size=1, staleness=0)
    with pytest.raises(OSError, match="sampling failed"):
        async with room.admit([None], TIMEOUT_S, "somebody"):
            raise OSError("sampling failed")
    one = Client(room, [None])
    await settled()
    waiting = Client(room, [None])
    await settled()
    for client in (waiting, one):
        client.task.cancel()
        await asyncio.gather(client.task, return_exceptions=True)
        assert room.waiting == 0
    next_one = Client(room, [None])
    await settled()
    assert next_one.draws is not None
    await next_one.leave()
    room.update(Traffic(under_way=1))
    gone, other = Client(room, [None]), Client(room, [None])
    await settled()
    room.update(Traffic(steps_done=1, under_way=0))
    gone.task.cancel()  # in the instant of being let in
    await settled()
    room.update(Traffic(steps_done=1, under_way=0))
    await settled()
    assert other.draws is not None
    await other.leave()
