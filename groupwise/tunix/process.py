"""The worker: started in Tunix's environment, called, and ended.

A thread reads its answers; futures connect it with the callers, who may await or wait. Whatever ends the worker, every call then fails with
how it ended and its last words; a run goes on from its last checkpoint.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import socket
import subprocess
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from groupwise import errors
from groupwise.errors import GroupwiseError, RunError
from groupwise.rewards.output import Output
from groupwise.rewards.processes import MARK, end_family, how_it_ended
from groupwise.tunix.messages import Answer, Order, Trouble, Verb

MAIN = Path(__file__).parent / "worker" / "main.py"
OF_ANOTHER = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV")
"""Variables that would have Tunix's Python take packages of this one."""
LAST_BREATH = 1.0
"""Seconds that it gets to end by itself, so that its exit code is its own."""


def own_environment() -> dict[str, str]:
    """This process's variables, as a process of Tunix's environment may have them."""
    return {key: value for key, value in os.environ.items() if key not in OF_ANOTHER}


class WorkerProcess:
    """One worker. Whoever has it calls `close`."""

    def __init__(self, python: Path, environment: Mapping[str, str]) -> None:
        """Start it. `environment`: in addition to this process's own."""
        self._mark = secrets.token_hex(8)
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._pending: dict[int, Future[Any]] = {}
        self._ended: str | None = None
        self._connection, theirs = socket.socketpair()
        with theirs:
            self._process = self._popen(python, environment, theirs.fileno())
        self._output = Output(self._process, "tunix")
        self._lines = self._connection.makefile("r", encoding="utf-8")
        self._reader = threading.Thread(target=self._read, name="tunix answers", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def call(self, do: Verb) -> Any:
        """What an order gives. Cancelling the call withdraws it, if it has not begun."""
        return await asyncio.wrap_future(self._begin(do))

    def call_now(self, do: Verb) -> Any:
        """The same for code that waits."""
        return self._begin(do).result()

    def close(self) -> None:
        """End it, with all that it started."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(LAST_BREATH)
        end_family(self._process.pid, self._mark)
        self._process.wait()
        self._reader.join()
        self._lines.close()
        self._connection.close()
        self._output.join()

    def _popen(
        self, python: Path, environment: Mapping[str, str], number: int
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [str(python), "-P", "-s", str(MAIN), str(number)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[number],
            start_new_session=True,
            env={**own_environment(), **environment, MARK: self._mark},
        )

    def _begin(self, do: Verb) -> Future[Any]:
        self._output.begin_call()
        future: Future[Any] = Future()
        number = next(self._numbers)
        with self._lock:
            if self._ended is not None:
                raise RunError(self._ended)
            self._pending[number] = future
            self._send(Order(number=number, do=do))
        future.add_done_callback(lambda done: self._withdraw(number) if done.cancelled() else None)
        return future

    def _withdraw(self, number: int) -> None:
        with self._lock:
            if self._pending.pop(number, None) is not None:
                self._send(Order(cancel=number))

    def _send(self, order: Order) -> None:
        line = order.model_dump_json() + "\n"
        with suppress(OSError):  # it has ended, which the reader tells
            self._connection.sendall(line.encode())

    def _read(self) -> None:
        with suppress(OSError, ValueError):
            for line in self._lines:
                self._take(Answer.model_validate_json(line))
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(LAST_BREATH)
        how = how_it_ended(self._process.poll())
        reason = f"The Tunix worker ended: {how}{self._output.last_words()}"
        with self._lock:
            self._ended = reason
            pending, self._pending = self._pending, {}
        for future in pending.values():
            _fail(future, RunError(reason))

    def _take(self, answer: Answer) -> None:
        with self._lock:
            future = self._pending.pop(answer.number, None)
        if future is None or not future.set_running_or_notify_cancel():
            return
        if answer.error is None:
            future.set_result(answer.result)
        else:
            future.set_exception(_error(answer.error))


def _fail(future: Future[Any], error: Exception) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)


def _error(trouble: Trouble) -> GroupwiseError:
    return getattr(errors, trouble.kind)(trouble.message)
