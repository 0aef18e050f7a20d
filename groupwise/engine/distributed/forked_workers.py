"""The main process's side: it starts the zygote, calls the ranks, and notices their end.

A run may begin a zygote before it knows what to build: meanwhile the zygote imports what it will need, which takes seconds, and answers
questions for which the main process would have to import the same.

A thread of its own starts the zygote, reads all connections and lives as long as the zygote does, because the kernel's parent-death
signal goes by threads. Futures connect it with the callers. All processes are in a session of their own, out of the reach of
Ctrl-C. If one of them ends for any reason, all end, and every call then fails with the reason.
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
"""Seconds between two checks that the zygote has ended, while it is about to."""


class Ranks(Calls):
    """Worker processes that each host the same object, created once.

    `modules` are imported by the zygote while it waits to be told what to make. With `sees_gpus` it can be asked about GPUs until
    then; what it makes sees none. See `groupwise.engine.distributed.rank` for what is hosted, and for what can be called.
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
        """Start the zygote; does not wait for it."""
        self._thread.start()

    def ask(self, function: str, *arguments: Any) -> Any:
        """Call a function (`package.module:function`) in the begun zygote, before it knows what to make.

        Raises what it raises, and RunError if the zygote has ended.
        """
        number, future = self._new_call()
        try:
            self._send(self._control, Call(number, function, arguments))
        except BaseException:  # the arguments cannot be pickled
            self._pop_pending(number)
            raise
        return future.result()

    async def make(self, factory: str, arguments: Mapping[str, Any], count: int) -> None:
        """Have the begun zygote make the hosted object, and wait for `count` ranks that host it.

        `factory` names a function (`package.module:function`), which is called with `arguments`, expressible as JSON, as keywords.
        Raises what it raises, and RunError if a process has ended. After an error, or if the wait is cancelled, all processes have ended.
        """
        self._set_up(factory, arguments, count)
        await self._until_made()

    def make_now(self, factory: str, arguments: Mapping[str, Any], count: int) -> None:
        """Like `make`, for code that is not async."""
        self._set_up(factory, arguments, count)
        self._until_made_now()

    def close(self) -> None:
        """End all processes, even busy ones, and wait until they are gone. May be called again."""
        self._end(RunError("The model workers are closed."))
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()
        for each in (self._control, *self._lines, self._theirs, self._selector):
            each.close()

    def _set_up(self, factory: str, arguments: Mapping[str, Any], count: int) -> None:
        pairs = [socket.socketpair() for _ in range(count)]
        self.count = count
        self._lines = [MessageChannel(ours) for ours, _ in pairs]
        with suppress(OSError):  # it has ended, and the thread hears why
            self._control.send(setup_of(factory, arguments), [theirs for _, theirs in pairs])
        for _, theirs in pairs:
            theirs.close()

    def _end(self, reason: RunError) -> None:
        """Fail running and future calls, and have the processes end."""
        if self._fail_all(reason):
            self._control.end()

    def _begin_call(self) -> None:
        if self._output is not None:
            self._output.begin_call()

    # --- what runs in the thread -----------------------------------------------------------------

    def _run_thread(self) -> None:
        self._end(reason_of(self._run_zygote))

    def _run_zygote(self) -> RunError:
        """Start the zygote and listen as long as it lives; returns how it ended. However this ends, the zygote has ended."""
        number = self._theirs.fileno()
        arguments = (str(os.getpid()), str(number), *self._modules)
        with self._theirs:  # from then on the zygote's alone, so that its end is noticed
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
            # It ends by itself; if it is still making something, or hangs, it is killed.
            deadline = time.monotonic() + (_END_LIMIT if self.processes else 0.0)
            while not has_ended(process) and time.monotonic() < deadline:
                time.sleep(_LOOK_EVERY)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(TimeoutExpired):
                process.wait(_END_LIMIT)
        ending, words = how(process.returncode), self._output.last_words()
        return RunError(f"The process that holds the model ended: {ending} {RESUME}{words}")

    def _listen(self) -> None:
        """Take messages until the zygote is gone or must go."""
        self._selector.register(self._control, selectors.EVENT_READ, self._control)
        while True:
            for key, _ in self._selector.select():
                line: MessageChannel = key.data
                try:
                    messages = line.receive_available()
                except EOFError:
                    if line is self._control:
                        return
                    self._selector.unregister(line)  # the zygote says why
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
