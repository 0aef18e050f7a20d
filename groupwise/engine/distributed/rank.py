"""A rank: a fork of the zygote, or a process with its own model, that answers calls of the object it hosts, several at once, in one loop.

Any object can be hosted. After the fork its `join(rank)` is called in the rank, which sets threads and connects to the other ranks, and
its `leave()` in the zygote. Calls then name its attributes. A thread reads the socket, so messages are received during a computation, and
the end of the connection is noticed: the main process is then gone, and the rank ends.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import os
import signal
import threading
import traceback
from contextlib import suppress
from operator import attrgetter
from typing import Any, NoReturn

from groupwise.core.processes.process_tree import signal_when_parent_ends
from groupwise.engine.distributed.messages import (
    Call,
    CallFailure,
    CallResult,
    Cancel,
    Heartbeat,
    LogRecordMessage,
    MessageChannel,
    Shutdown,
    picklable_error,
)


def run_rank(
    rank: int, hosted: Any, channel: MessageChannel, zygote: int, log_level: int
) -> NoReturn:
    """Act as a rank until the connection ends. Only rank 0 sends the package's log; the others would log the same."""
    try:
        signal_when_parent_ends(signal.SIGKILL, zygote)
        send_log(channel if rank == 0 else None, log_level)
        hosted.join(rank)
        asyncio.run(CallServer(hosted, channel).serve_forever())
    except BaseException:  # noqa: BLE001 — a fork must never return into the zygote's code
        traceback.print_exc()
    os._exit(1)


def send_log(channel: MessageChannel | None, level: int) -> None:
    """Send the package's log to the main process from now on, or discard it if `channel` is None."""
    log = logging.getLogger("groupwise")
    log.setLevel(level)
    log.propagate = False
    for handler in [*log.handlers]:
        log.removeHandler(handler)
    log.addHandler(logging.NullHandler() if channel is None else _LogSender(channel))


class _LogSender(logging.Handler):
    """Sends log records with their arguments already formatted, because arguments may not be picklable."""

    def __init__(self, channel: MessageChannel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        formatted = copy.copy(record)
        formatted.msg, formatted.args = self.format(record), None
        formatted.exc_info = formatted.exc_text = formatted.stack_info = None
        with suppress(OSError):  # the main process is gone
            self._channel.send(LogRecordMessage(formatted))


class CallServer:
    """Receives calls for the hosted object and runs each as a task."""

    def __init__(
        self, hosted: Any, channel: MessageChannel, heartbeat: float | None = None
    ) -> None:
        """`heartbeat`: seconds between two `Heartbeat` messages, as `RankSetup.heartbeat_interval`."""
        self._hosted = hosted
        self._channel = channel
        self._heartbeat_interval = heartbeat
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve_forever(self) -> None:
        """Answer calls; never returns."""
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._receive, daemon=True).start()
        if self._heartbeat_interval is None:
            await asyncio.Event().wait()
        # Sent from the loop that computes, so a rank that hangs in a computation sends none.
        while True:
            assert self._heartbeat_interval is not None
            with suppress(OSError):  # the connection is gone; `_receive` ends this process
                self._channel.send(Heartbeat())
            await asyncio.sleep(self._heartbeat_interval)

    def _receive(self) -> None:
        assert self._loop is not None
        try:
            while True:
                message = self._channel.receive()
                if isinstance(message, Shutdown):
                    os._exit(0)
                self._loop.call_soon_threadsafe(self._dispatch_message, message)
        finally:
            os._exit(1)

    def _dispatch_message(self, message: Call | Cancel) -> None:
        if isinstance(message, Call):
            task = self._tasks[message.number] = asyncio.create_task(self._run_call(message))
            task.add_done_callback(lambda _: self._tasks.pop(message.number))
        elif message.number in self._tasks:
            self._tasks[message.number].cancel()

    async def _run_call(self, call: Call) -> None:
        try:
            attribute = attrgetter(call.name)(self._hosted)
            value = attribute(*call.arguments) if callable(attribute) else attribute
            if inspect.isawaitable(value):
                value = await value
            self._channel.send(CallResult(call.number, value))
        except ConnectionAbortedError:
            return  # another rank has ended, and the zygote reports how
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 — belongs to the caller
            self._channel.send(CallFailure(call.number, picklable_error(error)))
