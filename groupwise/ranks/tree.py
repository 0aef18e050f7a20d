"""The main process's side: it starts the zygote, calls the ranks, and hears of their end.

A run may begin a zygote before it knows what is to be made: it imports what it will need meanwhile, which takes seconds, and answers
questions that the main process would have to import the same for.

A thread of its own starts the zygote, reads all connections and lives as long as the zygote does, because the kernel's parent-death
signal goes by threads. Futures connect it with whoever has called. All processes are in a session of their own, out of the reach of
Ctrl-C. Whatever ends one of them ends all, and every call then fails with the reason.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from subprocess import DEVNULL, PIPE, STDOUT, Popen, TimeoutExpired
from typing import Any

from groupwise.errors import RunError
from groupwise.models.memory import REMEDY
from groupwise.plugins import explain
from groupwise.ranks.line import Answered, Call, Cancel, Ended, Failed, Line, Ready, Setup, Told
from groupwise.rewards.output import Output
from groupwise.rewards.processes import NO_GPU, PLAIN, has_ended, how_it_ended

_END_LIMIT = 10.0
"""Seconds that killed processes may take to end (they may hang in the kernel)."""
_LOOK_EVERY = 0.005
"""Seconds between two looks at whether the zygote has ended, when it is about to."""
_ENVIRONMENT = {
    **PLAIN,
    "OPENBLAS_NUM_THREADS": "1",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""One thread, and huge pages for what is allocated, where the system gives them: reading weights is a few per cent faster."""
_RESUME = "A run goes on from its last checkpoint with --resume."

RankCall = tuple[int, str, tuple[Any, ...]]
"""Which rank, what of it, with which arguments."""


