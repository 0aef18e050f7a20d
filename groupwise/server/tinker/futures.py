"""Calls that are answered later: a request gets an id at once, and its answer is fetched with the id as often as one likes.

A client sends a request, gets an id, and polls. Because it sends a request again when the connection is lost, each has a natural key,
and a second one with the same key and content gets the first one's id. The requests of one model form a `CallQueue`: they are applied
one after another in the order of their sequence numbers, in whatever order they arrive; a number that is missing holds up those after it.
Samples have no order.

An answer never changes. Memory is bounded: answers are dropped from the oldest, fetched ones first, and asking for a dropped one is
told apart from asking for one that never was. All of it lives in one event loop. Calls are in the journal before they are begun, and their
results before clients get them, so that a new process goes on with them (`restore`).
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

from groupwise.core.errors import GroupwiseError, RunError, UsageError
from groupwise.server.ledger.calls import CallRow, Outcome, StepRow
from groupwise.server.tinker.journal import Journal, NoJournal

log = logging.getLogger(__name__)

JSON = "application/json"
PROTOBUF = "application/x-protobuf"
GAP_PATIENCE = 600.0
"""Seconds; the client sends a request again for five minutes."""


@dataclass(frozen=True, slots=True)
class CallResult:
    """The result of a call."""

    body: bytes
    media_type: str = JSON
    note: Note | None = field(default=None, compare=False)
    """A note for the journal."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a call came to nothing."""

    message: str
    category: Literal["user", "server"]
    note: Note | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Note:
    """Changes that a call made to its model; calls without a note left it as it was."""

    kept: int | None = None
    """The call after which the model's state was kept."""
    step: StepRow | None = None


class LeftOut(RunError):
    """An update was left out, and the gradient cleared: that failed, but has changed something."""

    def __init__(self, message: str, note: Note) -> None:
        super().__init__(message)
        self.note = note


Work = Callable[[], Awaitable[CallResult]]


class AnswerGone(GroupwiseError):
    """The answer was dropped, or belongs to a server that has ended since."""

    code = "answer_gone"


class UnknownAnswer(UsageError):
    """No request was ever given this id."""

    code = "unknown_answer"


class NotKept(GroupwiseError):
    """The call cannot be written down at the moment; it may be sent again later."""

    code = "not_kept"


class TooManyCalls(GroupwiseError):
    """More calls wait than are taken; the same call may be sent again later."""

    code = "too_many_calls"


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is held at once."""

    answers: int = 20_000
    answer_bytes: int = 256 * 2**20
    waiting: int = 4096
    """Calls that wait or are under way, of all models together."""
    waiting_of_one: int = 3072
    """Limit for one caller, so that others' samples still find room if a model's first call never comes."""
    waiting_bytes: int = 512 * 2**20


Key = tuple[str, int]
"""The scope in which a call's number is unique, and the number."""


