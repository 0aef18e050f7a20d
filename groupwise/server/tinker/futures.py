"""Calls that are answered later: a request gets an id at once, and the client fetches its answer with the id, any number of times.

A client sends a request, gets an id, and polls. It repeats the request if the connection is lost, so each request has a natural key: a
second request with the same key and content gets the first one's id. The requests of one model form a `CallQueue`: they are applied one
after another in the order of their sequence numbers, regardless of the order of arrival. A missing number blocks the calls after it until a
timeout. Samples have no order.

An answer never changes. Memory is bounded: the oldest answers are dropped, fetched ones first. A request for a dropped answer and a request
for an answer that never existed get different errors. All of this runs in one event loop. Calls are written to the ledger before they
start, and outcomes before clients receive them, so a new process can continue them (`restore`).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal

from groupwise.core.errors import GroupwiseError, UsageError
from groupwise.core.waiting import wait_at_most
from groupwise.server.ledger import calls
from groupwise.server.ledger.calls import CallRow, Outcome
from groupwise.server.ledger.writer import Ledger

log = logging.getLogger(__name__)

JSON = "application/json"
PROTOBUF = "application/x-protobuf"
GAP_TIMEOUT = 600.0
"""Seconds that a call queue waits for a missing number: twice the five minutes for which the client repeats a request."""

AnswerFunction = Callable[[], Awaitable[Outcome]]


class AnswerGone(GroupwiseError):
    """The answer was dropped, or belonged to a server that has since ended."""

    code = "answer_gone"


class UnknownAnswer(UsageError):
    """No request was ever given this id."""

    code = "unknown_answer"


class LedgerUnavailable(GroupwiseError):
    """The call cannot be written to the ledger at the moment; the client may send it again later."""

    code = "not_kept"


class TooManyCalls(GroupwiseError):
    """The queue of calls is full; the client may send the same call again later."""

    code = "too_many_calls"


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper limits on calls and answers in memory."""

    answers: int = 20_000
    answer_bytes: int = 256 * 2**20
    waiting: int = 4096
    """Calls waiting or in progress, of all models together."""
    waiting_of_one: int = 3072
    """Limit per API key, so that samples of others still find room if the first call of a model never arrives."""
    waiting_bytes: int = 512 * 2**20


CallKey = tuple[str, int]
"""The queue (or other scope) in which a call's number is unique, and the number."""


