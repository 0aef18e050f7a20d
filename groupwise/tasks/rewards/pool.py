"""Worker processes that can be killed and replaced at any time: one slot for each, a shared queue, and time limits.

A `WorkerPool` has a thread in this process for each worker. The thread starts the process, sends it one request at a time, and
waits for the answer. The worker reports when it starts a piece of user code; if that takes longer than the call's limit, the worker
is killed with everything that it started. Crashes are detected too. In both cases the call ends with a reason, and a new worker
takes the next request. Threads take requests in the order of submission.

A worker is a fresh interpreter (`python -P -m groupwise.tasks.rewards.workers`) on a socket pair, not a fork of this process and
not multiprocessing: it holds no threads, locks or GPU of the run, and never runs the user's script a second time. With `-P` a
`random.py` in the working directory does not replace Python's; files there are found after everything else. It sees no GPU, has one
computing thread, no standard input and no Ctrl-C; what it prints goes to the log of `output`. `processes` describes which child
processes end with it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from groupwise.core.errors import RunError
from groupwise.core.processes.frames import FrameBuffer, send_frame
from groupwise.core.processes.output import Output
from groupwise.core.processes.process_tree import (
    ENVIRONMENT,
    MARK,
    describe_exit,
    has_ended,
    kill_process_tree,
)
from groupwise.core.processes.threads import DaemonThreads

logger = logging.getLogger(__name__)

START_ATTEMPTS = 3
"""Crashes of a starting worker after which the run ends with an error."""
_POLL_INTERVAL = 0.05
"""Seconds between two checks whether a silent worker is still alive. An answer is received at once in any case."""
_EXIT_GRACE = 1.0
"""Seconds that a process gets to end by itself after it closes its connection; if it does, its own exit code is reported."""
_REAP_LIMIT = 10.0
"""Seconds to wait for a killed process to end (it may hang in the kernel, for example on an unreachable network disk)."""


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """What messages about a pool's workers name, and the error raised if no worker can run."""

    name: str
    """`reward worker`."""
    error: type[RunError]
    start_key: str
    """The config's key of the limit for a start: `rewards.start_limit`."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The worker's message."""

    message: dict[str, Any]


@dataclass(frozen=True, slots=True)
class TimedOut:
    """User code took too long, and its process was killed."""

    reason: str


@dataclass(frozen=True, slots=True)
class Died:
    """The process ended by itself, or sent something unreadable."""

    reason: str


CallOutcome = Answered | TimedOut | Died


class WorkerPool:
    """Several workers of one kind that share a queue.

    `factory` names a function (`package.module:function`); each worker calls it with `arguments`, which must be expressible as
    JSON, as keywords, and passes requests to the returned object; see `groupwise.tasks.rewards.worker_process`.
    """

    def __init__(
        self,
        kind: WorkerKind,
        factory: str,
        arguments: Mapping[str, Any],
        *,
        workers: int,
        start_limit: float,
    ) -> None:
        """`start_limit` is in seconds, for the start of one worker."""
        path = [str(folder) for folder in sys.path]
        setup = {"factory": factory, "arguments": dict(arguments), "sys_path": path}
        self._kind = kind
        self._setup = json.dumps(setup).encode()
        self._start_limit = start_limit
        self._count = workers
        self._slots: list[_Slot] = []
        self._threads: DaemonThreads[_Call] | None = None
        self._closed = False

    async def start(self) -> None:
        """Start the workers and wait until they are ready; optional. Raises the kind's error if one cannot be."""
        self._threads_of_pool()
        for slot in self._slots:
            await asyncio.wrap_future(slot.ready)

    async def ask(
        self, payload: bytes, limit: float, repeat_limit: float | None = None
    ) -> CallOutcome:
        """Send a pickled request to a worker and return the outcome; `limit` is in seconds for each piece of user code that the
        worker names.

        `repeat_limit` is the limit of pieces that the worker reports as repeated; None means the same limit. Raises the kind's
        error if no worker can be started, or one reports that it cannot work.
        """
        outcome = await asyncio.wrap_future(
            self._threads_of_pool().submit(_Call(payload, limit, repeat_limit))
        )
        if isinstance(outcome, Answered) and "error" in outcome.message:
            raise self._kind.error(
                f"{_with_article(self._kind)} reports: {outcome.message['error']}"
            )
        return outcome

    async def close(self) -> None:
        """Kill the workers and all that they started, and wait until they are reaped."""
        self._closed = True
        threads, self._threads = self._threads, None
        if threads is None:
            return
        threads.close()
        for slot in self._slots:
            slot.stop()
        await asyncio.to_thread(threads.join, _REAP_LIMIT)

    def _threads_of_pool(self) -> DaemonThreads[_Call]:
        if self._closed:
            raise self._kind.error(f"The {self._kind.name}s are closed.")
        if self._threads is None:
            self._slots = [
                _Slot(self._kind, index, self._setup, self._start_limit)
                for index in range(self._count)
            ]
            self._threads = DaemonThreads(self._slots, self._kind.name.replace(" ", "-"))
        return self._threads


