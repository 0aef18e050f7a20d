"""Processes with their own model that the main process starts on this machine: the common part of learners and samplers.

A thread starts them and listens. It lives as long as they do, because the kernel's parent-death signal is bound to the thread that started
the child. A process's end is noticed by the end of its connection. The subclass decides what follows:
`groupwise.engine.distributed.learner_workers` ends all of them, `groupwise.engine.distributed.sampler_workers` replaces the one.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from subprocess import DEVNULL, PIPE, STDOUT, Popen, TimeoutExpired
from typing import Any

from groupwise.core.errors import RunError
from groupwise.core.processes.family import NO_GPU
from groupwise.core.processes.output import Output
from groupwise.engine.distributed.messages import (
    Alive,
    Answered,
    Failed,
    Leave,
    LogRecordMessage,
    MessageChannel,
    PeerSetup,
    Ready,
    Setup,
)
from groupwise.engine.distributed.rpc import ENVIRONMENT, Calls, reason_of, settle, setup_of
from groupwise.engine.distributed.torchrun import gpu_of

HERE = "127.0.0.1"
_END_LIMIT = 10.0
"""Seconds that killed processes may take to end (they may hang in the kernel)."""
_LAST_WORDS = 1.0
"""Seconds that a process may take to exit after its connection has ended."""

FromRank = Ready | Answered | Failed | LogRecordMessage | Alive
"""Messages that a rank sends."""


class Started(Calls):
    """`count` worker processes that each make the same object and host it.

    `called`: what one of them is called in messages; `first_gpu`: index of the GPU for the first one started here, if there are GPUs.
    """

    _look_every: float | None = None
    """Longest wait for messages, in seconds, before `_check_silence` is called; None: no limit."""

    def __init__(self, count: int, called: str, first_gpu: int = 0) -> None:
        super().__init__()
        self.count = count
        self._called = called
        self._first_gpu = first_gpu
        self._by_rank: dict[int, MessageChannel] = {}
        self._started: dict[int, Popen[bytes]] = {}
        self._outputs: dict[int, Output] = {}
        self._pids: dict[int, int] = {}
        self._made: Setup | None = None
        self._along: list[Started] = []
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run_thread, name=f"{called}s", daemon=True)

    async def make(self, factory: str, arguments: Mapping[str, Any]) -> None:
        """Like `groupwise.engine.distributed.forked_workers.Ranks.make`."""
        self._made = setup_of(factory, arguments)
        self._thread.start()
        await self._until_made()

    def make_now(self, factory: str, arguments: Mapping[str, Any]) -> None:
        """Like `make`, for code that is not async."""
        self._made = setup_of(factory, arguments)
        self._thread.start()
        self._until_made_now()

    def close(self) -> None:
        """See `Calls.close`. Processes that torchrun started end by themselves."""
        if self._fail_all(RunError("The model workers are closed.")):
            for line in [*self._by_rank.values()]:
                with suppress(OSError):
                    line.send(Leave())
            self._wake_thread()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._wake.close()

    def end(self, reason: RunError) -> None:
        """Fail running and future calls, and make the processes end, without waiting for that. May be called from any thread."""
        if self._fail_all(reason):
            self._wake_thread()

    def take_along(self, others: Started) -> None:
        """From now on, when these processes end, end the others too, with the same reason."""
        self._along.append(others)

    def _fail_all(self, reason: RunError) -> bool:
        first = super()._fail_all(reason)
        if first:
            for others in self._along:
                others.end(reason)
        return first

    def _wake_thread(self) -> None:
        with suppress(OSError):  # the thread has ended already
            self._wake.sendall(b".")

    def _begin_call(self) -> None:
        for output in [*self._outputs.values()]:
            output.begin_call()

    # --- defined by the subclasses ----------------------------------------------------------------

    def _open(self) -> None:
        """Start the processes."""
        raise NotImplementedError

    def _setup_of(self, rank: int) -> tuple[PeerSetup, list[socket.socket]]:
        """The setup of a rank, and the sockets to send with it."""
        raise NotImplementedError

    def _handle_end(self, rank: int) -> RunError | None:
        """Handle the end of a rank's connection. Returns an error if all must end, else None."""
        raise NotImplementedError

    def _accept_caller(self) -> None:
        """Called when the selector reports a socket that is not a rank's connection."""
        raise NotImplementedError

    def _check_silence(self, heard: set[int]) -> RunError | None:
        """Called after each wait for messages, with the ranks that sent any; returns an error if all must end, else None."""

    def _is_ready(self, rank: int) -> None:
        """Called when a rank has made its hosted object; the last one settles the wait of `make`."""
        if len(self._pids) == self.count:
            self._lines = [self._by_rank[each] for each in range(self.count)]
            settle(self._ready)

    # --- run by the thread -----------------------------------------------------------------------

    def _run_thread(self) -> None:
        reason = reason_of(self._listen)
        self._end_all()
        self._fail_all(reason)

    def _listen(self) -> RunError:
        """Start the processes and listen until they must end; returns the reason."""
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._open()
        while True:
            heard: set[int] = set()
            for key, _ in self._selector.select(self._look_every):
                if key.fileobj is self._woken:
                    return RunError("The model workers are closed.")
                if key.data is None:
                    self._accept_caller()
                    continue
                rank: int = key.data
                heard.add(rank)
                try:
                    messages = self._by_rank[rank].receive_available()
                except EOFError:
                    reason = self._handle_end(rank)
                    if reason is not None:
                        return reason
                    continue
                for message in messages:
                    self._take(rank, message)
            reason = self._check_silence(heard)
            if reason is not None:
                return reason

    def _take(self, rank: int, message: FromRank) -> None:
        match message:
            case Alive():
                pass  # a heartbeat only marks the rank as heard
            case Ready(processes):
                (self._pids[rank],) = processes
                self.processes = tuple(self._pids[each] for each in sorted(self._pids))
                self._is_ready(rank)
            case _:
                self._take_answer(message)

    def _start(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._started[rank] = self._popen(rank, theirs.fileno())
        self._outputs[rank] = Output(self._started[rank], f"{self._called} {rank + 1}")
        self._send_setup(rank, MessageChannel(ours))

    def _popen(self, rank: int, descriptor: int) -> Popen[bytes]:
        assert self._made is not None
        on_cpu = self._made.arguments["layout"]["device"] == "cpu"
        seen = NO_GPU if on_cpu else gpu_of(self._first_gpu + rank)
        words = (str(os.getpid()), str(descriptor))
        try:
            return Popen(
                [sys.executable, "-P", "-m", "groupwise.engine.distributed.peer", *words],
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=STDOUT,
                pass_fds=[descriptor],
                start_new_session=True,
                env={**self._environment_defaults(), **os.environ, **ENVIRONMENT, **seen},
            )
        except OSError as error:
            raise RunError(f"The model workers cannot be started: {error}") from error

    def _environment_defaults(self) -> dict[str, str]:
        """Defaults for the ranks' environment; the user's own environment takes precedence."""
        return {}

    def _send_setup(self, rank: int, line: MessageChannel) -> None:
        """Send a rank its setup."""
        setup, sockets = self._setup_of(rank)
        self._by_rank[rank] = line
        self._selector.register(line, selectors.EVENT_READ, rank)
        with suppress(OSError):  # the process has ended; its connection shows that
            line.send(setup, sockets)

    def _reap(self, rank: int) -> tuple[int | None, str]:
        """Exit code and last output of a process that was started here and whose connection has ended."""
        process = self._started[rank]
        with suppress(TimeoutExpired):
            process.wait(_LAST_WORDS)
        return process.returncode, self._outputs[rank].last_output()

    def _end_all(self) -> None:
        """Kill the processes started here, and close the connections to the others."""
        for process in self._started.values():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        for line in self._by_rank.values():
            line.end()
        for process in self._started.values():
            with suppress(TimeoutExpired):
                process.wait(_END_LIMIT)
        for output in self._outputs.values():
            output.join()
        for each in (*self._by_rank.values(), self._woken):
            each.close()
        self._selector.close()