@dataclass(eq=False, slots=True)
class _Call:
    id: str
    key: CallKey
    digest: bytes
    size: int
    """Size in bytes: of the request while it waits, then of the answer."""
    caller: str
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there is an outcome, or when this process will not produce one."""
    finishing: bool = False
    """True once the outcome is known and about to be written to the ledger."""
    outcome: Outcome | None = None
    persisted: asyncio.Task[None] | None = None
    """Done when the call is in the ledger; None if it was already there when this process started."""


class Futures:
    """All calls of a server and their answers."""

    def __init__(self, ledger: Ledger, limits: Limits | None = None) -> None:
        self._ledger = ledger
        self._limits = limits or Limits()
        self._restored: dict[CallKey, str] = {}
        """Unfinished calls of an earlier process; the key identifies the call when it is added again."""
        self._suspended = False
        self._boot = secrets.token_hex(4)
        self._issued = 0
        self._calls: dict[str, _Call] = {}
        self._by_key: dict[CallKey, _Call] = {}
        self._unfetched: dict[str, _Call] = {}
        """Answered calls, the oldest first; likewise `_fetched`."""
        self._fetched: dict[str, _Call] = {}
        self._answer_bytes = 0
        self._waiting = 0
        self._waiting_bytes = 0
        self._waiting_of: Counter[str] = Counter()
        self.callers: dict[str, str] = {}
        """API key id of the caller that opened each session. Sessions of an earlier process have no key and share one quota."""
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def waiting(self) -> int:
        """Calls waiting or in progress."""
        return self._waiting

    def find_repeated(self, key: CallKey, digest: bytes) -> str | None:
        """The id of an earlier call with this key; None if there is none. UsageError if its content was different."""
        call = self._by_key.get(key)
        if call is None:
            return None
        if call.digest != digest:
            raise UsageError(
                "A request with the same sequence number, but another content, was sent before. A number is used once; the request "
                "that came first stands."
            )
        return call.id

    def restore(self, row: CallRow) -> None:
        """Register a call of an earlier process. An unfinished one starts when it is added again."""
        call = self._new_call(row.id, (row.line, row.sequence), row.digest, len(row.content or b""))
        if row.state == "waiting":
            self._restored[call.key] = call.id
            return
        assert row.media_type is not None
        assert row.body is not None
        self._by_key[call.key] = call
        self._mark_answered(call, Outcome(row.state, row.media_type, row.body))

    def abandon(self, id: str, error: Exception) -> None:
        """Fail a call of an earlier process if it was not started again."""
        call = self._calls[id]
        if self._restored.pop(call.key, None) is not None:
            self._by_key[call.key] = call
            self.fail(id, error)

    def add(
        self, key: CallKey, digest: bytes, kind: str, content: bytes, *, wanted_next: bool = False
    ) -> str:
        """Register a new call without starting it. Raises TooManyCalls if too many calls wait, unless other calls wait for this one
        (`wanted_next`); LedgerUnavailable if this process is shutting down.

        `kind` and `content` are stored so that another process can start the call again.
        """
        if (id := self._restored.pop(key, None)) is not None:
            self._by_key[key] = self._calls[id]
            return id
        if self._suspended:
            raise LedgerUnavailable("The server is shutting down. Send this one again later.")
        full = (
            self._waiting >= self._limits.waiting
            or self._waiting_of[self._caller_of(key)] >= self._limits.waiting_of_one
            or self._waiting_bytes + len(content) > self._limits.waiting_bytes
        )
        if full and self._waiting and not wanted_next:
            raise TooManyCalls(
                f"{self._waiting} calls wait already, with {self._waiting_bytes} bytes. Send this one again later."
            )
        self._issued += 1
        call = self._new_call(f"f-{self._boot}-{self._issued}", key, digest, len(content))
        self._by_key[key] = call
        queue, sequence = key
        row = CallRow(call.id, queue.partition(":")[0], queue, sequence, kind, digest, content)
        call.persisted = self._spawn(self._ledger.do_when_writable(calls.insert_call, row))
        return call.id

    async def wait_until_persisted(self, id: str, timeout: float) -> None:
        """Wait until a call is in the ledger. Raises LedgerUnavailable if that takes longer than `timeout` seconds."""
        call = self._calls.get(id)
        if call is None or call.persisted is None:
            return
        done, _ = await asyncio.wait((call.persisted,), timeout=timeout)
        if not done:
            raise LedgerUnavailable(
                "The server cannot write the call down at the moment. Send it again later."
            )
        call.persisted.result()

    def start(self, id: str, work: AnswerFunction) -> None:
        """Start the work of a call in a task of its own."""
        self._spawn(self.run(id, work))

    async def run(self, id: str, work: AnswerFunction | Exception) -> None:
        """Do the work of a call once it is in the ledger, and record its outcome. An exception in place of the work is recorded as a
        failure.
        """
        call = self._calls[id]
        if call.persisted is not None:
            await asyncio.shield(call.persisted)
        try:
            if isinstance(work, Exception):
                raise work
            outcome = await work()
        # Any error must reach the client that waits for this answer, and must not stop the queue of its model.
        except Exception as error:  # noqa: BLE001
            outcome = _outcome_of_error(error)
        await self._write_outcome(call, outcome)

    def fail(self, id: str, error: Exception) -> None:
        """Fail a call that needs no work. If this process is shutting down, the next process handles the call."""
        call = self._calls[id]
        if not (call.finishing or self._suspended):
            self._spawn(self._write_outcome(call, _outcome_of_error(error)))

    def suspend(self) -> None:
        """Stop, because this process is shutting down. Unfinished calls are left to the next process, and waiting clients are told to ask
        again there.
        """
        self._suspended = True
        for call in self._calls.values():
            call.settled.set()

    async def _write_outcome(self, call: _Call, outcome: Outcome) -> None:
        """Write a call's outcome to the ledger, then publish it to its client. This continues even if the caller is cancelled, because the
        outcome may already be in the ledger.
        """

        async def write() -> None:
            if call.persisted is not None:
                await asyncio.shield(call.persisted)
            await self._ledger.do_when_writable(calls.record_outcome, call.id, outcome)
            self._mark_answered(call, outcome)

        call.finishing = True
        await asyncio.shield(self._spawn(write()))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def wait_for_answer(self, id: str, timeout: float) -> Outcome | None:
        """The answer, or None if there is none within `timeout` seconds or before this process shuts down. Raises AnswerGone or
        UnknownAnswer if there will never be one.
        """
        if id not in self._calls:
            boot, _, number = id.removeprefix("f-").partition("-")
            well_formed = id.startswith("f-") and number.isdecimal()
            if not well_formed or (boot == self._boot and int(number) > self._issued):
                raise UnknownAnswer(f"There is no request {id!r}.")
            if boot != self._boot:
                raise AnswerGone(f"The request {id} was made to a server that has ended since.")
            raise AnswerGone(
                f"The answer to the request {id} is no longer kept: the last {self._limits.answers} are."
            )
        call = self._calls[id]
        if not await wait_at_most(timeout, call.settled):
            return None
        if self._unfetched.pop(id, None) is not None:
            self._fetched[id] = call
        return call.outcome

    async def close(self) -> None:
        """Cancel all tasks."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _new_call(self, id: str, key: CallKey, digest: bytes, size: int) -> _Call:
        """Register a waiting call."""
        call = self._calls[id] = _Call(id, key, digest, size, self._caller_of(key))
        self._waiting += 1
        self._waiting_bytes += size
        self._waiting_of[call.caller] += 1
        return call

    def _caller_of(self, key: CallKey) -> str:
        return self.callers.get(key[0].partition(":")[0], "")

    def _mark_answered(self, call: _Call, outcome: Outcome) -> None:
        """Mark a call as answered. Drops the oldest answers until the rest fits; the newest always stays, even if it is larger than the
        limit.
        """
        assert call.outcome is None, f"{call.id} has an answer already"
        self._waiting -= 1
        self._waiting_bytes -= call.size
        self._waiting_of[call.caller] -= 1
        call.size = len(outcome.body)
        call.outcome = outcome
        call.settled.set()
        self._unfetched[call.id] = call
        self._answer_bytes += call.size
        evicted: list[str] = []
        while (
            len(self._fetched) + len(self._unfetched) > self._limits.answers
            or self._answer_bytes > self._limits.answer_bytes
        ):
            oldest = next(iter((self._fetched or self._unfetched).values()))
            if oldest is call:
                break
            self._fetched.pop(oldest.id, None)
            self._unfetched.pop(oldest.id, None)
            self._answer_bytes -= oldest.size
            del self._calls[oldest.id]
            del self._by_key[oldest.key]
            evicted.append(oldest.id)
        if evicted:
            self._spawn(self._ledger.do_when_writable(calls.delete_answers, evicted))


