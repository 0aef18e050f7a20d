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
from groupwise.core.processes.family import NO_GPU, has_ended
from groupwise.core.processes.output import Output
from groupwise.engine.distributed.messages import (
    Answered,
    Call,
    Ended,
    Failed,
    LogRecordMessage,
    MessageChannel,
    Ready,
)
from groupwise.engine.distributed.rpc import (
    ENVIRONMENT,
    RESUME,
    Calls,
    how,
    reason_of,
    settle,
    setup_of,
)

_END_LIMIT = 10.0
"""Seconds that killed processes may take to end (they may hang in the kernel)."""
_LOOK_EVERY = 0.005
"""Seconds between two checks whether the zygote has ended, during shutdown."""


class Ranks(Calls):
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

    def begin(self) -> None:
        """Start the zygote without waiting for it."""
        self._thread.start()

    def ask(self, function: str, *arguments: Any) -> Any:
        """Call a function (`package.module:function`) in the started zygote, before it receives its setup.

        Raises the function's own errors, and RunError if the zygote has ended.
        """
        number, future = self._new_call()
        try:
            self._send(self._control, Call(number, function, arguments))
        except BaseException:  # the arguments cannot be pickled
            self._pop_pending(number)
            raise
        return future.result()

    async def make(self, factory: str, arguments: Mapping[str, Any], count: int) -> None:
        """Send the started zygote its setup, and wait until `count` ranks host the object.

        `factory` names a function (`package.module:function`). It is called with `arguments` as keywords; they must be expressible as JSON.
        Raises the factory's own errors, and RunError if a process has ended. After an error or a cancelled wait, all processes have ended.
        """
        self._set_up(factory, arguments, count)
        await self._until_made()

    def make_now(self, factory: str, arguments: Mapping[str, Any], count: int) -> None:
        """Like `make`, for code that is not async."""
        self._set_up(factory, arguments, count)
        self._until_made_now()

    def close(self) -> None:
        """End all processes, even busy ones, and wait until they have ended. May be called again."""
        self._end(RunError("The model workers are closed."))
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()
        for each in (self._control, *self._lines, self._theirs, self._selector):
            each.close()

    def _set_up(self, factory: str, arguments: Mapping[str, Any], count: int) -> None:
        pairs = [socket.socketpair() for _ in range(count)]
        self.count = count
        self._lines = [MessageChannel(ours) for ours, _ in pairs]
        with suppress(OSError):  # the zygote has ended; the thread reports why
            self._control.send(setup_of(factory, arguments), [theirs for _, theirs in pairs])
        for _, theirs in pairs:
            theirs.close()

    def _end(self, reason: RunError) -> None:
        """Fail running and future calls, and make the processes end."""
        if self._fail_all(reason):
            self._control.end()

    def _begin_call(self) -> None:
        if self._output is not None:
            self._output.begin_call()

    # --- run by the thread -----------------------------------------------------------------------

    def _run_thread(self) -> None:
        self._end(reason_of(self._run_zygote))

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
            self._listen()
        finally:
            self._control.end()
            # It ends by itself. If it is still making the hosted object, or hangs, it is killed.
            deadline = time.monotonic() + (_END_LIMIT if self.processes else 0.0)
            while not has_ended(process) and time.monotonic() < deadline:
                time.sleep(_LOOK_EVERY)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(TimeoutExpired):
                process.wait(_END_LIMIT)
        ending, words = how(process.returncode), self._output.last_output()
        return RunError(f"The process that holds the model ended: {ending} {RESUME}{words}")

    def _listen(self) -> None:
        """Receive messages until the zygote's connection ends."""
        self._selector.register(self._control, selectors.EVENT_READ, self._control)
        while True:
            for key, _ in self._selector.select():
                line: MessageChannel = key.data
                try:
                    messages = line.receive_available()
                except EOFError:
                    if line is self._control:
                        return
                    self._selector.unregister(line)  # the zygote will report why
                    continue
                for message in messages:
                    self._take(message)

    def _take(self, message: Ready | Ended | Answered | Failed | LogRecordMessage) -> None:
        match message:
            case Ready(processes):
                self.processes = processes
                for line in self._lines:
                    self._selector.register(line, selectors.EVENT_READ, line)
                settle(self._ready)
            case Ended(rank, code):
                assert self._output is not None
                who = f"Model worker {rank + 1} of {self.count}"
                self._end(RunError(f"{who} ended: {how(code)} {RESUME}"))
            case _:
                self._take_answer(message)