@dataclass(eq=False, slots=True)
class _Call:
    id: str
    key: Key
    digest: bytes
    size: int
    """Bytes of the request; then of the answer."""
    caller: str
    told: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there is a result, or will be none in this process."""
    settling: bool = False
    """True once the result is known and about to be written down."""
    result: CallResult | Failure | None = None
    kept: asyncio.Task[None] | None = None
    """Done when it is in the journal."""


class Futures:
    """All calls of a server and their answers."""

    def __init__(self, limits: Limits | None = None, journal: Journal | None = None) -> None:
        self._limits = limits or Limits()
        self._journal = journal or NoJournal()
        self._restored: dict[Key, str] = {}
        """Unfinished calls of an earlier process, by the keys with which they are begun again."""
        self._suspended = False
        self._boot = secrets.token_hex(4)
        self._issued = 0
        self._calls: dict[str, _Call] = {}
        self._by_key: dict[Key, _Call] = {}
        self._unfetched: dict[str, _Call] = {}
        """Answered calls from the oldest, as the next."""
        self._fetched: dict[str, _Call] = {}
        self._answer_bytes = 0
        self._waiting = 0
        self._waiting_bytes = 0
        self._waiting_of: Counter[str] = Counter()
        self.callers: dict[str, str] = {}
        """The id of the API key that opened each session. Sessions of an earlier process have no key, and share one part."""
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def waiting(self) -> int:
        """Calls that wait or are under way."""
        return self._waiting

    def earlier(self, key: Key, digest: bytes) -> str | None:
        """The id of the call with this key. UsageError if its content was another."""
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
        """A call of an earlier process. An unfinished one is begun by adding it again."""
        key = row.line, row.sequence
        call = _Call(row.id, key, row.digest, len(row.content or b""), self._caller_of(key))
        self._calls[call.id] = call
        self._begin_to_wait(call)
        if row.state == "waiting":
            self._restored[key] = call.id
            return
        self._by_key[key] = call
        assert row.body is not None
        assert row.media_type is not None
        if row.state == "answered":
            self._settle(call, CallResult(row.body, row.media_type))
        else:
            category = "user" if row.media_type == "user" else "server"
            self._settle(call, Failure(row.body.decode(), category))

    def abandon(self, id: str, error: Exception) -> None:
        """Fail a call of an earlier process, if it was not begun again."""
        call = self._calls[id]
        if self._restored.pop(call.key, None) is not None:
            self._by_key[call.key] = call
            self.fail(id, error)

    def add(
        self,
        key: Key,
        digest: bytes,
        size: int,
        *,
        wanted_next: bool = False,
        kind: str = "",
        content: bytes = b"",
    ) -> str:
        """A new call, not begun. TooManyCalls where too many wait, unless others wait for this one (`wanted_next`); NotKept where this
        process ends.

        `kind` and `content` say how it is begun again by another process.
        """
        if (restored := self._restored.pop(key, None)) is not None:
            self._by_key[key] = self._calls[restored]
            return restored
        if self._suspended:
            raise NotKept("The server is shutting down. Send this one again later.")
        caller = self._caller_of(key)
        full = (
            self._waiting >= self._limits.waiting
            or self._waiting_of[caller] >= self._limits.waiting_of_one
            or self._waiting_bytes + size > self._limits.waiting_bytes
        )
        if full and self._waiting and not wanted_next:
            raise TooManyCalls(
                f"{self._waiting} calls wait already, with {self._waiting_bytes} bytes. Send this one again later."
            )
        self._issued += 1
        call = _Call(f"f-{self._boot}-{self._issued}", key, digest, size, caller)
        self._calls[call.id] = self._by_key[key] = call
        self._begin_to_wait(call)
        if self._journal.durable:
            line, sequence = key
            session = line.partition(":")[0]
            row = CallRow(call.id, session, line, sequence, kind, digest, content)
            call.kept = self._task(self._journal.accept(row))
        return call.id

    async def kept(self, id: str, patience: float) -> None:
        """Return when a call is in the journal. NotKept after so many seconds."""
        call = self._calls.get(id)
        if call is None or call.kept is None:
            return
        done, _ = await asyncio.wait((call.kept,), timeout=patience)
        if not done:
            raise NotKept(
                "The server cannot write the call down at the moment. Send it again later."
            )
        call.kept.result()

    def begin(self, id: str, work: Work) -> None:
        """Do the work of a call beside whatever else is under way."""
        self._task(self.do(id, work))

    async def do(self, id: str, work: Work) -> None:
        """Do the work of a call, and keep its result."""
        call = self._calls[id]
        if call.kept is not None:
            await asyncio.shield(call.kept)
        await self._settled(call, await _outcome(work))

    def fail(self, id: str, error: Exception) -> None:
        """Answer a call that needs no work. Where another process will do it, it stays without an answer here."""
        call, failure = self._calls[id], _failure(error)
        if call.settling:
            return  # it was done just now
        if not self._journal.durable:
            self._settle(call, failure)
        elif not self._suspended:
            self._task(self._settled(call, failure))

    def suspend(self) -> None:
        """Stop, because this process ends: unfinished calls are left to the next process, and waiting clients are to ask that one."""
        self._suspended = True
        if self._journal.durable:
            for call in self._calls.values():
                call.told.set()

    async def _settled(self, call: _Call, result: CallResult | Failure) -> None:
        """Keep a call's result. Once begun it goes on even if the caller is cancelled: the result may be in the journal already."""
        call.settling = True
        await asyncio.shield(self._task(self._written(call, result)))

    async def _written(self, call: _Call, result: CallResult | Failure) -> None:
        if self._journal.durable:
            if call.kept is not None:
                await asyncio.shield(call.kept)
            await self._journal.settle(call.id, _for_journal(result))
        self._settle(call, result)

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def answer(self, id: str, patience: float) -> CallResult | Failure | None:
        """The answer, or None if there is none within `patience` seconds, or before this process ends. AnswerGone or UnknownAnswer
        where there will be none."""
        call = self._find(id)
        try:
            async with asyncio.timeout(patience):
                await call.told.wait()
        except TimeoutError:
            return None
        if self._unfetched.pop(id, None) is not None:
            self._fetched[id] = call
        return call.result

    async def close(self) -> None:
        """End what is under way."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin_to_wait(self, call: _Call) -> None:
        self._waiting += 1
        self._waiting_bytes += call.size
        self._waiting_of[call.caller] += 1

    def _caller_of(self, key: Key) -> str:
        return self.callers.get(key[0].partition(":")[0], "")

    def _find(self, id: str) -> _Call:
        if id in self._calls:
            return self._calls[id]
        boot, _, number = id.removeprefix("f-").partition("-")
        if not id.startswith("f-") or not number.isdecimal():
            raise UnknownAnswer(f"There is no request {id!r}.")
        if boot != self._boot:
            raise AnswerGone(f"The request {id} was made to a server that has ended since.")
        if int(number) > self._issued:
            raise UnknownAnswer(f"There is no request {id!r}.")
        raise AnswerGone(
            f"The answer to the request {id} is no longer kept: the last {self._limits.answers} are."
        )

    def _settle(self, call: _Call, result: CallResult | Failure) -> None:
        assert call.result is None, f"{call.id} has an answer already"
        self._waiting -= 1
        self._waiting_bytes -= call.size
        self._waiting_of[call.caller] -= 1
        call.size = len(result.body) if isinstance(result, CallResult) else len(result.message)
        call.result = result
        call.told.set()
        self._unfetched[call.id] = call
        self._answer_bytes += call.size
        self._let_go(but=call)

    def _let_go(self, but: _Call) -> None:
        """Drop the oldest answers until the rest fits; the newest stays, however large it is."""
        gone: list[str] = []
        while (
            len(self._fetched) + len(self._unfetched) > self._limits.answers
            or self._answer_bytes > self._limits.answer_bytes
        ):
            oldest = next(iter((self._fetched or self._unfetched).values()))
            if oldest is but:
                break
            self._fetched.pop(oldest.id, None)
            self._unfetched.pop(oldest.id, None)
            self._answer_bytes -= oldest.size
            del self._calls[oldest.id]
            del self._by_key[oldest.key]
            gone.append(oldest.id)
        if gone and self._journal.durable:
            self._task(self._journal.forget(gone))


@dataclass(frozen=True, slots=True)
class _Turn:
    id: str
    work: Work | Exception
    """The work to do, or the error that refused it."""


class CallQueue:
    """The calls of one model, in the order of their sequence numbers, from 0.

    If a number is missing for `patience` seconds, the calls that wait for it fail: the client will not send it any more.
    """

    def __init__(
        self, name: str, futures: Futures, *, patience: float = GAP_PATIENCE, first: int = 0
    ) -> None:
        """`first`: the number of the call that is to be done next."""
        self.name = name
        self._futures = futures
        self._patience = patience
        self._turns: dict[int, _Turn] = {}
        self._next = first
        self._worker: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def pending(self) -> int:
        """Calls that wait for their turn or are under way."""
        return len(self._turns)

    def submit(self, sequence: int, content: bytes, work: Work | Exception, kind: str = "") -> str:
        """The id of the call with this number; its work is begun when all numbers before it are done.

        An exception instead of work is its answer when its turn comes: a refused request has used its number, too.
        UsageError if the number was used for something else, AnswerGone where its answer is no longer kept.
        """
        key = (self.name, sequence)
        digest = hashlib.sha256(kind.encode() + content).digest()
        if (earlier := self._futures.earlier(key, digest)) is not None:
            return earlier
        if sequence < self._next:
            raise AnswerGone(
                f"Request {sequence} of {self.name} has been applied; its answer is no longer kept."
            )
        wanted = sequence == self._next
        id = self._futures.add(
            key, digest, len(content), wanted_next=wanted, kind=kind, content=content
        )
        self._turns[sequence] = _Turn(id, work)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.get_running_loop().create_task(self._work())
        return id

    async def close(self) -> None:
        """End the call under way, and answer those that wait for their turn."""
        self._stop_timer()
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
        self._fail_all(f"The model {self.name} is no longer there: its session has ended.")

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        missing = self._next
        self._next = max(self._turns) + 1
        self._fail_all(
            f"Request {missing} of {self.name} has not come within {self._patience:g} seconds, so those after it cannot be applied. Go "
            "on from the last saved state in a new training client."
        )

    def _fail_all(self, reason: str) -> None:
        for sequence in sorted(self._turns):
            self._futures.fail(self._turns.pop(sequence).id, UsageError(reason))

    async def _work(self) -> None:
        self._stop_timer()
        while self._next in self._turns:
            turn = self._turns[self._next]
            await self._futures.do(turn.id, _work_of(turn))
            del self._turns[self._next]
            self._next += 1
        if self._turns:
            self._timer = asyncio.get_running_loop().call_later(self._patience, self._give_up)


def _work_of(turn: _Turn) -> Work:
    work = turn.work
    if not isinstance(work, Exception):
        return work

    async def refused() -> CallResult:
        raise work

    return refused


def _for_journal(result: CallResult | Failure) -> Outcome:
    note = result.note
    changed, kept = note is not None, None if note is None else note.kept
    step = None if note is None else note.step
    if isinstance(result, CallResult):
        return Outcome("answered", changed, result.media_type, result.body, kept, step)
    return Outcome("failed", changed, result.category, result.message.encode(), kept, step)


async def _outcome(work: Work) -> CallResult | Failure:
    try:
        return await work()
    # Whatever goes wrong must reach the client that waits for this answer, and must not end the line of its model.
    except Exception as error:  # noqa: BLE001
        return _failure(error)


def _failure(error: Exception) -> Failure:
    if isinstance(error, LeftOut):
        return Failure(str(error), "server", error.note)
    if isinstance(error, UsageError):
        return Failure(str(error), "user")
    if isinstance(error, GroupwiseError):
        return Failure(str(error), "server")
    log.error("a call failed", exc_info=error)
    return Failure(f"The server failed at this call: {type(error).__name__}.", "server")
