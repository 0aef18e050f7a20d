"""Calls of ranks: each has a number and is sent over its rank's connection; futures connect the callers with the listening thread.

Two modules start the processes, listen, and notice when they end: `groupwise.engine.distributed.forked_workers` if ranks are forks that
share a model, and `groupwise.engine.distributed.spawned_workers` if each has its own. If one process ends for any reason, all end, and
every call then fails with the reason. The exception are samplers apart from learners: `groupwise.engine.distributed.sampler_workers`
replaces them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, InvalidStateError, wait
from contextlib import suppress
from typing import Any

from groupwise.core.errors import RunError
from groupwise.core.plugins import explain
from groupwise.core.processes.process_tree import PLAIN, describe_exit
from groupwise.engine.distributed.messages import (
    Call,
    CallFailure,
    CallResult,
    Cancel,
    LogRecordMessage,
    MessageChannel,
    Setup,
)
from groupwise.engine.models.memory import REMEDY

ENVIRONMENT = {
    **PLAIN,
    "OPENBLAS_NUM_THREADS": "1",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""One thread per process, and huge pages for allocated memory if the system offers them: reading weights is a few per cent faster."""
RESUME_HINT = "A run goes on from its last checkpoint with --resume."

RankCall = tuple[int, str, tuple[Any, ...]]
"""Rank, path of the attribute to call, arguments."""


