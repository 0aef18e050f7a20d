"""The main process's side of forked workers: it starts the zygote, calls the ranks, and notices when they end.

A run may start a zygote before it knows what to build. Meanwhile the zygote imports the modules it will need, which takes seconds, and
answers questions for which the main process would otherwise have to import them too.

A dedicated thread starts the zygote and reads all connections. It lives as long as the zygote, because the kernel's parent-death signal
is bound to the thread that started the child. Futures connect this thread with the callers. All worker processes run in their own
session, so Ctrl-C does not reach them. If one of them ends for any reason, all of them end, and every call then fails with the reason.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from subprocess import DEVNULL, PIPE, STDOUT, Popen, TimeoutExpired
from typing import Any

from groupwise.core.errors import RunError
from groupwise.core.processes.output import Output
from groupwise.core.processes.process_tree import NO_GPU, has_ended
from groupwise.engine.distributed.messages import (
    Call,
    CallFailure,
    CallResult,
    LogRecordMessage,
    MessageChannel,
    RankEnded,
    Ready,
)
from groupwise.engine.distributed.rpc import (
    ENVIRONMENT,
    RESUME_HINT,
    WorkerCalls,
    end_reason_of,
    explain_exit,
    make_setup,
    settle_future,
)

_END_LIMIT = 10.0
"""Seconds that killed processes may take to end (they may hang in the kernel)."""
_POLL_SECONDS = 0.005
"""Seconds between two checks whether the zygote has ended, during shutdown."""


class ForkedWorkers(WorkerCalls):
    """Worker processes that each host the same object, created once.

    `modules` are imported by the zygote while it waits for the setup. With `sees_gpus` it can answer questions about GPUs until then; the
    object that it makes sees none. `groupwise.engine.distributed.rank` says what can be hosted and called.
    """

    def __init__(self, *modules: str, sees_gpus: bool = False) -> None:
        super().__init__()
        self._modules = modules
        self._environment = ENVIRONMENT if sees_gpus else {**ENVIRONMENT, **NO_GPU}
        ours, self._theirs = socket.socketpair()
        self._control = MessageChannel(ours)
        self._selector = selectors.DefaultSelector()
        self._process: Popen[bytes] | None = None
        self._output: Output | None = None
        self._thread = threading.Thread(target=self._run_thread, name="ranks", daemon=True)

    @property
    def zygote(self) -> int:
        """Process id of the zygote."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start the zygote without waiting for it."""
        self._thread.start()

    def ask(self, function: str, *arguments: Any) -> Any:
        """Call a function (`package.module:function`) in the started zygote, before it receives its setup.

        Raises the function's own errors, and RunError if the zygote has ended.
        """
        number, future = self._new_call()
        try:
            self._send_message(self._control, Call(number, function, arguments))
        except BaseException:  # the arguments cannot be pickled
            self._pop_pending(number)
            raise
        return future.result()

    async def make(self, factory: str, arguments: Mapping[str, Any], count: int) -> None:
        """Send the started zygote its setup, and wait until `count` ranks host the object.

        `factory` names a function (`package.module:function`). It is called with `arguments` as keywords; they must be expressible as JSON.
        Raises the factory's own errors, and RunError if a process has ended. After an error or a cancelled wait, all processes have ended.
        """
        self._send_zygote_setup(factory, arguments, count)
        await self._wait_until_made()

    def make_now(self, factory: str, arguments: Mapping[str, Any], count: int) -> None:
        """Like `make`, for code that is not async."""
        self._send_zygote_setup(factory, arguments, count)
        self._wait_until_made_now()

    def close(self) -> None:
        """End all processes, even busy ones, and wait until they have ended. May be called again."""
        self._fail_and_end(RunError("The model workers are closed."))
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()
        for resource in (self._control, *self._channels, self._theirs, self._selector):
            resource.close()

    def _send_zygote_setup(self, factory: str, arguments: Mapping[str, Any], count: int) -> None:
        pairs = [socket.socketpair() for _ in range(count)]
        self.count = count
        self._channels = [MessageChannel(ours) for ours, _ in pairs]
        with suppress(OSError):  # the zygote has ended; the thread reports why
            self._control.send(make_setup(factory, arguments), [theirs for _, theirs in pairs])
        for _, theirs in pairs:
            theirs.close()

    def _fail_and_end(self, reason: RunError) -> None:
        """Fail running and future calls, and make the processes end."""
        if self._fail_all(reason):
            self._control.end()

    def _note_call(self) -> None:
        if self._output is not None:
            self._output.begin_call()

    # --- run by the thread -----------------------------------------------------------------------

    def _run_thread(self) -> None:
        self._fail_and_end(end_reason_of(self._run_zygote))

    def _run_zygote(self) -> RunError:
        """Start the zygote and listen for as long as it lives. Returns how it ended; on every way out the zygote has ended."""
        number = self._theirs.fileno()
        arguments = (str(os.getpid()), str(number), *self._modules)
        with self._theirs:  # closed here once the zygote has it, so its end is noticed
            try:
                self._process = process = Popen(
                    [sys.executable, "-P", "-m", "groupwise.engine.distributed.zygote", *arguments],
                    stdin=DEVNULL,
                    stdout=PIPE,
                    stderr=STDOUT,
                    pass_fds=[number],
                    start_new_session=True,
                    env={**os.environ, **self._environment},
                )
            except OSError as error:
                raise RunError(f"The model workers cannot be started: {error}") from error
        try:
            self._output = Output(process, "model workers")
            self._listen_to_ranks()
        finally:
            self._control.end()
            # It ends by itself. If it is still making the hosted object, or hangs, it is killed.
            deadline = time.monotonic() + (_END_LIMIT if self.processes else 0.0)
            while not has_ended(process) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(TimeoutExpired):
                process.wait(_END_LIMIT)
        ending, words = explain_exit(process.returncode), self._output.last_output()
        return RunError(f"The process that holds the model ended: {ending} {RESUME_HINT}{words}")

    def _listen_to_ranks(self) -> None:
        """Receive messages until the zygote's connection ends."""
        self._selector.register(self._control, selectors.EVENT_READ, self._control)
        while True:
            for key, _ in self._selector.select():
                channel: MessageChannel = key.data
                try:
                    messages = channel.receive_available()
                except EOFError:
                    if channel is self._control:
                        return
                    self._selector.unregister(channel)  # the zygote will report why
                    continue
                for message in messages:
                    self._handle_message(message)

    def _handle_message(
        self, message: Ready | RankEnded | CallResult | CallFailure | LogRecordMessage
    ) -> None:
        match message:
            case Ready(processes):
                self.processes = processes
                for channel in self._channels:
                    self._selector.register(channel, selectors.EVENT_READ, channel)
                settle_future(self._ready)
            case RankEnded(rank, code):
                assert self._output is not None
                worker = f"Model worker {rank + 1} of {self.count}"
                self._fail_and_end(RunError(f"{worker} ended: {explain_exit(code)} {RESUME_HINT}"))
            case _:
                self._settle_call(message)
