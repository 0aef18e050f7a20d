"""Calls that are answered later: in the order of their numbers, once, and with answers that never change; memory is bounded."""

from __future__ import annotations

import asyncio
import logging

import pytest

from groupwise.core.errors import RunError, UsageError
from groupwise.server.tinker.futures import (
    AnswerGone,
    CallQueue,
    CallResult,
    Failure,
    Futures,
    Limits,
    TooManyCalls,
    UnknownAnswer,
    Work,
)

TIMEOUT_S = 10.0


def _saying(text: str, done: list[str] | None = None) -> Work:
    async def work() -> CallResult:
        await asyncio.sleep(0)
        if done is not None:
            done.append(text)
        return CallResult(text.encode())

    return work


def _failing(error: Exception) -> Work:
    async def work() -> CallResult:
        raise error

    return work


async def _text(futures: Futures, id: str) -> str:
    answer = await futures.answer(id, TIMEOUT_S)
    assert isinstance(answer, CallResult)
    return answer.body.decode()


async def _failure(futures: Futures, id: str) -> Failure:
    answer = await futures.answer(id, TIMEOUT_S)
    assert isinstance(answer, Failure)
    return answer


async def test_one_at_a_time_but_lines_beside_each_other() -> None:
    futures = Futures()
    under_way, most, others = 0, 0, asyncio.Event()

    async def work() -> CallResult:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await others.wait()
        under_way -= 1
        return CallResult(b"")

    line = CallQueue("a", futures)
    ids = [line.submit(n, b"%d" % n, work) for n in range(3)]
    assert await _text(futures, CallQueue("b", futures).submit(0, b"0", _saying("x"))) == "x"
    others.set()
    assert ([await _text(futures, id) for id in ids], most) == ([""] * 3, 1)


async def test_failures_are_told_and_hold_up_nobody(caplog: pytest.LogCaptureFixture) -> None:
    futures = Futures()
    line = CallQueue("m", futures)
    with caplog.at_level(logging.ERROR):
        usage = line.submit(0, b"0", _failing(UsageError("yours")))
        run = line.submit(1, b"1", _failing(RunError("ours")))
        bug = line.submit(2, b"2", _failing(KeyError("secret")))
        refused = line.submit(3, b"3", UsageError("refused before"))
        after = line.submit(4, b"4", _saying("after"))
        assert await _failure(futures, usage) == Failure("yours", "user")
        assert await _failure(futures, run) == Failure("ours", "server")
        found = await _failure(futures, bug)
    assert found.category == "server"
    assert "secret" not in found.message
    assert "secret" in caplog.text
    assert await _failure(futures, refused) == Failure("refused before", "user")
    assert await _text(futures, after) == "after"


async def test_a_number_that_never_comes() -> None:
    futures = Futures()
    line = CallQueue("m", futures, patience=0.01)
    ids = [line.submit(n, b"%d" % n, _saying(str(n))) for n in (0, 2, 3)]
    assert await _text(futures, ids[0]) == "0"
    for id in ids[1:]:
        assert "Request 1 of m" in (await _failure(futures, id)).message
    with pytest.raises(AnswerGone):
        line.submit(1, b"1", _saying("too late"))
    assert await _text(futures, line.submit(4, b"4", _saying("4"))) == "4"


async def test_answers_are_let_go_of_from_the_oldest_fetched_ones_first() -> None:
    futures = Futures(Limits(answers=3))
    line = CallQueue("m", futures)
    ids = [line.submit(n, b"%d" % n, _saying(str(n))) for n in range(3)]
    assert [await _text(futures, ids[n]) for n in (2, 1)] == ["2", "1"]
    assert await _text(futures, line.submit(3, b"3", _saying("3"))) == "3"
    assert await _text(futures, ids[0]) == "0"
    with pytest.raises(AnswerGone, match="Request 2 of m"):
        line.submit(2, b"2", _saying("twice"))
    for id, error in (
        (ids[2], AnswerGone),
        (ids[0].rpartition("-")[0] + "-99", UnknownAnswer),
        ("nonsense", UnknownAnswer),
        ("f-0-1", AnswerGone),
    ):
        with pytest.raises(error):
            await futures.answer(id, TIMEOUT_S)
    futures = Futures(Limits(answer_bytes=10))
    line = CallQueue("m", futures)
    small = line.submit(0, b"0", _saying("1234"))
    assert len(await _text(futures, line.submit(1, b"1", _saying("x" * 100)))) == 100
    with pytest.raises(AnswerGone):
        await futures.answer(small, TIMEOUT_S)


async def test_calls_of_one_caller_that_wait_leave_room_to_others() -> None:
    futures = Futures(Limits(waiting_of_one=2))
    futures.callers |= {"s-1": "mine", "s-2": "mine", "s-3": "another"}
    for session in ("s-1", "s-2"):
        CallQueue(f"{session}:train:0", futures).submit(1, b"11", _saying("1"))
    with pytest.raises(TooManyCalls):
        CallQueue("s-1:train:1", futures).submit(1, b"11", _saying("1"))
    CallQueue("s-3:train:0", futures).submit(1, b"11", _saying("1"))


@pytest.mark.parametrize("limits", [Limits(waiting=2), Limits(waiting_bytes=4)])
async def test_calls_that_wait_are_bounded_but_the_one_they_wait_for_is_taken(
    limits: Limits,
) -> None:
    futures = Futures(limits)
    line = CallQueue("m", futures)
    line.submit(1, b"11", _saying("1"))
    last = line.submit(2, b"22", _saying("2"))
    with pytest.raises(TooManyCalls):
        line.submit(3, b"33", _saying("3"))
    line.submit(0, b"00", _saying("0"))
    assert await _text(futures, last) == "2"
    assert await _text(futures, line.submit(3, b"33", _saying("3"))) == "3"


async def test_closing_answers_all_who_wait() -> None:
    futures = Futures()
    line, never = CallQueue("m", futures), asyncio.Event()

    async def work() -> CallResult:
        await never.wait()
        return CallResult(b"")

    ids = [line.submit(n, b"%d" % n, work) for n in (0, 1, 3)]
    waiting = asyncio.create_task(futures.answer(ids[0], TIMEOUT_S))
    await asyncio.sleep(0.001)
    await line.close()
    assert isinstance(await waiting, Failure)
    for id in ids:
        assert "its session has ended" in (await _failure(futures, id)).message
    await futures.close()


async def test_calls_are_done_in_the_order_of_their_numbers_and_once() -> None:
    futures = Futures()
    line, done = CallQueue("m", futures, patience=TIMEOUT_S), list[str]()
    ids = {n: line.submit(n, b"%d" % n, _saying(str(n), done)) for n in (3, 1, 2)}
    assert await futures.answer(ids[1], 0.001) is None
    ids[0] = line.submit(0, b"0", _saying("0", done))
    assert line.submit(0, b"0", _saying("again", done)) == ids[0]
    assert [await _text(futures, ids[n]) for n in range(4)] == done == ["0", "1", "2", "3"]
    assert await futures.answer(ids[0], TIMEOUT_S) is await futures.answer(ids[0], TIMEOUT_S)
    assert line.submit(0, b"0", _saying("later", done)) == ids[0]
    with pytest.raises(UsageError, match="another content"):
        line.submit(0, b"other", _saying("other", done))
    assert await _text(futures, line.submit(4, b"4", _saying("4", done))) == "4"
    assert len(done) == 5
    await line.close()
