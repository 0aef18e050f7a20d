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
from groupwise.core.processes.output import Output
from groupwise.core.processes.process_tree import NO_GPU
from groupwise.engine.distributed.messages import (
    CallFailure,
    CallResult,
    Heartbeat,
    LogRecordMessage,
    MessageChannel,
    RankSetup,
    Ready,
    Setup,
    Shutdown,
)
from groupwise.engine.distributed.rpc import (
    ENVIRONMENT,
    WorkerCalls,
    end_reason_of,
    make_setup,
    settle_future,
)
from groupwise.engine.distributed.torchrun import visible_gpu

LOCALHOST = "127.0.0.1"
_END_LIMIT = 10.0
"""Seconds that killed processes may take to end (they may hang in the kernel)."""
_EXIT_SECONDS = 1.0
"""Seconds that a process may take to exit after its connection has ended."""

RankMessage = Ready | CallResult | CallFailure | LogRecordMessage | Heartbeat
"""Messages that a rank sends."""


class SpawnedWorkers(WorkerCalls):
    """`count` worker processes that each make the same object and host it.

    `called`: what one of them is called in messages; `first_gpu`: index of the GPU for the first one started here, if there are GPUs.
    """

    _check_interval: float | None = None
    """Longest wait for messages, in seconds, before `_check_silence` is called; None: no limit."""

    def __init__(self, count: int, called: str, first_gpu: int = 0) -> None:
        super().__init__()
        self.count = count
        self._title = called
        self._first_gpu = first_gpu
        self._by_rank: dict[int, MessageChannel] = {}
        self._started: dict[int, Popen[bytes]] = {}
        self._outputs: dict[int, Output] = {}
        self._pids: dict[int, int] = {}
        self._setup: Setup | None = None
        self._linked: list[SpawnedWorkers] = []
        self._selector = selectors.DefaultSelector()
        self._wake_sender, self._wake_receiver = socket.socketpair()
        self._thread = threading.Thread(target=self._run_thread, name=f"{called}s", daemon=True)

    async def make(self, factory: str, arguments: Mapping[str, Any]) -> None:
        """Like `groupwise.engine.distributed.forked_workers.ForkedWorkers.make`."""
        self._setup = make_setup(factory, arguments)
        self._thread.start()
        await self._wait_until_made()

    def make_now(self, factory: str, arguments: Mapping[str, Any]) -> None:
        """Like `make`, for code that is not async."""
        self._setup = make_setup(factory, arguments)
        self._thread.start()
        self._wait_until_made_now()

    def close(self) -> None:
        """See `WorkerCalls.close`. Processes that torchrun started end by themselves."""
        if self._fail_all(RunError("The model workers are closed.")):
            for channel in [*self._by_rank.values()]:
                with suppress(OSError):
                    channel.send(Shutdown())
            self._wake_thread()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._wake_sender.close()

    def end(self, reason: RunError) -> None:
        """Fail running and future calls, and make the processes end, without waiting for that. May be called from any thread."""
        if self._fail_all(reason):
            self._wake_thread()

    def also_end(self, workers: SpawnedWorkers) -> None:
        """From now on, when these processes end, end the others too, with the same reason."""
        self._linked.append(workers)

    def _fail_all(self, reason: RunError) -> bool:
        newly_failed = super()._fail_all(reason)
        if newly_failed:
            for workers in self._linked:
                workers.end(reason)
        return newly_failed

    def _wake_thread(self) -> None:
        with suppress(OSError):  # the thread has ended already
            self._wake_sender.sendall(b".")

    def _note_call(self) -> None:
        for output in [*self._outputs.values()]:
            output.begin_call()

    # --- defined by the subclasses ----------------------------------------------------------------

    def _launch_workers(self) -> None:
        """Start the processes."""
        raise NotImplementedError

    def _setup_of(self, rank: int) -> tuple[RankSetup, list[socket.socket]]:
        """The setup of a rank, and the sockets to send with it."""
        raise NotImplementedError

    def _handle_disconnect(self, rank: int) -> RunError | None:
        """Handle the end of a rank's connection. Returns an error if all must end, else None."""
        raise NotImplementedError

    def _accept_caller(self) -> None:
        """Called when the selector reports a socket that is not a rank's connection."""
        raise NotImplementedError

    def _check_silence(self, responsive: set[int]) -> RunError | None:
        """Called after each wait for messages, with the ranks that sent any; returns an error if all must end, else None."""

    def _handle_ready(self, rank: int) -> None:
        """Called when a rank has made its hosted object; the last one settles the wait of `make`."""
        if len(self._pids) == self.count:
            self._channels = [self._by_rank[index] for index in range(self.count)]
            settle_future(self._ready)

    # --- run by the thread -----------------------------------------------------------------------

    def _run_thread(self) -> None:
        reason = end_reason_of(self._listen_to_ranks)
        self._end_all()
        self._fail_all(reason)

    def _listen_to_ranks(self) -> RunError:
        """Start the processes and listen until they must end; returns the reason."""
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)
        self._launch_workers()
        while True:
            responsive: set[int] = set()
            for key, _ in self._selector.select(self._check_interval):
                if key.fileobj is self._wake_receiver:
                    return RunError("The model workers are closed.")
                if key.data is None:
                    self._accept_caller()
                    continue
                rank: int = key.data
                responsive.add(rank)
                try:
                    messages = self._by_rank[rank].receive_available()
                except EOFError:
                    reason = self._handle_disconnect(rank)
                    if reason is not None:
                        return reason
                    continue
                for message in messages:
                    self._handle_message(rank, message)
            reason = self._check_silence(responsive)
            if reason is not None:
                return reason

    def _handle_message(self, rank: int, message: RankMessage) -> None:
        match message:
            case Heartbeat():
                pass  # a heartbeat only marks the rank as responsive
            case Ready(processes):
                (self._pids[rank],) = processes
                self.processes = tuple(self._pids[ready_rank] for ready_rank in sorted(self._pids))
                self._handle_ready(rank)
            case _:
                self._settle_call(message)

    def _start_rank(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._started[rank] = self._popen(rank, theirs.fileno())
        self._outputs[rank] = Output(self._started[rank], f"{self._title} {rank + 1}")
        self._send_setup(rank, MessageChannel(ours))

    def _popen(self, rank: int, descriptor: int) -> Popen[bytes]:
        assert self._setup is not None
        on_cpu = self._setup.arguments["layout"]["device"] == "cpu"
        visible = NO_GPU if on_cpu else visible_gpu(self._first_gpu + rank)
        arguments = (str(os.getpid()), str(descriptor))
        try:
            return Popen(
                [sys.executable, "-P", "-m", "groupwise.engine.distributed.peer", *arguments],
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=STDOUT,
                pass_fds=[descriptor],
                start_new_session=True,
                env={**self._environment_defaults(), **os.environ, **ENVIRONMENT, **visible},
            )
        except OSError as error:
            raise RunError(f"The model workers cannot be started: {error}") from error

    def _environment_defaults(self) -> dict[str, str]:
        """Defaults for the ranks' environment; the user's own environment takes precedence."""
        return {}

    def _send_setup(self, rank: int, channel: MessageChannel) -> None:
        """Send a rank its setup."""
        setup, sockets = self._setup_of(rank)
        self._by_rank[rank] = channel
        self._selector.register(channel, selectors.EVENT_READ, rank)
        with suppress(OSError):  # the process has ended; its connection shows that
            channel.send(setup, sockets)

    def _reap(self, rank: int) -> tuple[int | None, str]:
        """Exit code and last output of a process that was started here and whose connection has ended."""
        process = self._started[rank]
        with suppress(TimeoutExpired):
            process.wait(_EXIT_SECONDS)
        return process.returncode, self._outputs[rank].last_output()

    def _end_all(self) -> None:
        """Kill the processes started here, and close the connections to the others."""
        for process in self._started.values():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        for channel in self._by_rank.values():
            channel.end()
        for process in self._started.values():
            with suppress(TimeoutExpired):
                process.wait(_END_LIMIT)
        for output in self._outputs.values():
            output.join()
        for resource in (*self._by_rank.values(), self._wake_receiver):
            resource.close()
        self._selector.close()
