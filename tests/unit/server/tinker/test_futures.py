"""Calls that are answered later: in the order of their numbers, once, and with answers that never change; memory is bounded."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from groupwise.core.errors import RunError, UsageError
from groupwise.server.ledger.calls import Outcome
from groupwise.server.ledger.writer import Ledger
from groupwise.server.tinker.futures import (
    JSON,
    AnswerFunction,
    AnswerGone,
    CallQueue,
    Futures,
    Limits,
    TooManyCalls,
    UnknownAnswer,
    failed_outcome,
)

TIMEOUT_S = 10.0


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncGenerator[Ledger]:
    opened = Ledger.open(tmp_path / "server.db")
    yield opened
    await opened.close()


@pytest.fixture
def futures(ledger: Ledger) -> Futures:
    return Futures(ledger)


def _submit(
    queue: CallQueue, number: int, work: AnswerFunction | Exception, content: bytes = b"11"
) -> str:
    return queue.submit(number, content, work, "kind")


def _answering(text: str, done: list[str] | None = None) -> AnswerFunction:
    async def work() -> Outcome:
        await asyncio.sleep(0)
        if done is not None:
            done.append(text)
        return Outcome("answered", JSON, text.encode())

    return work


def _failing(error: Exception) -> AnswerFunction:
    async def work() -> Outcome:
        raise error

    return work


async def _outcome(futures: Futures, id: str) -> Outcome:
    answer = await futures.wait_for_answer(id, TIMEOUT_S)
    assert answer is not None
    return answer


async def _text(futures: Futures, id: str) -> str:
    answer = await _outcome(futures, id)
    assert answer.state == "answered"
    return answer.body.decode()


async def _message(futures: Futures, id: str) -> str:
    answer = await _outcome(futures, id)
    assert answer.state == "failed"
    return answer.body.decode()


async def test_a_queue_runs_one_call_at_a_time_and_queues_run_in_parallel(futures: Futures) -> None:
    running, most, others = 0, 0, asyncio.Event()

    async def work() -> Outcome:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await others.wait()
        running -= 1
        return Outcome("answered", JSON, b"")

    queue = CallQueue("a", futures)
    ids = [_submit(queue, n, work) for n in range(3)]
    assert await _text(futures, _submit(CallQueue("b", futures), 0, _answering("x"))) == "x"
    others.set()
    assert ([await _text(futures, id) for id in ids], most) == ([""] * 3, 1)


async def test_a_failed_call_reports_its_error_and_does_not_block_later_calls(
    futures: Futures, caplog: pytest.LogCaptureFixture
) -> None:
    queue = CallQueue("m", futures)
    with caplog.at_level(logging.ERROR):
        usage = _submit(queue, 0, _failing(UsageError("yours")))
        run = _submit(queue, 1, _failing(RunError("ours")))
        bug = _submit(queue, 2, _failing(KeyError("secret")))
        refused = _submit(queue, 3, UsageError("refused before"))
        after = _submit(queue, 4, _answering("after"))
        assert await _outcome(futures, usage) == failed_outcome("yours", "user")
        assert await _outcome(futures, run) == failed_outcome("ours", "server")
        outcome = await _outcome(futures, bug)
    assert (outcome.state, outcome.media_type) == ("failed", "server")
    assert b"secret" not in outcome.body
    assert "secret" in caplog.text
    assert await _outcome(futures, refused) == failed_outcome("refused before", "user")
    assert await _text(futures, after) == "after"


async def test_a_number_that_never_comes(futures: Futures) -> None:
    queue = CallQueue("m", futures, gap_timeout=0.01)
    ids = [_submit(queue, n, _answering(str(n))) for n in (0, 2, 3)]
    assert await _text(futures, ids[0]) == "0"
    for id in ids[1:]:
        assert "Request 1 of m" in await _message(futures, id)
    with pytest.raises(AnswerGone):
        _submit(queue, 1, _answering("too late"))
    assert await _text(futures, _submit(queue, 4, _answering("4"))) == "4"


async def test_answers_are_dropped_from_the_oldest_fetched_ones_first(ledger: Ledger) -> None:
    futures = Futures(ledger, Limits(answers=3))
    queue = CallQueue("m", futures)
    ids = [_submit(queue, n, _answering(str(n))) for n in range(3)]
    assert [await _text(futures, ids[n]) for n in (2, 1)] == ["2", "1"]
    assert await _text(futures, _submit(queue, 3, _answering("3"))) == "3"
    assert await _text(futures, ids[0]) == "0"
    with pytest.raises(AnswerGone, match="Request 2 of m"):
        _submit(queue, 2, _answering("twice"))
    for id, error in (
        (ids[2], AnswerGone),
        (ids[0].rpartition("-")[0] + "-99", UnknownAnswer),
        ("nonsense", UnknownAnswer),
        ("f-0-1", AnswerGone),
    ):
        with pytest.raises(error):
            await futures.wait_for_answer(id, TIMEOUT_S)
    futures = Futures(ledger, Limits(answer_bytes=10))
    queue = CallQueue("m", futures)
    small = _submit(queue, 0, _answering("1234"))
    assert len(await _text(futures, _submit(queue, 1, _answering("x" * 100)))) == 100
    with pytest.raises(AnswerGone):
        await futures.wait_for_answer(small, TIMEOUT_S)


async def test_calls_of_one_caller_that_wait_leave_room_to_others(ledger: Ledger) -> None:
    futures = Futures(ledger, Limits(waiting_of_one=2))
    futures.callers |= {"s-1": "mine", "s-2": "mine", "s-3": "another"}
    for session in ("s-1", "s-2"):
        _submit(CallQueue(f"{session}:train:0", futures), 1, _answering("1"))
    with pytest.raises(TooManyCalls):
        _submit(CallQueue("s-1:train:1", futures), 1, _answering("1"))
    _submit(CallQueue("s-3:train:0", futures), 1, _answering("1"))


@pytest.mark.parametrize("limits", [Limits(waiting=2), Limits(waiting_bytes=4)])
async def test_calls_that_wait_are_bounded_but_the_one_they_wait_for_is_taken(
    ledger: Ledger, limits: Limits
) -> None:
    futures = Futures(ledger, limits)
    queue = CallQueue("m", futures)
    _submit(queue, 1, _answering("1"))
    last = _submit(queue, 2, _answering("2"))
    with pytest.raises(TooManyCalls):
        _submit(queue, 3, _answering("3"))
    _submit(queue, 0, _answering("0"))
    assert await _text(futures, last) == "2"
    assert await _text(futures, _submit(queue, 3, _answering("3"))) == "3"


async def test_closing_answers_all_who_wait(futures: Futures) -> None:
    queue, never = CallQueue("m", futures), asyncio.Event()

    async def work() -> Outcome:
        await never.wait()
        return Outcome("answered", JSON, b"")

    ids = [_submit(queue, n, work) for n in (0, 1, 3)]
    waiting = asyncio.create_task(futures.wait_for_answer(ids[0], TIMEOUT_S))
    await asyncio.sleep(0.001)
    await queue.close()
    answer = await waiting
    assert answer is not None
    assert answer.state == "failed"
    for id in ids:
        assert "its session has ended" in await _message(futures, id)
    await futures.close()


async def test_calls_are_done_in_the_order_of_their_numbers_and_once(futures: Futures) -> None:
    queue, done = CallQueue("m", futures, gap_timeout=TIMEOUT_S), list[str]()
    ids = {n: _submit(queue, n, _answering(str(n), done)) for n in (3, 1, 2)}
    assert await futures.wait_for_answer(ids[1], 0.001) is None
    ids[0] = _submit(queue, 0, _answering("0", done))
    assert _submit(queue, 0, _answering("again", done)) == ids[0]
    assert [await _text(futures, ids[n]) for n in range(4)] == done == ["0", "1", "2", "3"]
    assert await futures.wait_for_answer(ids[0], TIMEOUT_S) is await futures.wait_for_answer(
        ids[0], TIMEOUT_S
    )
    assert _submit(queue, 0, _answering("later", done)) == ids[0]
    with pytest.raises(UsageError, match="another content"):
        _submit(queue, 0, _answering("other", done), b"other")
    assert await _text(futures, _submit(queue, 4, _answering("4", done))) == "4"
    assert len(done) == 5
    await queue.close()
