"""Who may sample now, who waits, who is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

import pytest

from groupwise.server import admission as admission_module
from groupwise.server.admission import Admission, Room, Traffic
from groupwise.wire.problems import Refusal

PATIENT = 30.0


def admission(size: int = 2, staleness: int = 1, manual: bool = False, **state: int) -> Admission:
    room = Room(groups_per_step=size, staleness=staleness, manual=manual, most=5)
    return Admission(room, Traffic(**state), next_draw=0)


class Client:
    """Asks, and keeps what it got until it leaves."""

    def __init__(
        self, room: Admission, draws: Sequence[int | None], limit: float = PATIENT
    ) -> None:
        self._left = asyncio.Event()
        self.draws: tuple[int, ...] | None = None
        self.task = asyncio.create_task(self._ask(room, draws, limit))

    async def _ask(self, room: Admission, draws: Sequence[int | None], limit: float) -> None:
        async with room.admitted(draws, limit, "somebody") as self.draws:
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
    room.now(Traffic(steps_done=0, under_way=1))
    await clients[0].leave()  # its group is open now: no room
    await settled()
    assert clients[4].draws is None
    room.now(Traffic(steps_done=1, under_way=0))  # a step took it; three are still being sampled
    await settled()
    assert [client.draws for client in clients[4:]] == [(4,), None]
    for client in clients[1:5]:
        await client.leave()
    room.now(Traffic(steps_done=2, under_way=0))
    await clients[5].leave()


async def test_named_draws_wait_for_their_step_and_hold_nobody_up() -> None:
    room = admission(size=2, staleness=0)
    late, first, second = Client(room, [2]), Client(room, [1]), Client(room, [0])
    await settled()
    assert [client.draws for client in (late, first, second)] == [None, (1,), (0,)]
    await first.leave()
    await second.leave()
    room.now(Traffic(steps_done=1, under_way=0))
    await settled()
    assert late.draws == (2,)
    after = Client(room, [None])
    await settled()
    assert after.draws == (3,)
    await late.leave()
    await after.leave()


async def test_draws_that_are_lost_make_later_ones_due() -> None:
    room = admission(size=2, staleness=0)
    later = Client(room, [3])
    await settled()
    assert later.draws is None
    room.now(Traffic(lost=2))
    await settled()
    assert later.draws == (3,)
    await later.leave()


async def test_whoever_waits_too_long_is_told_when_to_ask_again() -> None:
    room = admission(size=1, staleness=0, under_way=1)
    with pytest.raises(Refusal) as refused:
        async with room.admitted([None], 0.01, "somebody"):
            raise AssertionError("there was no room")
    assert (refused.value.code, refused.value.status) == ("too_busy", 429)
    assert refused.value.headers["Retry-After"] == "2"
    assert room.waiting == 0


async def test_a_draw_that_nothing_brings_nearer_is_named_and_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission_module, "IDLE_SECONDS", 0.01)
    room = admission(size=1, staleness=1)
    said = "not the turn of draw 3: 0 steps are done.* draws below 2 may be sampled; none of their"
    async with asyncio.timeout(PATIENT / 2):
        with pytest.raises(Refusal, match=said) as refused:
            async with room.admitted([3], PATIENT, "somebody"):
                raise AssertionError("it was not its turn")
    assert (refused.value.code, refused.value.retry_after) == ("too_busy", 2)
    assert room.waiting == 0
    room.now(Traffic(under_way=1))  # somebody is about to post rewards
    with pytest.raises(Refusal, match="1 of their groups is under way"):
        async with room.admitted([3], 0.05, "somebody"):
            raise AssertionError("it was not its turn")
    waiting = Client(room, [3])
    await asyncio.sleep(0.05)
    assert not waiting.task.done()
    room.now(Traffic(steps_done=2))
    await settled()
    assert waiting.draws == (3,)
    await waiting.leave()


async def test_more_than_ever_fits_is_refused_at_once() -> None:
    with pytest.raises(Refusal, match="5 prompts") as refused:
        async with admission().admitted([None] * 5, PATIENT, "somebody"):
            raise AssertionError("there was no room")
    assert refused.value.code == "invalid_request"
    assert [error.field for error in refused.value.errors] == ["prompts"]


async def test_a_request_that_fails_or_is_given_up_leaves_its_room_to_others() -> None:
    room = admission(size=1, staleness=0)
    with pytest.raises(OSError, match="sampling failed"):
        async with room.admitted([None], PATIENT, "somebody"):
            raise OSError("sampling failed")
    one = Client(room, [None])
    await settled()
    waiting = Client(room, [None])
    await settled()
    waiting.task.cancel()
    await asyncio.gather(waiting.task, return_exceptions=True)
    assert room.waiting == 0
    one.task.cancel()
    await asyncio.gather(one.task, return_exceptions=True)
    next_one = Client(room, [None])
    await settled()
    assert next_one.draws is not None
    await next_one.leave()


async def test_one_who_gives_up_in_the_instant_of_being_let_in_takes_no_room() -> None:
    room = admission(size=1, staleness=0, under_way=1)
    gone, other = Client(room, [None]), Client(room, [None])
    await settled()
    room.now(Traffic(steps_done=1, under_way=0))
    gone.task.cancel()
    await settled()
    room.now(Traffic(steps_done=1, under_way=0))
    await settled()
    assert other.draws is not None
    await other.leave()


async def test_manual_steps_bound_the_number_alone() -> None:
    room = admission(manual=True)
    async with AsyncExitStack() as stack:
        draws = await stack.enter_async_context(room.admitted([900, None, 3], PATIENT, "somebody"))
        assert draws == (900, 901, 3)
        waiting = Client(room, [None] * 3)
        await settled()
        assert waiting.draws is None
        room.now(Traffic(steps_done=0, under_way=3))
    await settled()
    assert waiting.draws is None
    room.now(Traffic(steps_done=0, under_way=2))
    await settled()
    assert waiting.draws == (902, 903, 904)
    await waiting.leave()


async def test_those_who_wait_are_told_when_the_run_ends_and_nobody_is_let_in() -> None:
    room = admission(size=1, staleness=0, under_way=1)
    waiting = Client(room, [None])
    await settled()
    room.end(Refusal("finished"))
    with pytest.raises(Refusal, match="max_steps"):
        await waiting.task
    with pytest.raises(Refusal, match="max_steps"):
        async with room.admitted([None], PATIENT, "somebody"):
            raise AssertionError("the run has ended")
