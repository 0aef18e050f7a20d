"""Awaits asynchronous work from code that is not async, and ends it on Ctrl-C or SIGTERM.

The first signal asks the loop to end cleanly; another Ctrl-C ends it at once. Queues and launchers send a signal to all processes of a
job, and each may pass it on; so repeated signals within a second, or a second SIGTERM, do not hurry it. Work that may be dropped half-way
(sampling, a partial gradient) is awaited through `Interruption.allow`. Everything else (update, publication, record, checkpoint) runs
undisturbed, and the request takes effect before the next droppable piece of work.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FrameType
from typing import Any, ClassVar, TypeVar

T = TypeVar("T")

SAME_SIGNAL_SECONDS = 1.0
"""Signals within this many seconds count as one: a terminal's Ctrl-C reaches torchrun, and the process to which torchrun passes it on."""
CLEANUP_TIMEOUT = 5.0
"""Seconds after the second signal in which tasks may clean up, before they are abandoned."""


class Interrupted(Exception):
    """The loop was asked to end; `exit_code` is the one that shells expect (130 for Ctrl-C, 143 for SIGTERM)."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.exit_code = 128 + signal_number


class Interruption:
    """Handles both signals while it is open, if the loop runs in the main thread; in other threads the caller uses `request_stop`."""

    active: ClassVar[list[Interruption]] = []
    """The open interruptions of this process, the newest last."""

    def __init__(self, on_first_signal: Callable[[], None] | None = None) -> None:
        """`on_first_signal`: called once in the loop after it was asked to end, e.g. to report that."""
        self._on_first_signal = on_first_signal
        self._received: int | None = None
        self._received_at = -math.inf
        self._event = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._previous_handlers: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous_handlers[number] = signal.signal(number, self._handle_signal)
        self.active.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.active.remove(self)
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    @property
    def received_signal(self) -> int | None:
        """The signal that asked the loop to end; None until then."""
        return self._received

    def request_stop(self, number: int = signal.SIGINT) -> None:
        """Ask the loop to end cleanly, from any thread."""
        if self._received is None:
            self._received, self._received_at = number, time.monotonic()
        self._loop.call_soon_threadsafe(self._wake_waiter)

    def _wake_waiter(self) -> None:
        on_first_signal, self._on_first_signal = self._on_first_signal, None
        self._event.set()
        if on_first_signal is not None:
            on_first_signal()

    async def allow(self, work: Coroutine[Any, Any, T]) -> T:
        """Await droppable work; raises `Interrupted`, and cancels the work, if a signal has arrived or arrives."""
        if self._received is not None:
            work.close()
            raise Interrupted(self._received)
        task = asyncio.ensure_future(work)
        interrupted = asyncio.ensure_future(self._event.wait())
        try:
            await asyncio.wait((task, interrupted), return_when=asyncio.FIRST_COMPLETED)
            if self._received is not None:
                raise Interrupted(self._received)
            return await task
        finally:
            interrupted.cancel()
            if not task.done():
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _handle_signal(self, number: int, _: FrameType | None) -> None:
        counts_as_first = (
            self._received is None or time.monotonic() - self._received_at < SAME_SIGNAL_SECONDS
        )
        if not counts_as_first and (self._received, number) != (signal.SIGTERM, signal.SIGTERM):
            # Raised between two steps of the loop, it may cost a task its next step, and the loop would wait for ever: see `_interrupt`.
            self._loop.call_soon_threadsafe(
                self._loop.call_later, CLEANUP_TIMEOUT, _interrupt, self._loop
            )
            raise KeyboardInterrupt(number)
        self.request_stop(number)


def _interrupt(loop: asyncio.AbstractEventLoop) -> None:
    """Interrupt again and again: a KeyboardInterrupt may get lost (e.g. in a finaliser), or only cancel the tasks."""
    loop.call_later(CLEANUP_TIMEOUT, _interrupt, loop)
    raise KeyboardInterrupt


def sigterm_interrupts() -> AbstractContextManager[None]:
    """`interrupting` for SIGTERM."""
    return interrupting(signal.SIGTERM)


@contextmanager
def interrupting(*signals: signal.Signals) -> Generator[None]:
    """Inside, these signals act like Ctrl-C; the exception's argument is the signal's number. Outside the main thread nothing changes.

    Inside `asyncio.run`, Ctrl-C cancels only the main task. An exception raised in a signal handler would instead cancel all tasks at once,
    including those that must finish.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        received.append(number)
        of_ctrl_c = signal.getsignal(signal.SIGINT)
        if callable(of_ctrl_c) and of_ctrl_c is not signal.default_int_handler:
            of_ctrl_c(signal.SIGINT, frame)
        else:
            raise KeyboardInterrupt(number)

    previous = {signum: signal.signal(signum, interrupt) for signum in signals}
    try:
        yield
    except KeyboardInterrupt as stopped:
        if received and not stopped.args:
            raise KeyboardInterrupt(received[-1]) from None
        raise
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` that also works if an event loop is already running (notebooks): then in a new thread, with the caller's context.

    Interrupting the waiting thread asks a run to end cleanly, and cancels any other work.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(_with_signal_wakeup(work))
    inner: list[asyncio.AbstractEventLoop] = []

    async def noted() -> T:
        inner.append(asyncio.get_running_loop())
        return await work

    with ThreadPoolExecutor(max_workers=1) as thread:
        done = thread.submit(contextvars.copy_context().run, asyncio.run, noted())
        try:
            return done.result()
        except KeyboardInterrupt:
            if Interruption.active:
                Interruption.active[-1].request_stop()
            else:
                for loop in inner:
                    for task in asyncio.all_tasks(loop):
                        loop.call_soon_threadsafe(task.cancel)
            return done.result()


async def gather_all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in the order of `work`. If one fails or the wait is cancelled, the others are cancelled and awaited first."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def wait_until_done(work: Awaitable[T]) -> T:
    """Wait for the work's end even if cancelled: it must not stop half-way, and a thread cannot be stopped at all."""
    working = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait([working])
        raise


async def _with_signal_wakeup(work: Coroutine[Any, Any, T]) -> T:
    """`work`, in a loop that wakes up for every signal.

    If a signal reaches another thread, Python only notes it; the main thread would handle it only at the loop's next event, without
    the wake-up.
    """
    if threading.current_thread() is not threading.main_thread():
        return await work
    loop = asyncio.get_running_loop()
    receiver, sender = socket.socketpair()
    with receiver, sender:
        for end in (receiver, sender):
            end.setblocking(False)
        loop.add_reader(receiver, _drain, receiver)
        previous_fd = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        try:
            return await work
        finally:
            signal.set_wakeup_fd(previous_fd)
            loop.remove_reader(receiver)


def _drain(receiver: socket.socket) -> None:
    with suppress(BlockingIOError):
        receiver.recv(4096)
