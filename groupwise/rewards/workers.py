"""Reward functions in processes of their own that can be killed and replaced at any time.

The run asks `RewardWorkers`; each worker has one thread here that starts its process, sends it one group at a time,
and waits for the answer. The worker says when it begins a function; one that then takes longer than the time limit is
killed with everything that it started. One that crashes is noticed. In both cases the group comes back unscored with the
reason, and a new worker takes the next one.
Threads take groups in the order in which they were asked for, and no answer depends on which worker gave it.

A worker is a fresh interpreter (`python -m groupwise.rewards.workers`) on a socket pair, not a fork of this process and
not multiprocessing: it holds no threads, locks or GPU of the run, and never runs the user's script a second time.
It sees no GPU, has one computing thread, no standard input and no Ctrl-C; what it prints goes to this module's log.
See `processes` for what ends with it and what does not.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pickle
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from groupwise.errors import RewardWorkerError
from groupwise.rewards.frames import FrameBuffer, send_frame
from groupwise.rewards.processes import MARK, end_family, has_ended, how_it_ended
from groupwise.rewards.scoring import GroupScore, ScoreRequest, unpicklable, unscored
from groupwise.rewards.text import CompletionText
from groupwise.rewards.threads import DaemonThreads
from groupwise.types import Prompt, from_json

logger = logging.getLogger(__name__)

METRICS_LIMIT_FACTOR = 10
"""`compute_metrics` sees a whole evaluation, so it may take so many times the limit of a group."""
START_ATTEMPTS = 3
"""How often a worker may crash while it starts before the run gives up."""
_LOOK_EVERY = 0.05
"""Seconds between two looks at whether a silent worker still lives. An answer never waits for it."""
_LAST_BREATH = 1.0
"""Seconds that a process gets to end by itself after its connection did, so that its exit code is its own."""
_REAP_LIMIT = 10.0
"""Seconds that a killed process may take to end (it may hang in the kernel, on a lost network disk)."""
_LINES_PER_CALL = 200
_LINE_LENGTH = 2000
_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONFAULTHANDLER": "1",
    "PYTHONUNBUFFERED": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class RewardWorkers:
    """Scores groups in worker processes; a `Scorer`.

    `factory` names a function (`package.module:function`); each worker calls it with `arguments`, which must be
    expressible as JSON, as keywords. It returns an object with `score(request, started) -> GroupScore` and
    `compute_metrics(prompts, completions, rows) -> dict`, each sync or async, such as a `RubricScorer`.
    """

    def __init__(
        self,
        factory: str,
        arguments: Mapping[str, Any],
        *,
        workers: int = 1,
        time_limit: float = 30.0,
        start_limit: float = 60.0,
    ) -> None:
        """Limits in seconds: `time_limit` for a reward function's call, `start_limit` for the start of a worker."""
        path = [str(folder) for folder in sys.path]
        setup = {"factory": factory, "arguments": dict(arguments), "sys_path": path}
        self._setup = json.dumps(setup).encode()
        self._start_limit = start_limit
        self._time_limit = time_limit
        self._count = workers
        self._slots: list[_Slot] = []
        self._threads: DaemonThreads[_Call] | None = None
        self._closed = False

    async def start(self) -> None:
        """Start the workers and wait until they are ready. Raises RewardWorkerError if one cannot be.

        Calling it is optional; the first call starts them too.
        """
        self._launched()
        for slot in self._slots:
            await asyncio.wrap_future(slot.ready)

    async def score(self, request: ScoreRequest) -> GroupScore:
        """Score one group. Raises RewardWorkerError only where no worker can be started or reached."""
        ended = await self._ask(request, self._time_limit)
        count = len(request.completions)
        match ended:
            case _Answered(message):
                score = from_json(GroupScore, json.dumps(message["score"]))
                if len(score.members) != count:
                    reason = (
                        f"the scorer gave {len(score.members)} verdicts for {count} completions"
                    )
                    return unscored(count, "failed", reason)
                return score
            case _TimedOut(reason):
                return unscored(count, "timed_out", reason)
            case _Died(reason):
                return unscored(count, "failed", reason)

    async def compute_metrics(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[CompletionText],
        rows: Sequence[dict[str, Any]],
    ) -> dict[str, Any]:
        """The task's metrics, as JSON values. Raises RewardWorkerError if they raise, hang or crash."""
        request = (list(prompts), list(completions), list(rows))
        ended = await self._ask(request, self._time_limit * METRICS_LIMIT_FACTOR)
        if not isinstance(ended, _Answered):
            raise RewardWorkerError(f"compute_metrics gave no answer: {ended.reason}")
        return ended.message["metrics"]

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

    async def _ask(self, request: Any, limit: float) -> _Answered | _TimedOut | _Died:
        call = _Call(_pickled(request), limit)
        ended = await asyncio.wrap_future(self._launched().submit(call))
        if isinstance(ended, _Answered) and "error" in ended.message:
            raise RewardWorkerError(f"A reward worker reports: {ended.message['error']}")
        return ended

    def _launched(self) -> DaemonThreads[_Call]:
        if self._closed:
            raise RewardWorkerError("The reward workers are closed.")
        if self._threads is None:
            self._slots = [
                _Slot(index, self._setup, self._start_limit) for index in range(self._count)
            ]
            self._threads = DaemonThreads(self._slots, "reward-worker")
        return self._threads