def _with_article(kind: WorkerKind) -> str:
    return f"{'An' if kind.name[0] in 'aeiou' else 'A'} {kind.name}"


@dataclass(frozen=True, slots=True)
class _Call:
    payload: bytes
    limit: float
    repeat_limit: float | None = None


class _Slot:
    """One slot for a worker: its current process, and how it is replaced. Runs in one thread.

    The thread must live as long as the process, because the kernel sends the parent-death signal when the parent thread ends.
    """

    def __init__(self, kind: WorkerKind, index: int, setup: bytes, start_limit: float) -> None:
        self.ready: Future[None] = Future()
        self._kind = kind
        self._index = index
        self._setup = setup
        self._start_limit = start_limit
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._stopped = False
        self._broken: RunError | None = None
        self._calls = 0

    def begin(self) -> None:
        """Start the first process; `ready` gets the result."""
        try:
            self._start_process()
            self.ready.set_result(None)
        except BaseException as error:  # noqa: BLE001 — raised in the caller that waits for it
            self.ready.set_exception(error)

    def do(self, job: _Call) -> CallOutcome:
        """Process one request; if the process does not survive it, a new one is started for the next."""
        if self._process is not None and self._process.has_ended:
            self._discard()
        process = self._process or self._start_process()
        self._calls += 1
        outcome = process.ask(self._calls, job)
        if isinstance(outcome, Answered):
            return outcome
        if self._stopped:
            outcome = Died(f"the {self._kind.name}s were closed during the call")
        else:
            logger.warning("%s %d: %s", self._kind.name, self._index, outcome.reason)
        self._discard()
        return outcome

    def end(self) -> None:
        """Kill the process."""
        self._discard()

    def stop(self) -> None:
        """Kill the process from another thread, at any moment; no new one is started."""
        with self._lock:
            self._stopped = True
            if self._process is not None:
                self._process.kill()

    def _start_process(self) -> _Process:
        if self._broken is not None:
            raise self._broken
        try:
            reason = ""
            for _ in range(START_ATTEMPTS):
                process = self._spawn()
                outcome = process.begin(self._setup, self._start_limit)
                match outcome:
                    case Answered({"start_failed": message}):
                        raise self._kind.error(
                            f"{_with_article(self._kind)} cannot start: {message}"
                        )
                    case Answered():
                        return process
                    case TimedOut():
                        self._discard()
                        raise self._kind.error(
                            f"{_with_article(self._kind)} was not ready after {self._start_limit:g} s, at a load of "
                            f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores. If the machine is slow or busy, raise "
                            f"{self._kind.start_key}; if not, look at what the task file does when it is imported."
                            f"{process.last_output()}"
                        )
                    case Died(reason):
                        self._discard()
                        reason += process.last_output()
            raise self._kind.error(
                f"{_with_article(self._kind)} crashed {START_ATTEMPTS} times while it started: {reason}"
            )
        except self._kind.error as error:
            self._broken = error
            self._discard()
            raise

    def _spawn(self) -> _Process:
        with self._lock:
            if self._stopped:
                raise self._kind.error(f"The {self._kind.name}s are closed.")
            try:
                self._process = _Process(self._kind, self._index)
            except OSError as error:
                message = f"{_with_article(self._kind)} cannot be started: {error}"
                raise self._kind.error(message) from error
            return self._process

    def _discard(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.end()


class _Process:
    """One worker process: its socket, its output, and its end."""

    def __init__(self, kind: WorkerKind, index: int) -> None:
        self._kind = kind
        self._mark = secrets.token_hex(8)
        self._running: str | None = None
        self._buffer = FrameBuffer()
        self._socket, worker_end = socket.socketpair()
        with worker_end:
            number = worker_end.fileno()
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "groupwise.tasks.rewards.workers",
                    str(number),
                    str(os.getpid()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[number],
                start_new_session=True,
                env={**os.environ, **ENVIRONMENT, MARK: self._mark},
            )
        self._output = Output(self._process, f"{kind.name} {index}")

    @property
    def has_ended(self) -> bool:
        """True if the process is gone."""
        return has_ended(self._process)

    def begin(self, setup: bytes, limit: float) -> CallOutcome:
        """Send the setup, and wait for the report that it is ready."""
        return self._exchange(setup, limit, lambda message: "running" not in message)

    def ask(self, number: int, call: _Call) -> CallOutcome:
        """Send a request and wait for the answer with its number."""
        self._output.begin_call()
        self._running = None
        payload = number.to_bytes(8, "big") + call.payload
        return self._exchange(
            payload,
            call.limit,
            lambda answer: answer.get("number") == number,
            call.limit if call.repeat_limit is None else call.repeat_limit,
        )

    def last_output(self) -> str:
        """The end of its printed output, for a message."""
        return self._output.last_output()

    def kill(self) -> None:
        """Kill it and everything it started. May be called from any thread until the process is reaped."""
        if self._process.returncode is None:
            kill_process_tree(self._process.pid, self._mark)

    def end(self) -> None:
        """Kill and reap it."""
        if self._process.returncode is not None:
            return
        self.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAP_LIMIT)
        self._socket.close()
        self._output.join()

    def _exchange(
        self,
        payload: bytes,
        limit: float,
        accepts: Callable[[dict[str, Any]], bool],
        repeat_limit: float = 0.0,
    ) -> CallOutcome:
        allowed = max(limit, repeat_limit)  # no user code is named yet
        deadline = time.monotonic() + allowed
        try:
            self._socket.settimeout(allowed)
            send_frame(self._socket, payload)
            while not accepts(message := self._receive(deadline)):
                if "running" in message:
                    self._running = message["running"]
                    allowed = repeat_limit if message.get("repeated") else limit
                    deadline = time.monotonic() + allowed
            return Answered(message)
        except TimeoutError:
            return TimedOut(f"the call took longer than {allowed:g} s{self._running_text()}")
        except (OSError, EOFError):
            deadline = time.monotonic() + _EXIT_GRACE
            while not self.has_ended and time.monotonic() < deadline:
                time.sleep(0.005)
            by_itself = self.has_ended
            self.end()
            reason = (
                describe_exit(self._process.returncode) if by_itself else "it closed its connection"
            )
            return Died(
                f"the {self._kind.name} ended during the call ({reason}){self._running_text()}"
            )
        except ValueError as error:
            return Died(
                f"the {self._kind.name} sent no readable answer ({error}){self._running_text()}"
            )

    def _receive(self, deadline: float) -> dict[str, Any]:
        """The next message. Raises TimeoutError, EOFError if the process has ended, ValueError for unreadable input."""
        while (frame := self._buffer.take()) is None:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError
            timeout = min(remaining, _POLL_INTERVAL)
            # Checked before reading, so everything that the process sent before it ended is still read. Waiting for the end
            # of the stream is not enough, because children that the worker forked keep the socket open.
            has_ended = self.has_ended
            self._socket.settimeout(timeout)
            try:
                piece = self._socket.recv(1 << 16)
            except TimeoutError:
                piece = None
            if piece == b"" or (piece is None and has_ended):
                raise EOFError
            self._buffer.add(piece or b"")
        return json.loads(frame)

    def _running_text(self) -> str:
        return f"; `{self._running}` was running" if self._running else ""