class CallQueue:
    """The calls of one model, in the order of their sequence numbers, starting at 0.

    If a number is missing for `gap_timeout` seconds, the calls after it fail: the client will not send the missing one any more.
    """

    def __init__(
        self, name: str, futures: Futures, *, gap_timeout: float = GAP_TIMEOUT, first: int = 0
    ) -> None:
        """`first`: the number of the next call to be done."""
        self.name = name
        self._futures = futures
        self._gap_timeout = gap_timeout
        self._queued: dict[int, tuple[str, AnswerFunction | Exception]] = {}
        """Id and work of each call that is waiting or in progress, by sequence number."""
        self._next = first
        self._worker: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def pending(self) -> int:
        """Calls waiting or in progress."""
        return len(self._queued)

    def submit(
        self,
        sequence: int,
        content: bytes,
        work: AnswerFunction | Exception,
        kind: str,
        identity: bytes | None = None,
    ) -> str:
        """Queue the call with this number and return its id; its work starts when all calls before it are done.

        `identity`: the bytes that a repeated request shares, if that is not the whole content.

        An exception in place of the work becomes the answer when the call's turn comes: a refused request has used its number, too.
        UsageError if the number was used for a different request, AnswerGone if its answer is no longer kept.
        """
        key = (self.name, sequence)
        digest = digest_of(kind, content if identity is None else identity)
        if (repeated := self._futures.find_repeated(key, digest)) is not None:
            return repeated
        if sequence < self._next:
            raise AnswerGone(
                f"Request {sequence} of {self.name} has been applied; its answer is no longer kept."
            )
        id = self._futures.add(key, digest, kind, content, wanted_next=sequence == self._next)
        self._queued[sequence] = (id, work)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.get_running_loop().create_task(self._run_calls())
        return id

    async def close(self) -> None:
        """Cancel the call in progress, and fail the ones that wait."""
        self._stop_timer()
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
        self._fail_all(f"The model {self.name} is no longer there: its session has ended.")

    async def _run_calls(self) -> None:
        """Do the calls that are next in order. If calls remain after a gap, start the timer for the missing number."""
        self._stop_timer()
        while self._next in self._queued:
            id, work = self._queued[self._next]
            await self._futures.run(id, work)
            del self._queued[self._next]
            self._next += 1
        if self._queued:
            self._timer = asyncio.get_running_loop().call_later(
                self._gap_timeout, self._skip_missing
            )

    def _skip_missing(self) -> None:
        missing = self._next
        self._next = max(self._queued) + 1
        self._fail_all(
            f"Request {missing} of {self.name} has not come within {self._gap_timeout:g} seconds, so those after it cannot be applied. Go "
            "on from the last saved state in a new training client."
        )

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fail_all(self, reason: str) -> None:
        for sequence in sorted(self._queued):
            self._futures.fail(self._queued.pop(sequence)[0], UsageError(reason))


def digest_of(kind: str, identity: bytes) -> bytes:
    """Distinguishes a repeated request from a different one with the same number."""
    return hashlib.sha256(kind.encode() + identity).digest()


def failed_outcome(message: str, category: Literal["user", "server"]) -> Outcome:
    """The outcome of a call that failed and left its model unchanged."""
    return Outcome("failed", category, message.encode())


def _outcome_of_error(error: Exception) -> Outcome:
    if isinstance(error, UsageError):
        return failed_outcome(str(error), "user")
    if isinstance(error, GroupwiseError):
        return failed_outcome(str(error), "server")
    log.error("a call failed", exc_info=error)
    return failed_outcome(f"The server failed at this call: {type(error).__name__}.", "server")
