"""Daemon threads that do jobs in the order of submission.

Unlike with `concurrent.futures`, a hung thread does not keep the interpreter from ending. The threads belong to no event
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


class ThreadWorker(Protocol[Job]):
    """The work of one thread; all three methods run in that thread."""

    def begin(self) -> None:
        """Called before the first job."""
        ...

    def do(self, job: Job) -> Any:
        """Do one job; its result or exception becomes the future's."""
        ...

    def end(self) -> None:
        """Called after the last job."""
        ...


class DaemonThreads(Generic[Job]):
    """One thread for each worker, all with one common queue."""

    def __init__(self, workers: Sequence[ThreadWorker[Job]], name: str) -> None:
        self._queue: queue.SimpleQueue[tuple[Job, Future[Any]] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, args=(worker,), name=f"{name}-{index}", daemon=True)
            for index, worker in enumerate(workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> Future[Any]:
        """Queue a job. If its future is cancelled before the job starts, the job is skipped."""
        future: Future[Any] = Future()
        self._queue.put((job, future))
        return future

    def close(self) -> None:
        """Cancel the queued jobs and make each thread end after its current job; does not wait for that."""
        with suppress(queue.Empty):
            while (item := self._queue.get_nowait()) is not None:
                item[1].cancel()
        for _ in self._threads:
            self._queue.put(None)

    def join(self, timeout: float) -> bool:
        """Wait for the threads, at most `timeout` seconds each; True if all have ended."""
        for thread in self._threads:
            thread.join(timeout)
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, worker: ThreadWorker[Job]) -> None:
        worker.begin()
        while (item := self._queue.get()) is not None:
            job, future = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(worker.do(job))
            except BaseException as error:  # noqa: BLE001 — the caller that awaits the future receives it
                future.set_exception(error)
        worker.end()
