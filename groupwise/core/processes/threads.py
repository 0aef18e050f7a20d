"""Daemon threads that do jobs in the order given.

Unlike the threads of `concurrent.futures`, a hung one does not keep the interpreter from ending. They belong to no event
loop: results are futures that any loop can await.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

Job = TypeVar("Job", contravariant=True)


class Doer(Protocol[Job]):
    """The work of one thread; all three methods run in that thread."""

    def begin(self) -> None:
        """Before the first job."""
        ...

    def do(self, job: Job) -> Any:
        """One job; the result or exception becomes the future's."""
        ...

    def end(self) -> None:
        """After the last job."""
        ...


class DaemonThreads(Generic[Job]):
    """One thread for each doer, all fed from one queue."""

    def __init__(self, doers: Sequence[Doer[Job]], name: str) -> None:
        self._queue: queue.SimpleQueue[tuple[Job, Future[Any]] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, args=(doer,), name=f"{name}-{index}", daemon=True)
            for index, doer in enumerate(doers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> Future[Any]:
        """Queue a job. Cancelling its future before it began leaves it out."""
        future: Future[Any] = Future()
        self._queue.put((job, future))
        return future

    def close(self) -> None:
        """Cancel what waits and let each thread end after the job it is at; does not wait for it."""
        with suppress(queue.Empty):
            while (item := self._queue.get_nowait()) is not None:
                item[1].cancel()
        for _ in self._threads:
            self._queue.put(None)

    def join(self, timeout: float) -> bool:
        """Wait for the threads, each for at most `timeout` seconds; whether all have ended."""
        for thread in self._threads:
            thread.join(timeout)
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, doer: Doer[Job]) -> None:
        doer.begin()
        while (item := self._queue.get()) is not None:
            job, future = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(doer.do(job))
            except BaseException as error:  # noqa: BLE001 — the one that awaits the future receives it
                future.set_exception(error)
        doer.end()
