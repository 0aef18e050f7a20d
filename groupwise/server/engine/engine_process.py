"""The engine as the HTTP process sees it: a child process that it starts, calls, monitors and ends.

Two threads serve the calling event loop, so neither can block the other. The first starts the process, reads its messages and monitors it
until it is gone. This thread lives as long as the process, because the kernel sends the parent-death signal when the parent's thread ends.
The second thread writes, because an engine that does not read would block the writer. Futures connect both threads with the callers.

The process may end in several ways: it crashed, it was killed, its event loop was silent, a call outlasted its deadline, or `close` was
called. In each case its descendants are killed and the process is reaped first; only then does every call fail with `EngineLost` and the
reason. A successor may therefore start at once.
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
from groupwise.core.processes.output import Output
from groupwise.core.processes.process_tree import MARK, describe_exit, has_ended, kill_process_tree
from groupwise.core.types import Prompt
from groupwise.engine.models.memory import REMEDY
from groupwise.server.engine.engine_protocol import (
    EngineLost,
    GroupSampleRequest,
    Opened,
    OpenRun,
    Plan,
    Probe,
    Sampled,
    Saved,
    StepDone,
)
from groupwise.server.engine.messages import (
    CANCELLED_METHODS,
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
    "sample": 600.0,  # a long group on a CPU, queued while all slots are in use
    "models.open": 1800.0,  # as open
    "models.sample": 600.0,  # as sample
    "parts.open": 1800.0,  # as open
    "parts.generate": 600.0,  # as sample
    "parts.plan": 120.0,  # reads descriptions of a model, perhaps from a slow disk
    "partial": 30.0,  # reads from memory and waits only for the event loop, like the next three
    "token_texts": 30.0,
    "metrics_of": 30.0,
    "tokens_of": 30.0,
    "tokenizer_files": 60.0,  # writes and reads a few megabytes
    "probe": 30.0,
    "step": 3600.0,  # learns a large batch on a CPU
    "save": 900.0,  # all weights and the optimiser's state onto a slow disk
    "close_run": 1800.0,  # the same, and final weights
    "close": 10.0,  # anything not released by then is killed
}
"""Time limit of a call in seconds, by method; others have that of `step`. They are generous: they end calls that would never end."""
GRACE = 30.0
"""Seconds that an unanswered call may stay open, while the loop still beats, after its deadline. After that the call counts as hung and the
engine is killed.
"""
SILENCE_LIMIT = 60.0
"""Longest time in seconds without a beat. Even on a busy machine the loop never computes nearly as long between two beats."""
START_LIMIT = 300.0
"""Seconds until the first beat. Importing the libraries takes seconds, or a minute from a network disk."""

_BEAT_EVERY = 1.0
"""Longest interval between beats in seconds; it is shorter if the silence limit is short."""
_CHECK_INTERVAL = 0.2
"""Seconds between two checks of the limits, and of whether the engine has ended while another process holds its socket open."""
_EXIT_GRACE = 1.0
"""Seconds that a process gets to exit by itself after its connection has ended, so that we see its own exit code."""
_END_LIMIT = 10.0
"""Seconds that killed processes may take to end (they may hang in the kernel)."""
_EXIT_POLL = 0.005
"""Seconds between two checks for the end of a process that is about to end."""
_ENVIRONMENT = {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
"""Print the stack if a native library crashes, and do not buffer output."""
_CLOSED = "The engine was closed."

Log = Callable[[logging.LogRecord], None]


def log_here(record: logging.LogRecord) -> None:
    """Pass a log record of the engine to the loggers of this process."""
    log = logging.getLogger(record.name)
    if log.isEnabledFor(record.levelno):
        log.handle(record)


@dataclass(slots=True)
class _PendingCall:
    """A call that the engine has not answered, even if its caller no longer waits."""

    method: str
    deadline: float
    limit: float
    answer: Future[bytes] = field(default_factory=Future[bytes])
    overdue_since: float | None = None
    """Time of the first beat after the deadline. Until then a hang is the event loop's, not the call's."""


class EngineProcess:
    """A `groupwise.server.engine.engine_protocol.Engine` in a process of its own. Call `start` first, once.

    Every call raises the errors of the engine (a GroupwiseError unchanged, any other error as RunError), `CallTimedOutError`, and
    `EngineLost`.
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
        """`factory` (`package.module:function`) creates the engine in its process; `environment` is added to the environment of this
        process.

        All times are in seconds: `silence_limit` without a beat; `limits` by method, overriding `LIMITS`; `grace` after those limits;
        `start_limit` until the engine is ready. `log` receives the engine's log records; it is called in a thread.
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
        self._pending: dict[int, _PendingCall] = {}
        self._reason: str | None = None
        """Why calls are no longer possible; None while they are."""
        self._stop_reason: str | None = None
        """Why this side ends the engine; None if it does not."""
        self._ready: Future[None] = Future()
        self._ended: Future[str] = Future()
        self._closing: asyncio.Task[None] | None = None
        self._beat: Beat | None = None
        self._beat_at = time.monotonic()
        ours, self._theirs = socket.socketpair()
        self._channel = MessageChannel(ours)
        self._process: Popen[bytes] | None = None
        self._output: Output | None = None
        self._outbox: queue.SimpleQueue[Call | Cancel | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write_calls, name="engine writer", daemon=True)
        self._thread = threading.Thread(target=self._supervise, name="engine", daemon=True)

    async def start(self) -> EngineProcess:
        """Start the process and wait until the engine is ready; returns this object.

        Raises the factory's errors, and EngineLost if the process cannot be started or has ended. After an error or a cancellation no
        process is left.
        """
        self._thread.start()
        try:
            await asyncio.wrap_future(self._ready)
        except BaseException:
            self._request_stop(_CLOSED)
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
        """The latest beat; None before the first."""
        return self._beat

    @property
    def reason(self) -> str | None:
        """How the engine ended; None while it can be called."""
        return self._reason

    async def ended(self) -> str:
        """Wait until the engine and all its descendants are gone; returns the reason."""
        return await asyncio.shield(asyncio.wrap_future(self._ended))

    async def open(self, request: OpenRun) -> Opened:
        """See `Engine.open`."""
        return await self.call("open", request)

    async def sample(self, request: GroupSampleRequest) -> Sampled:
        """See `Engine.sample`."""
        return await self.call("sample", request)

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
            await asyncio.Event().wait()  # after `close` the end of the process is expected
        return EngineLost(reason)

    async def close(self) -> None:
        """Ask the engine to release its resources, then end it and all its descendants, and wait until they are gone. May be repeated."""

        async def end() -> None:
            try:
                if self._reason is None:
                    with suppress(GroupwiseError, TimeoutError):  # it is ended in any case
                        await asyncio.wait_for(self.call("close"), self._limits["close"])
            finally:
                self._request_stop(_CLOSED)
                await self.ended()

        if self._closing is None:
            self._closing = asyncio.create_task(end())
        await asyncio.shield(self._closing)  # a cancelled caller does not stop the end

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the engine by name, for engines with more methods than `Engine`.

        Cancelling the wait cancels the call if it changes nothing (`CANCELLED_METHODS`); otherwise the call continues.
        """
        limit = self._limits.get(method, self._limits["step"])
        pending = _PendingCall(method, time.monotonic() + limit, limit)
        number = next(self._numbers)
        call = Call(number, method, pending.deadline, pack(arguments))
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
            if method in CANCELLED_METHODS:
                self._outbox.put(Cancel(number))
            raise

    def _request_stop(self, reason: str) -> None:
        """Stop the engine by ending its connection. The first reason given is kept."""
        if self._stop_reason is None:
            self._stop_reason = reason
        self._channel.end()

    # --- methods that run in the threads -----------------------------------------------------------

    def _write_calls(self) -> None:
        while (message := self._outbox.get()) is not None:
            with suppress(OSError):  # the engine has ended, and the other thread reports why
                self._channel.send(message)

    def _supervise(self) -> None:
        """Start the engine, handle its messages while it lives, then fail all open calls with the reason of its end."""
        try:
            reason = self._run_process()
        except BaseException as error:  # noqa: BLE001 — callers would wait forever
            reason = f"The engine sent what cannot be read:\n{explain(error)}"
        self._outbox.put(None)
        if self._writer.ident is not None:
            self._writer.join()
        self._channel.close()
        with self._lock:
            self._reason = reason
            pending, self._pending = self._pending, {}
        _set_exception(self._ready, EngineLost(reason))
        for call in pending.values():
            _set_exception(call.answer, EngineLost(reason))
        self._ended.set_result(reason)

    def _run_process(self) -> str:
        """Start the engine, handle its messages, and on any return or error reap it and all its descendants. Returns how it ended."""
        beat_every = min(_BEAT_EVERY, self._silence_limit / 4)
        level = logging.getLogger("groupwise").getEffectiveLevel()
        module = "groupwise.server.engine.child_process"
        try:
            with self._theirs:  # afterwards only the engine holds this end, so its end is noticed
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
            self._handle_messages(process)
        finally:
            self._channel.end()
            exit_description = self._reap(process)
        last_output = self._output.last_output()
        if self._stop_reason is not None:
            return (
                self._stop_reason
                if self._stop_reason == _CLOSED
                else self._stop_reason + last_output
            )
        return f"The engine ended: {exit_description}{last_output}"

    def _handle_messages(self, process: Popen[bytes]) -> None:
        """Handle messages until the engine is gone or is to be ended."""
        self._beat_at = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            while self._stop_reason is None:
                # Before the socket is read, so that its last messages are read.
                ended = has_ended(process)
                if selector.select(0 if ended else _CHECK_INTERVAL):
                    try:
                        messages = self._channel.receive_available()
                    except EOFError:
                        return
                    for message in messages:
                        self._handle_message(message)
                elif ended:  # a descendant holds the socket open
                    return
                hangs = self._find_hang()
                if hangs is not None and self._stop_reason is None:
                    self._stop_reason = hangs

    def _handle_message(self, message: Beat | Answered | Failed | LogRecordMessage) -> None:
        match message:
            case Beat():
                self._beat, self._beat_at = message, time.monotonic()
                with suppress(InvalidStateError):  # it was ready before
                    self._ready.set_result(None)
                for pending in self._pending_calls():
                    if pending.overdue_since is None and self._beat_at > pending.deadline:
                        pending.overdue_since = self._beat_at
            case LogRecordMessage(record):
                try:
                    self._log(record)
                except Exception:  # noqa: BLE001 — a failing log handler must not affect the run; reported as the standard library does
                    logging.Handler().handleError(record)
            case Answered(number, body):
                pending = self._take_pending(number)
                if pending is not None:
                    with suppress(InvalidStateError):  # its caller no longer waits
                        pending.answer.set_result(body)
            case Failed(number, error):
                pending = self._take_pending(number)
                failed_future = self._ready if number == MAKING else pending and pending.answer
                if failed_future is not None:
                    _set_exception(failed_future, unpack_error(error))

    def _take_pending(self, number: int) -> _PendingCall | None:
        with self._lock:
            return self._pending.pop(number, None)

    def _pending_calls(self) -> list[_PendingCall]:
        with self._lock:
            return [*self._pending.values()]

    def _find_hang(self) -> str | None:
        """Why the engine has to be killed; None if it is healthy."""
        now = time.monotonic()
        silent = now - self._beat_at
        if self._beat is None:
            if silent < self._start_limit:
                return None
            return f"The engine was killed: it was not ready after {self._start_limit:g} s."
        if silent > self._silence_limit:
            methods = Counter(pending.method for pending in self._pending_calls())
            doing = ", ".join(f"{count} × {method}" for method, count in sorted(methods.items()))
            return (
                f"The engine was killed: nothing was heard of its event loop for {self._silence_limit:g} s, "
                f"with {doing or 'no call'} under way."
            )
        for pending in self._pending_calls():
            if pending.overdue_since is not None and now - pending.overdue_since > self._grace:
                return f"The engine was killed: `{pending.method}` was not done {self._grace:g} s after its limit of {pending.limit:g} s."
        return None

    def _reap(self, process: Popen[bytes]) -> str:
        """Kill the engine, unless it is about to end by itself, and all its descendants; returns how it ended."""
        deadline = time.monotonic() + (_EXIT_GRACE if self._stop_reason is None else 0.0)
        while not has_ended(process) and time.monotonic() < deadline:
            time.sleep(_EXIT_POLL)
        by_itself = has_ended(process)
        kill_process_tree(process.pid, self._mark)
        with suppress(TimeoutExpired):
            process.wait(_END_LIMIT)
        if not by_itself and self._stop_reason is None:
            return "it closed its connection."
        description = f"{describe_exit(process.returncode)}."
        return f"{description} {REMEDY}" if process.returncode == -signal.SIGKILL else description


def _set_exception(future: Future[Any], error: BaseException) -> None:
    """Raise `error` in the waiting caller, unless the future is already done."""
    with suppress(InvalidStateError):
        future.set_exception(error)
