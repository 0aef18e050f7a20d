"""The engine's process: `python -m groupwise.server.engine.child_process FD FACTORY PARENT LOG_LEVEL BEAT_SECONDS`.

The event loop in the main thread creates the engine and answers calls from the socket FD, each in its own task. FACTORY is
`package.module:function` or a class and returns an `engine_protocol.Engine`. A separate thread reads the socket, so the end of the
connection is noticed even if the loop is busy or hangs. The end means that the parent is gone or wants this process to stop, and the whole
process group is killed at once. Beats are sent by the event loop, so a loop that hangs sends none.

The kernel ends this process when its parent dies, and a guard then ends all processes that it started. Ctrl-C and SIGTERM are ignored: a
terminal or a service manager sends them to every process, and the parent ends this process when it is ready to.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from operator import attrgetter
from typing import Any, NoReturn

from groupwise.core.errors import GroupwiseError
from groupwise.core.plugins import load
from groupwise.core.processes.process_tree import MARK, tie_to_parent
from groupwise.engine.distributed.rank import send_log
from groupwise.server.engine.messages import (
    CANCELLED_METHODS,
    MAKING,
    Answered,
    Beat,
    Call,
    CallTimedOutError,
    Cancel,
    Failed,
    MessageChannel,
    pack,
    pack_error,
    unpack,
)

logger = logging.getLogger(
    "groupwise.server.engine.child_process"
)  # run as a program, its name is __main__


def main(descriptor: int, factory: str, parent: int, log_level: int, beat_every: float) -> NoReturn:
    """Serve the engine until the connection ends."""
    tie_to_parent(parent, os.environ[MARK])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _ignore_signal)
    line = MessageChannel(socket.socket(fileno=descriptor))
    send_log(line, log_level)
    try:
        asyncio.run(_EngineServer(line, beat_every).forever(factory))
    except BaseException:  # noqa: BLE001 — threads of the engine must not keep the process from ending
        traceback.print_exc()
    os._exit(1)


def _ignore_signal(number: int, frame: object) -> None:
    """Ignore the signal. A function rather than SIG_IGN, because programs that the engine starts would inherit SIG_IGN."""


class _EngineServer:
    """The calls in progress."""

    def __init__(self, line: MessageChannel, beat_every: float) -> None:
        self._channel = line
        self._beat_every = beat_every
        self._engine: Any = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._progress = 0

    async def forever(self, factory: str) -> None:
        """Create the engine and answer calls; returns only if the engine cannot be created."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read_messages, args=(loop,), daemon=True).start()
        try:
            self._engine = load(factory, kind="engine", instantiate=False).object()
        except BaseException as error:  # noqa: BLE001 — any error is reported to the parent
            self._send_message(Failed(MAKING, pack_error(error)))
            return
        while True:
            self._send_message(Beat(self._progress, len(self._tasks)))
            await asyncio.sleep(self._beat_every)

    def _read_messages(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            while True:
                loop.call_soon_threadsafe(self._handle_message, self._channel.receive())
        finally:  # the connection has ended: end the whole process group, including this process
            os.killpg(0, signal.SIGKILL)

    def _handle_message(self, message: Call | Cancel) -> None:
        match message:
            case Call():
                self._progress += 1
                task = self._tasks[message.id] = asyncio.create_task(self._answer_call(message))
                task.add_done_callback(lambda ended: self._finish_task(message.id, ended))
            case Cancel(number):
                if number in self._tasks:
                    self._tasks[number].cancel()

    def _finish_task(self, number: int, task: asyncio.Task[None]) -> None:
        del self._tasks[number]
        self._progress += 1
        if task.cancelled():  # cancelled before it started, so `_answer_call` has sent nothing
            self._send_message(Failed(number, pack_error(asyncio.CancelledError())))

    async def _answer_call(self, call: Call) -> None:
        try:
            answer = Answered(call.id, pack(await self._execute(call)))
        except BaseException as error:  # raised in the caller, in the HTTP process
            # Callers receive only the error's message, so log the traceback of unexpected errors.
            if not isinstance(error, GroupwiseError | asyncio.CancelledError):
                logger.error("`%s` failed in the engine", call.method, exc_info=error)
            answer = Failed(call.id, pack_error(error))
        self._send_message(answer)

    async def _execute(self, call: Call) -> Any:
        arguments = unpack(call.body)
        work = attrgetter(call.method)(self._engine)(*arguments)
        if call.method not in CANCELLED_METHODS:
            return await work
        limit = asyncio.timeout_at(call.deadline)  # asyncio's event loops use time.monotonic
        try:
            async with limit:
                return await work
        except TimeoutError:
            if not limit.expired():
                raise
            raise CallTimedOutError(
                f"`{call.method}` was not done by its deadline and has been given up; the engine is well. Ask for less, or again."
            ) from None

    def _send_message(self, message: Beat | Answered | Failed) -> None:
        with suppress(OSError):  # the parent is gone, and the reader ends this process
            self._channel.send(message)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