@dataclass(frozen=True, slots=True)
class _Call:
    payload: bytes
    limit: float


@dataclass(frozen=True, slots=True)
class _Answered:
    message: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _TimedOut:
    reason: str


@dataclass(frozen=True, slots=True)
class _Died:
    reason: str


class _Slot:
    """One place for a worker: the process that fills it now, and how it is replaced. Runs in one thread.

    The thread must live as long as the process, because the kernel's parent-death signal goes by threads.
    """

    def __init__(self, index: int, setup: bytes, start_limit: float) -> None:
        self.ready: Future[None] = Future()
        self._index = index
        self._setup = setup
        self._start_limit = start_limit
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._stopped = False
        self._broken: RewardWorkerError | None = None
        self._calls = 0

    def begin(self) -> None:
        """Start the first process; `ready` tells how that went."""
        try:
            self._start()
            self.ready.set_result(None)
        except BaseException as error:  # noqa: BLE001 — belongs to whoever waits for it
            self.ready.set_exception(error)

    def do(self, job: _Call) -> _Answered | _TimedOut | _Died:
        """Have one request answered; a process that did not survive it is replaced for the next."""
        process = self._living()
        self._calls += 1
        ended = process.ask(self._calls, job)
        if isinstance(ended, _Answered):
            return ended
        if self._stopped:
            ended = _Died("the reward workers were closed during the call")
        else:
            logger.warning("reward worker %d: %s", self._index, ended.reason)
        self._discard()
        return ended

    def end(self) -> None:
        """End the process."""
        self._discard()

    def stop(self) -> None:
        """End the process from another thread, whatever it is doing; no new one is started."""
        with self._lock:
            self._stopped = True
            if self._process is not None:
                self._process.kill()

    def _living(self) -> _Process:
        if self._process is not None and self._process.ended:
            self._discard()
        return self._process or self._start()

    def _start(self) -> _Process:
        if self._broken is not None:
            raise self._broken
        try:
            return self._started()
        except RewardWorkerError as error:
            self._broken = error
            self._discard()
            raise

    def _started(self) -> _Process:
        how = ""
        for _ in range(START_ATTEMPTS):
            process = self._spawned()
            ended = process.begin(self._setup, self._start_limit)
            match ended:
                case _Answered({"start_failed": message}):
                    raise RewardWorkerError(f"A reward worker cannot start: {message}")
                case _Answered():
                    return process
                case _TimedOut():
                    self._discard()
                    raise RewardWorkerError(
                        f"A reward worker was not ready after {self._start_limit:g} s. Look at what the task file "
                        f"does when it is imported.{process.last_words()}"
                    )
                case _Died(how):
                    self._discard()
                    how += process.last_words()
        raise RewardWorkerError(
            f"A reward worker crashed {START_ATTEMPTS} times while it started: {how}"
        )

    def _spawned(self) -> _Process:
        with self._lock:
            if self._stopped:
                raise RewardWorkerError("The reward workers are closed.")
            try:
                self._process = _Process(self._index)
            except OSError as error:
                raise RewardWorkerError(f"A reward worker cannot be started: {error}") from error
            return self._process

    def _discard(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.end()


class _Process:
    """One worker process: its socket, its output, and its end."""

    def __init__(self, index: int) -> None:
        self._mark = secrets.token_hex(8)
        self._running: str | None = None
        self._buffer = FrameBuffer()
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = self._popen(theirs)
        self._output = _Output(self._process, f"reward worker {index}")

    def _popen(self, theirs: socket.socket) -> subprocess.Popen[bytes]:
        number = theirs.fileno()
        return subprocess.Popen(
            [sys.executable, "-m", "groupwise.rewards.workers", str(number), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[number],
            start_new_session=True,
            env={**os.environ, **_ENVIRONMENT, MARK: self._mark},
        )

    @property
    def ended(self) -> bool:
        """Whether it is gone."""
        return has_ended(self._process)

    def begin(self, setup: bytes, limit: float) -> _Answered | _TimedOut | _Died:
        """Tell it what to be, and hear whether it is ready."""
        return self._exchange(setup, limit, lambda message: "running" not in message)

    def ask(self, number: int, call: _Call) -> _Answered | _TimedOut | _Died:
        """Send a request and wait for the answer that carries its number."""
        self._output.begin_call()
        self._running = None
        payload = number.to_bytes(8, "big") + call.payload
        return self._exchange(payload, call.limit, lambda answer: answer.get("number") == number)

    def last_words(self) -> str:
        """What it printed last, for a message."""
        return self._output.last_words()

    def kill(self) -> None:
        """Kill it and what it started. May be called from any thread while the process is not reaped."""
        if self._process.returncode is None:
            end_family(self._process.pid, self._mark)

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
        self, payload: bytes, limit: float, wanted: Callable[[dict[str, Any]], bool]
    ) -> _Answered | _TimedOut | _Died:
        deadline = time.monotonic() + limit
        try:
            self._socket.settimeout(limit)
            send_frame(self._socket, payload)
            while not wanted(message := self._receive(deadline)):
                if "running" in message:
                    self._running = message["running"]
                    deadline = time.monotonic() + limit
            return _Answered(message)
        except TimeoutError:
            return _TimedOut(f"the call took longer than {limit:g} s{self._while()}")
        except (OSError, EOFError):
            return self._death()
        except ValueError as error:
            return _Died(f"the reward worker sent no readable answer ({error}){self._while()}")

    def _receive(self, deadline: float) -> dict[str, Any]:
        """The next message. Raises TimeoutError, EOFError where the process is gone, ValueError for rubbish."""
        while (frame := self._buffer.take()) is None:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError
            self._receive_piece(min(remaining, _LOOK_EVERY))
        return json.loads(frame)

    def _receive_piece(self, patience: float) -> None:
        # Before the look into the socket: what it sent before it ended is still there to read. The end of
        # the stream alone would not do, because what the worker forked holds the socket open.
        ended = self.ended
        self._socket.settimeout(patience)
        try:
            piece = self._socket.recv(1 << 16)
        except TimeoutError:
            piece = None
        if piece == b"" or (piece is None and ended):
            raise EOFError
        self._buffer.add(piece or b"")

    def _death(self) -> _Died:
        deadline = time.monotonic() + _LAST_BREATH
        while not self.ended and time.monotonic() < deadline:
            time.sleep(0.005)
        by_itself = self.ended
        self.end()
        how = how_it_ended(self._process.returncode) if by_itself else "it closed its connection"
        return _Died(f"the reward worker ended during the call ({how}){self._while()}")

    def _while(self) -> str:
        return f"; `{self._running}` was running" if self._running else ""


class _Output:
    """Reads what a worker prints and logs it, a bounded amount for each call, so that it can never fill up."""

    def __init__(self, process: subprocess.Popen[bytes], prefix: str) -> None:
        assert process.stdout is not None
        self._stream = process.stdout
        self._prefix = prefix
        self._left = _LINES_PER_CALL
        self._tail: deque[str] = deque(maxlen=5)
        self._thread = threading.Thread(target=self._read, name=f"{prefix} output", daemon=True)
        self._thread.start()

    def begin_call(self) -> None:
        """Give the next call its share of lines."""
        self._left = _LINES_PER_CALL

    def last_words(self) -> str:
        """The last lines, for a message."""
        self.join()
        return (
            "".join(f"\n  {line}" for line in ("Its last output:", *self._tail))
            if self._tail
            else ""
        )

    def join(self) -> None:
        """Wait for the end of the output of a process that was killed."""
        self._thread.join(1.0)

    def _read(self) -> None:
        with self._stream as stream:
            pending = b""
            while piece := os.read(stream.fileno(), 1 << 16):
                *lines, pending = (pending + piece).split(b"\n")
                if len(pending) > _LINE_LENGTH:
                    lines, pending = [*lines, pending], b""
                self._log(lines)
            self._log([pending] if pending else [])

    def _log(self, lines: list[bytes]) -> None:
        for line in lines[: max(self._left, 0)]:
            text = line[:_LINE_LENGTH].decode(errors="replace").rstrip("\r")
            self._tail.append(text)
            logger.info("%s: %s", self._prefix, text)
        if self._left > 0 and len(lines) >= self._left:
            logger.info("%s: (the rest of this call's output is left out)", self._prefix)
        self._left -= len(lines)


def _pickled(request: Any) -> bytes:
    try:
        return pickle.dumps(request)
    except Exception as error:  # values of user classes may raise anything here
        culprits = unpicklable(request.columns) if isinstance(request, ScoreRequest) else []
        which = f" (column {', '.join(f'`{name}`' for name in culprits)})" if culprits else ""
        raise RewardWorkerError(
            f"A dataset value cannot be sent to the reward workers{which}: {error}. "
            "Keep plain values in the dataset and make the objects in the reward function."
        ) from error


if __name__ == "__main__":
    from groupwise.rewards.worker_process import main

    main(int(sys.argv[1]), int(sys.argv[2]))