class WorkerCalls:
    """Calls to ranks; see `groupwise.engine.distributed.rank`."""

    def __init__(self) -> None:
        self.count = 0
        self.processes: tuple[int, ...] = ()
        """Process ids, once the processes have been started."""
        self._ready: Future[None] = Future()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        """Held while calls of several ranks are sent: collectives need the same order of calls in every rank."""
        self.stuck = False
        """True once a call has failed while other ranks may still wait for the rank that failed."""
        self._pending: dict[int, Future[Any]] = {}
        self._end_reason: RunError | None = None
        """The reason why calls are no longer possible."""
        self._channels: list[MessageChannel] = []

    async def call(self, rank: int, name: str, *arguments: Any, droppable: bool = False) -> Any:
        """Call a method of the object that a rank hosts. Cancelling the wait cancels a `droppable` call; other calls continue.

        Raises the method's own errors, and RunError if a process has ended.
        """
        number, future = self._start_call(rank, name, arguments)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._pop_pending(number)
            if droppable:
                self._send_message(self._channels[rank], Cancel(number))
            raise

    async def call_each(self, calls: Iterable[RankCall], *, droppable: bool = False) -> list[Any]:
        """Make all calls at once; returns results in the order of the calls. If several raise, raises the first error in this order."""
        calls_made = [
            self.call(rank, name, *arguments, droppable=droppable)
            for rank, name, arguments in calls
        ]
        results = await asyncio.gather(*calls_made, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    async def call_all(self, name: str, *arguments: Any) -> list[Any]:
        """Make the same call to all ranks."""
        return await self.call_each((rank, name, arguments) for rank in range(self.count))

    async def call_together(self, calls: Iterable[RankCall]) -> list[Any]:
        """Make calls in which ranks wait for each other. If one fails, its error is raised without waiting for the others."""
        try:
            return await asyncio.gather(*map(asyncio.wrap_future, self._start_calls(calls)))
        except Exception:
            self.stuck = True
            raise

    def call_together_now(self, calls: Iterable[RankCall]) -> list[Any]:
        """Like `call_together`, for code that is not async."""
        futures = self._start_calls(calls)
        try:
            for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                future.result()
        except Exception:
            self.stuck = True
            raise
        return [future.result() for future in futures]

    def call_each_now(self, calls: Iterable[RankCall]) -> list[Any]:
        """Like `call_each`, for code that is not async."""
        futures = self._start_calls(calls)
        errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None:
                raise error
        return [future.result() for future in futures]

    def call_all_now(self, name: str, *arguments: Any) -> list[Any]:
        """Like `call_all`, for code that is not async."""
        return self.call_each_now((rank, name, arguments) for rank in range(self.count))

    def close(self) -> None:
        """End all processes, even busy ones, and wait until they have ended. May be called again."""
        raise NotImplementedError

    async def _wait_until_made(self) -> None:
        """Wait until all ranks host the object. After an error or a cancelled wait, all processes have ended."""
        try:
            await asyncio.wrap_future(self._ready)
        except BaseException:
            self.close()
            raise

    def _wait_until_made_now(self) -> None:
        """Like `_wait_until_made`, for code that is not async."""
        try:
            self._ready.result()
        except BaseException:
            self.close()
            raise

    def _settle_call(self, message: CallResult | CallFailure | LogRecordMessage) -> None:
        """Settle the future of an answered call, or log a record that a process sent."""
        match message:
            case LogRecordMessage(record):
                _log_record(record)
            case CallResult(number, value):
                settle_future(self._pop_pending(number), value)
            case CallFailure(0, error):
                settle_future(self._ready, error=error)
            case CallFailure(number, error):
                settle_future(self._pop_pending(number), error=error)

    def _note_call(self) -> None:
        """Called before a call is sent; subclasses override it."""

    def _start_calls(self, calls: Iterable[RankCall]) -> list[Future[Any]]:
        with self._sending:
            return [self._start_call(*call)[1] for call in calls]

    def _start_call(
        self, rank: int, name: str, arguments: tuple[Any, ...]
    ) -> tuple[int, Future[Any]]:
        number, future = self._new_call()
        self._note_call()
        try:
            self._send_message(self._channels[rank], Call(number, name, arguments))
        except BaseException:  # the arguments cannot be pickled
            self._pop_pending(number)
            raise
        return number, future

    def _new_call(self) -> tuple[int, Future[Any]]:
        """The number of a new call, and the future of its result."""
        future: Future[Any] = Future()
        with self._lock:
            if self._end_reason is not None:
                raise self._end_reason
            number = next(self._numbers)
            self._pending[number] = future
        return number, future

    def _pop_pending(self, number: int) -> Future[Any] | None:
        """Remove and return the future of a call that is over; None if its caller no longer waits for it."""
        with self._lock:
            return self._pending.pop(number, None)

    def _send_message(self, channel: MessageChannel, message: Call | Cancel) -> None:
        with suppress(OSError):  # the process has ended; the listening thread handles that
            channel.send(message)

    def _fail_all(self, reason: RunError) -> bool:
        """Fail running and future calls. False if that has been done before."""
        with self._lock:
            if self._end_reason is not None:
                return False
            self._end_reason = reason
            pending, self._pending = self._pending, {}
        for future in (self._ready, *pending.values()):
            settle_future(future, error=reason)
        return True


def make_setup(factory: str, arguments: Mapping[str, Any]) -> Setup:
    """Setup for a process: `factory` (`package.module:function`) is called with `arguments`, which must be expressible as JSON."""
    return Setup(
        factory,
        json.loads(json.dumps(dict(arguments))),
        tuple(str(folder) for folder in sys.path),
        logging.getLogger("groupwise").getEffectiveLevel(),
    )


def explain_exit(code: int | None) -> str:
    """How a process ended, and how to use less memory if that may be the reason."""
    ending = f"{describe_exit(code)}."
    return f"{ending} {REMEDY}" if code == -signal.SIGKILL else ending


def end_reason_of(lived: Callable[[], RunError]) -> RunError:
    """Why listening to the processes has ended, as an error for callers: the result of `lived`, or the error it raised."""
    try:
        return lived()
    except RunError as error:
        return error
    except BaseException as error:  # noqa: BLE001 — callers would otherwise wait for ever
        reason = RunError(
            f"The messages of the model workers cannot be read:\n{explain(error)}\n{RESUME_HINT}"
        )
        reason.__cause__ = error
        return reason


def _log_record(record: logging.LogRecord) -> None:
    """Log a record in this process. Errors of handlers or filters are only reported, as the standard library's handlers do."""
    log = logging.getLogger(record.name)
    try:
        if log.isEnabledFor(record.levelno):
            log.handle(record)
    except Exception:  # noqa: BLE001 — a user's handler must not end the run
        logging.Handler().handleError(record)


def require_equal(name: str, values: Sequence[str]) -> str:
    """The value that all ranks report. Raises RunError if they differ; `name` is the value's name in its message."""
    if len(set(values)) > 1:
        raise RunError(
            f"The model workers have come apart: {name} should be the same in all of them, and are {', '.join(values)}. "
            f"Please report this. {RESUME_HINT}"
        )
    return values[0]


def settle_future(
    future: Future[Any] | None, value: Any = None, error: BaseException | None = None
) -> None:
    """Set a future's result or error, unless its caller has cancelled it."""
    if future is None:
        return
    with suppress(InvalidStateError):
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)
