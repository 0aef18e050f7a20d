"""The engine as the HTTP process sees it: a process that it starts, calls, watches and ends.

Two threads serve the calling event loop, so that neither can hold the other up. One starts the process, reads its messages and watches
it until it is gone; it lives as long as the process does, because the kernel sends the parent-death signal when the parent's thread ends.
The other writes, since an engine that does not read would block the writer. Futures connect them with the callers.

However the process ends (it crashed, it was killed, its event loop was silent, a call outlasted its deadline, `close`), first everything
that it started is killed and it is reaped; then every call fails with `EngineLost` and the reason, so a successor may start at once.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import queue
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from subprocess import DEVNULL, PIPE, STDOUT, Popen, TimeoutExpired
from typing import Any

from groupwise.core.errors import GroupwiseError
from groupwise.core.plugins import explain
from groupwise.core.processes.family import MARK, end_family, has_ended, how_it_ended
from groupwise.core.processes.output import Output
from groupwise.core.types import Prompt
from groupwise.engine.models.memory import REMEDY
from groupwise.server.engine.engine_protocol import (
    EngineLost,
    Opened,
    OpenRun,
    Plan,
    Probe,
    Sampled,
    SampleOrder,
    Saved,
    StepDone,
)
from groupwise.server.engine.messages import (
    CANCELLED_VERBS,
    MAKING,
    Answered,
    Beat,
    Call,
    Cancel,
    Failed,
    LogRecordMessage,
    MessageChannel,
    pack,
    unpack,
    unpack_error,
)

LIMITS: Mapping[str, float] = {
    "open": 1800.0,  # loads a model, perhaps from the hub or a slow disk, and starts ranks
    "sample": 600.0,  # a long group on a CPU, behind a full set of slots
    "models.open": 1800.0,  # as open
    "models.sample": 600.0,  # as sample
    "parts.open": 1800.0,  # as open
    "parts.generate": 600.0,  # as sample
    "parts.plan": 120.0,  # reads descriptions of a model, perhaps from a slow disk
    "partial": 30.0,  # looks into memory; waits for the loop alone, as the next three do
    "token_texts": 30.0,
    "metrics_of": 30.0,
    "tokens_of": 30.0,
    "tokenizer_files": 60.0,  # writes and reads a few megabytes
    "probe": 30.0,
    "step": 3600.0,  # learns a large batch on a CPU
    "save": 900.0,  # all weights and the optimiser's state onto a slow disk
    "close_run": 1800.0,  # the same, and final weights
    "close": 10.0,  # what it has not released by then is killed
}
"""Seconds that a call may take, generously: they end what would otherwise never end. What is not named here has that of `step`."""
GRACE = 30.0
"""Seconds for which the loop may beat after a call's deadline without its answer: then the call hangs, and costs the engine."""
SILENCE_LIMIT = 60.0
"""Seconds without a beat: what a loop may compute between two of them, with the whole machine busy, is far less."""
START_LIMIT = 300.0
"""Seconds until the first beat: importing what holds a model takes seconds, on a network disk a minute."""