class Ranks:
    """Worker processes that each host the same object, made once.

    `modules` are imported by the zygote while it waits to be told what to make. With `sees_gpus` it can be asked about GPUs until
    then; what it makes sees none. See `groupwise.ranks.rank` for what is hosted, and for what can be called.
    """

    def __init__(self, *modules: str, sees_gpus: bool = False) -> None:
        self.count = 0
        self.processes: tuple[int, ...] = ()
        """Their numbers, once they have been started."""
        self._modules = modules
        self._environment = _ENVIRONMENT if sees_gpus else {**_ENVIRONMENT, **NO_GPU}
        self._ready: Future[None] = Future()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._pending: dict[int, Future[Any]] = {}
        self._over: RunError | None = None
        """Why nothing can be called any more."""
        ours, self._theirs = socket.socketpair()
        self._control = Line(ours)
        self._lines: list[Line] = []
        self._selector = selectors.DefaultSelector()
        self._process: Popen[bytes] | None = None
        self._output: Output | None = None
        self._thread = threading.Thread(target=self._attend, name="ranks", daemon=True)

    @property
    def zygote(self) -> int:
        """The number of its process."""
        assert self._process is not None
        return self._process.pid

    def begin(self) -> None:
        """Start the zygote; does not wait for it."""
        self._thread.start()

    def ask(self, function: str, *arguments: Any) -> Any:
        """What a function (`package.module:function`) gives in the begun zygote, before it is told what to make.

        Raises what it raises, and RunError where the zygote has ended.
        """
        number, future = self._expected()
        try:
            self._send(self._control, Call(number, function, arguments))
        except BaseException:  # the arguments cannot be pickled
            self._awaited(number)
            raise
        return future.result()

    async def make(self, factory: str, arguments: Mapping[str, Any], count: int) -> None:
        """Have the begun zygote make what is hosted, and wait for `count` ranks that host it.

        `factory` names a function (`package.module:function`), which is called with `arguments`, expressible as JSON, as keywords.
        Raises what it raises, and RunError where a process has ended; all processes have ended then, and so they have if the wait is
        cancelled.
        """
        self._set_up(factory, arguments, count)
        try:
            await asyncio.wrap_future(self._ready)
        except BaseException:
            self.close()
            raise

    def make_now(self, factory: str, arguments: Mapping[str, Any], count: int) -> None:
        """As `make`, for code that is not async."""
        self._set_up(factory, arguments, count)
        try:
            self._ready.result()
        except BaseException:
            self.close()
            raise

    async def call(self, rank: int, name: str, *arguments: Any, droppable: bool = False) -> Any:
        """Call something of what a rank hosts. Cancelling the wait cancels the call if it is `droppable`; otherwise it goes on.

        Raises what it raises, and RunError where a process has ended.
        """
        number, future = self._ask(rank, name, arguments)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._awaited(number)
            if droppable:
                self._send(self._lines[rank], Cancel(number))
            raise

    async def call_each(self, calls: Iterable[RankCall], *, droppable: bool = False) -> list[Any]:
        """Make all calls at once; results in their order. Where several raise, the error of the first in this order is raised."""
        asked = [
            self.call(rank, name, *arguments, droppable=droppable)
            for rank, name, arguments in calls
        ]
        found = await asyncio.gather(*asked, return_exceptions=True)
        for each in found:
            if isinstance(each, BaseException):
                raise each
        return found

    async def call_all(self, name: str, *arguments: Any) -> list[Any]:
        """The same call of all ranks."""
        return await self.call_each((rank, name, arguments) for rank in range(self.count))

    def call_each_now(self, calls: Iterable[RankCall]) -> list[Any]:
        """As `call_each`, for code that is not async."""
        asked = [self._ask(*call) for call in calls]
        errors = [future.exception() for _, future in asked]
        for error in errors:
            if error is not None:
                raise error
        return [future.result() for _, future in asked]

    def call_all_now(self, name: str, *arguments: Any) -> list[Any]:
        """As `call_all`, for code that is not async."""
        return self.call_each_now((rank, name, arguments) for rank in range(self.count))

    def close(self) -> None:
        """End all processes, whatever they are doing, and wait until they are gone. May be called again."""
        self._end(RunError("The model workers are closed."))
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()
        for each in (self._control, *self._lines, self._theirs, self._selector):
            each.close()

    def _set_up(self, factory: str, arguments: Mapping[str, Any], count: int) -> None:
        pairs = [socket.socketpair() for _ in range(count)]
        self.count = count
        self._lines = [Line(ours) for ours, _ in pairs]
        setup = Setup(
            factory,
            json.loads(json.dumps(dict(arguments))),
            tuple(str(folder) for folder in sys.path),
            logging.getLogger("groupwise").getEffectiveLevel(),
        )
        with suppress(OSError):  # it has ended, and the thread hears why
            self._control.send(setup, [theirs for _, theirs in pairs])
        for _, theirs in pairs:
            theirs.close()

    def _ask(self, rank: int, name: str, arguments: tuple[Any, ...]) -> tuple[int, Future[Any]]:
        number, future = self._expected()
        if self._output is not None:
            self._output.begin_call()
        try:
            self._send(self._lines[rank], Call(number, name, arguments))
        except BaseException:  # the arguments cannot be pickled
            self._awaited(number)
            raise
        return number, future

    def _expected(self) -> tuple[int, Future[Any]]:
        """The number of a new call, and what will have its result."""
        future: Future[Any] = Future()
        with self._lock:
            if self._over is not None:
                raise self._over
            number = next(self._numbers)
            self._pending[number] = future
        return number, future

    def _awaited(self, number: int) -> Future[Any] | None:
        """The future of a call that is over; None where nobody waits for it any more."""
        with self._lock:
            return self._pending.pop(number, None)

    def _send(self, line: Line, message: Call | Cancel) -> None:
        with suppress(OSError):  # it has ended, and the thread hears why
            line.send(message)

    def _end(self, reason: RunError) -> None:
        """Fail what is under way and all that comes, and have the processes end."""
        with self._lock:
            if self._over is not None:
                return
            self._over = reason
            pending, self._pending = self._pending, {}
        for future in (self._ready, *pending.values()):
            _settle(future, error=reason)
        self._control.end()

    # --- what runs in the thread -----------------------------------------------------------------

    def _attend(self) -> None:
        try:
            reason = self._lived()
        except RunError as error:
            reason = error
        except BaseException as error:  # noqa: BLE001 — whoever waits for a call would wait for ever
            reason = RunError(
                f"What the model workers say cannot be taken:\n{explain(error)}\n{_RESUME}"
            )
            reason.__cause__ = error
        self._end(reason)

    def _lived(self) -> RunError:
        """Start the zygote and listen as long as it lives; how it ended. However this ends, the zygote has ended."""
        self._process = self._popen()
        try:
            self._output = Output(self._process, "model workers")
            self._listen()
        finally:
            self._control.end()
            how = self._reaped(self._process)
        words = self._output.last_words()
        return RunError(f"The process that holds the model ended: {how} {_RESUME}{words}")

    def _popen(self) -> Popen[bytes]:
        number = self._theirs.fileno()
        words = (str(os.getpid()), str(number), *self._modules)
        with self._theirs:  # from then on the zygote's alone, so that its end is noticed
            try:
                return Popen(
                    [sys.executable, "-P", "-m", "groupwise.ranks.zygote", *words],
                    stdin=DEVNULL,
                    stdout=PIPE,
                    stderr=STDOUT,
                    pass_fds=[number],
                    start_new_session=True,
                    env={**os.environ, **self._environment},
                )
            except OSError as error:
                raise RunError(f"The model workers cannot be started: {error}") from error

    def _listen(self) -> None:
        """Take messages until the zygote is gone or is to go."""
        self._selector.register(self._control, selectors.EVENT_READ, self._control)
        while True:
            for key, _ in self._selector.select():
                line: Line = key.data
                try:
                    messages = line.arrived()
                except EOFError:
                    if line is self._control:
                        return
                    self._selector.unregister(line)  # the zygote says why
                    continue
                for message in messages:
                    self._take(message)

    def _take(self, message: Ready | Ended | Answered | Failed | Told) -> None:
        match message:
            case Told(record):
                _log(record)
            case Answered(number, value):
                _settle(self._awaited(number), value)
            case Failed(0, error):
                _settle(self._ready, error=error)
            case Failed(number, error):
                _settle(self._awaited(number), error=error)
            case Ready(processes):
                self.processes = processes
                for line in self._lines:
                    self._selector.register(line, selectors.EVENT_READ, line)
                _settle(self._ready)
            case Ended(rank, code):
                assert self._output is not None
                who = f"Model worker {rank + 1} of {self.count}"
                self._end(RunError(f"{who} ended: {_how(code)} {_RESUME}"))

    def _reaped(self, process: Popen[bytes]) -> str:
        """How the zygote ended, which it does by itself; one that is still making something, or hangs, is killed."""
        deadline = time.monotonic() + (_END_LIMIT if self.processes else 0.0)
        while not has_ended(process) and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(TimeoutExpired):
            process.wait(_END_LIMIT)
        return _how(process.returncode)


def _how(code: int | None) -> str:
    """How a process ended, and what needs less memory where that may be why."""
    how = f"{how_it_ended(code)}."
    return f"{how} {REMEDY}" if code == -signal.SIGKILL else how


def _log(record: logging.LogRecord) -> None:
    """Log it in this process. What a handler or a filter raises is told as handlers of the standard library do, and ends nothing."""
    log = logging.getLogger(record.name)
    try:
        if log.isEnabledFor(record.levelno):
            log.handle(record)
    except Exception:  # noqa: BLE001 — code of the user's, which has no part in the run
        logging.Handler().handleError(record)


def agreed(what: str, found: Sequence[str]) -> str:
    """What all ranks say of `what`. Raises RunError if they do not say the same."""
    if len(set(found)) > 1:
        raise RunError(
            f"The model workers have come apart: {what} should be the same in all of them, and are {', '.join(found)}. "
            f"Please report this. {_RESUME}"
        )
    return found[0]


def _settle(
    future: Future[Any] | None, value: Any = None, error: BaseException | None = None
) -> None:
    """Give a future its result, if anybody still waits for it."""
    if future is None:
        return
    with suppress(InvalidStateError):
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)