_BEAT_EVERY = 1.0
"""Seconds between beats; short limits of silence have more of them."""
_TICK = 0.2
"""Seconds between two looks at limits, and at an engine whose socket something else holds open."""
_LAST_BREATH = 1.0
"""Seconds that a process gets to end by itself after its connection did, so that its exit code is its own."""
_END_LIMIT = 10.0
"""Seconds that killed processes may take to end (they may hang in the kernel)."""
_LOOK_EVERY = 0.005
"""Seconds between two looks at whether the process has ended, when it is about to."""
_ENVIRONMENT = {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
"""Options that print the stack of a crash in a library, and lose no output."""
_CLOSED = "The engine was closed."

Log = Callable[[logging.LogRecord], None]


def log_here(record: logging.LogRecord) -> None:
    """Log what the engine logged in this process."""
    log = logging.getLogger(record.name)
    if log.isEnabledFor(record.levelno):
        log.handle(record)


@dataclass(slots=True)
class _Pending:
    """A call that the engine has not answered, even if its caller no longer waits."""

    verb: str
    deadline: float
    limit: float
    answer: Future[bytes] = field(default_factory=Future[bytes])
    overdue_since: float | None = None
    """When the loop first beat after the deadline: before that it is the loop that hangs, if anything does."""


class EngineProcess:
    """A `groupwise.server.engine.engine_protocol.Engine` in a process of its own. Call `start` first, once.

    Every call raises what the engine raises (an error of ours as it is, any other as RunError), `CallTimedOutError`, and `EngineLost`.
    """

    def __init__(
        self,
        factory: str,
        *,
        environment: Mapping[str, str] | None = None,
        silence_limit: float = SILENCE_LIMIT,
        log: Log = log_here,
        limits: Mapping[str, float] | None = None,
        grace: float = GRACE,
        start_limit: float = START_LIMIT,
    ) -> None:
        """`factory` (`package.module:function`) makes the engine in its process; `environment` is added to that of this process.

        Seconds: `silence_limit` without a beat; `limits` by verb, in place of some of `LIMITS`; `grace` beyond them; `start_limit` until
        it is ready. `log` receives the engine's log records, in a thread.
        """
        self._factory = factory
        self._environment = environment or {}
        self._silence_limit = silence_limit
        self._log = log
        self._limits = {**LIMITS, **(limits or {})}
        self._grace = grace
        self._start_limit = start_limit
        self._mark = secrets.token_hex(8)
        self._numbers = itertools.count(MAKING + 1)
        self._lock = threading.Lock()
        self._pending: dict[int, _Pending] = {}
        self._reason: str | None = None
        """Why nothing can be called any more."""
        self._stop: str | None = None
        """Why this side ends the engine."""
        self._ready: Future[None] = Future()
        self._gone: Future[str] = Future()
        self._closing: asyncio.Task[None] | None = None
        self._beat: Beat | None = None
        self._beat_at = time.monotonic()
        ours, self._theirs = socket.socketpair()
        self._line = MessageChannel(ours)
        self._process: Popen[bytes] | None = None
        self._output: Output | None = None
        self._outbox: queue.SimpleQueue[Call | Cancel | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="engine writer", daemon=True)
        self._thread = threading.Thread(target=self._attend, name="engine", daemon=True)

    async def start(self) -> EngineProcess:
        """Start the process, and wait until the engine is there; returns this object.

        Raises what the factory raises, and EngineLost if the process cannot be started or has ended. Nothing is left then, as after
        cancelling.
        """
        self._thread.start()
        try:
            await asyncio.wrap_future(self._ready)
        except BaseException:
            self._end(_CLOSED)
            await self.ended()
            raise
        return self

    @property
    def process(self) -> int:
        """The process id."""
        assert self._process is not None
        return self._process.pid

    @property
    def beat(self) -> Beat | None:
        """The latest one."""
        return self._beat

    @property
    def reason(self) -> str | None:
        """How the engine ended; None as long as it can be called."""
        return self._reason

    async def ended(self) -> str:
        """Wait until the engine is gone with all that it started, for whatever reason, and say which."""
        return await asyncio.shield(asyncio.wrap_future(self._gone))

    async def open(self, order: OpenRun) -> Opened:
        """See `Engine.open`."""
        return await self.call("open", order)

    async def sample(self, order: SampleOrder) -> Sampled:
        """See `Engine.sample`."""
        return await self.call("sample", order)

    async def partial(self, draw: int) -> tuple[str, ...]:
        """See `Engine.partial`."""
        return await self.call("partial", draw)

    async def token_texts(self, token_ids: tuple[int, ...]) -> tuple[str, ...]:
        """See `Engine.token_texts`."""
        return await self.call("token_texts", token_ids)

    async def step(self, plan: Plan) -> StepDone:
        """See `Engine.step`."""
        return await self.call("step", plan)

    async def metrics_of(self, step: int) -> Mapping[str, float]:
        """See `Engine.metrics_of`."""
        return await self.call("metrics_of", step)

    async def save(self) -> Saved:
        """See `Engine.save`."""
        return await self.call("save")

    async def tokens_of(self, prompt: Prompt) -> tuple[int, ...]:
        """See `Engine.tokens_of`."""
        return await self.call("tokens_of", prompt)

    async def tokenizer_files(self) -> Mapping[str, bytes]:
        """See `Engine.tokenizer_files`."""
        return await self.call("tokenizer_files")

    async def close_run(self, finished: bool) -> str:
        """See `Engine.close_run`."""
        return await self.call("close_run", finished)

    async def probe(self) -> Probe:
        """See `Engine.probe`."""
        return await self.call("probe")

    async def lost(self) -> EngineLost:
        """See `Engine.lost`."""
        reason = await self.ended()
        if reason == _CLOSED:
            await asyncio.Event().wait()  # `close` was called, so no caller must hear of it
        return EngineLost(reason)

    async def close(self) -> None:
        """Have the engine release what it holds, then end it with all that it started, and wait until all are gone. May be repeated."""

        async def end() -> None:
            try:
                if self._reason is None:
                    with suppress(GroupwiseError, TimeoutError):  # it is ended all the same
                        await asyncio.wait_for(self.call("close"), self._limits["close"])
            finally:
                self._end(_CLOSED)
                await self.ended()

        if self._closing is None:
            self._closing = asyncio.create_task(end())
        await asyncio.shield(self._closing)

    async def call(self, verb: str, *arguments: Any) -> Any:
        """Call a method of the engine by its name, for engines with more methods than `Engine`.

        Cancelling the wait cancels the call if it changes nothing (`CANCELLED_VERBS`); otherwise it goes on.
        """
        limit = self._limits.get(verb, self._limits["step"])
        pending = _Pending(verb, time.monotonic() + limit, limit)
        number = next(self._numbers)
        call = Call(number, verb, pending.deadline, pack(arguments))
        with self._lock:
            if self._reason is not None:
                raise EngineLost(self._reason)
            self._pending[number] = pending
        if self._output is not None:
            self._output.begin_call()
        self._outbox.put(call)
        try:
            return unpack(await asyncio.wrap_future(pending.answer))
        except asyncio.CancelledError:
            if verb in CANCELLED_VERBS:
                self._outbox.put(Cancel(number))
            raise

    def _end(self, reason: str) -> None:
        """Have the engine ended, if it has not."""
        if self._stop is None:
            self._stop = reason
        self._line.end()

    # --- what runs in the threads -----------------------------------------------------------------

    def _write(self) -> None:
        while (message := self._outbox.get()) is not None:
            with suppress(OSError):  # it has ended, and the other thread hears why
                self._line.send(message)

    def _attend(self) -> None:
        """Start the engine, listen as long as it lives, and fail open calls with the reason of its end."""
        try:
            reason = self._run_process()
        except BaseException as error:  # noqa: BLE001 — callers would wait for ever
            reason = f"The engine sent what cannot be read:\n{explain(error)}"
        self._outbox.put(None)
        if self._writer.ident is not None:
            self._writer.join()
        self._line.close()
        with self._lock:
            self._reason = reason
            pending, self._pending = self._pending, {}
        _fail(self._ready, EngineLost(reason))
        for each in pending.values():
            _fail(each.answer, EngineLost(reason))
        self._gone.set_result(reason)

    def _run_process(self) -> str:
        """Start the engine, and listen until it is gone with all that it started, however this returns. Returns how it ended."""
        beat_every = min(_BEAT_EVERY, self._silence_limit / 4)
        level = logging.getLogger("groupwise").getEffectiveLevel()
        module = "groupwise.server.engine.child_process"
        try:
            with self._theirs:  # from then on the engine's alone, so that its end is noticed
                number = self._theirs.fileno()
                arguments = (number, self._factory, os.getpid(), level, beat_every)
                process = Popen(
                    [*(sys.executable, "-P", "-m", module), *map(str, arguments)],
                    stdin=DEVNULL,
                    stdout=PIPE,
                    stderr=STDOUT,
                    pass_fds=[number],
                    start_new_session=True,
                    env={**os.environ, **_ENVIRONMENT, **self._environment, MARK: self._mark},
                )
        except OSError as error:
            return f"The engine cannot be started: {error}"
        self._process = process
        try:
            self._output = Output(process, "engine")
            self._writer.start()
            self._listen(process)
        finally:
            self._line.end()
            how = self._reap(process)
        words = self._output.last_words()
        if self._stop is not None:
            return self._stop if self._stop == _CLOSED else self._stop + words
        return f"The engine ended: {how}{words}"

    def _listen(self, process: Popen[bytes]) -> None:
        """Take messages until the engine is gone or is to go."""
        self._beat_at = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self._line, selectors.EVENT_READ)
            while self._stop is None:
                over = has_ended(
                    process
                )  # before the look into the socket: its last words are read
                if selector.select(0 if over else _TICK):
                    try:
                        messages = self._line.receive_available()
                    except EOFError:
                        return
                    for message in messages:
                        self._take(message)
                elif over:  # something that it started holds the socket open
                    return
                hangs = self._what_hangs()
                if hangs is not None and self._stop is None:
                    self._stop = hangs

    def _take(self, message: Beat | Answered | Failed | LogRecordMessage) -> None:
        match message:
            case Beat():
                self._beat, self._beat_at = message, time.monotonic()
                with suppress(InvalidStateError):  # it was ready before
                    self._ready.set_result(None)
                for pending in self._under_way():
                    if pending.overdue_since is None and self._beat_at > pending.deadline:
                        pending.overdue_since = self._beat_at
            case LogRecordMessage(record):
                try:
                    self._log(record)
                except Exception:  # noqa: BLE001 — a handler of the log has no part in the run; reported as the standard library does
                    logging.Handler().handleError(record)
            case Answered(number, body):
                pending = self._take_pending(number)
                if pending is not None:
                    with suppress(InvalidStateError):  # its caller no longer waits
                        pending.answer.set_result(body)
            case Failed(number, error):
                pending = self._take_pending(number)
                failed = self._ready if number == MAKING else pending and pending.answer
                if failed is not None:
                    _fail(failed, unpack_error(error))

    def _take_pending(self, number: int) -> _Pending | None:
        with self._lock:
            return self._pending.pop(number, None)

    def _under_way(self) -> list[_Pending]:
        with self._lock:
            return [*self._pending.values()]

    def _what_hangs(self) -> str | None:
        """Why the engine has to be killed; None if it is well."""
        now = time.monotonic()
        silent = now - self._beat_at
        if self._beat is None:
            if silent < self._start_limit:
                return None
            return f"The engine was killed: it was not ready after {self._start_limit:g} s."
        if silent > self._silence_limit:
            verbs = Counter(pending.verb for pending in self._under_way())
            doing = ", ".join(f"{count} × {verb}" for verb, count in sorted(verbs.items()))
            return (
                f"The engine was killed: nothing was heard of its event loop for {self._silence_limit:g} s, "
                f"with {doing or 'no call'} under way."
            )
        for pending in self._under_way():
            if pending.overdue_since is not None and now - pending.overdue_since > self._grace:
                return f"The engine was killed: `{pending.verb}` was not done {self._grace:g} s after its limit of {pending.limit:g} s."
        return None

    def _reap(self, process: Popen[bytes]) -> str:
        """Kill the engine, unless it is about to end by itself, and all that it started; how it ended."""
        deadline = time.monotonic() + (_LAST_BREATH if self._stop is None else 0.0)
        while not has_ended(process) and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY)
        by_itself = has_ended(process)
        end_family(process.pid, self._mark)
        with suppress(TimeoutExpired):
            process.wait(_END_LIMIT)
        if not by_itself and self._stop is None:
            return "it closed its connection."
        how = f"{how_it_ended(process.returncode)}."
        return f"{how} {REMEDY}" if process.returncode == -signal.SIGKILL else how


def _fail(future: Future[Any], error: BaseException) -> None:
    """Make the waiting caller raise it, unless the future is already done."""
    with suppress(InvalidStateError):
        future.set_exception(error)
