"""The worker process in Tunix's environment: starting it, calling it, ending it.

A thread starts it and reads its answers; futures connect the thread with the callers, who may await or block. If the worker ends for any
reason, every call then fails with its exit status and its last output; a run can resume from its last checkpoint. The thread lives as long
as the worker, because the kernel ends a process with the thread that started it (`groupwise.core.processes.process_tree.tie_to_parent`).
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import secrets
import socket
import subprocess
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from groupwise.core import errors
from groupwise.core.errors import RunError
from groupwise.core.processes.output import Output
from groupwise.core.processes.process_tree import MARK, describe_exit, kill_process_tree
from groupwise.engine.backends.tunix.messages import Answer, Order, Verb

MAIN = Path(__file__).parent / "worker" / "main.py"
OF_ANOTHER = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV")
"""Variables that would make Tunix's Python use packages of this environment."""
WITHHELD = re.compile(
    r"(^|_)(token|secret|password|passwd|credentials|key|key_id)$|^kaggle_", re.IGNORECASE
)
"""Matches variables that may be credentials: the worker only reads local files, and needs none."""
LAST_BREATH = 1.0
"""Seconds that the worker gets to end by itself, so that its exit code is not that of a kill."""


def own_environment() -> dict[str, str]:
    """This process's variables, without those that a process in Tunix's environment must not have."""
    return {key: value for key, value in os.environ.items() if key not in OF_ANOTHER}


class WorkerProcess:
    """One worker process. Its owner must call `close`."""

    def __init__(self, python: Path, environment: Mapping[str, str]) -> None:
        """Start the worker. `environment` is added to this process's variables."""
        self._mark = secrets.token_hex(8)
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._pending: dict[int, Future[Any]] = {}
        self._ended: str | None = None
        self._connection, theirs = socket.socketpair()
        self._lines = self._connection.makefile("r", encoding="utf-8")
        started: Future[subprocess.Popen[bytes]] = Future()
        self._reader = threading.Thread(
            target=self._start_and_read,
            args=(python, environment, theirs, started),
            name="tunix answers",
            daemon=True,
        )
        self._reader.start()
        self._process = started.result()
        self._output = Output(self._process, "tunix")

    def tell(self, do: Verb) -> None:
        """Send an order without waiting for its result. If the worker has ended, do nothing."""
        with suppress(RunError):
            self.begin(do)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def call(self, do: Verb) -> Any:
        """The result of an order. Cancelling the call withdraws the order if it has not started."""
        return await asyncio.wrap_future(self.begin(do))

    def call_now(self, do: Verb) -> Any:
        """Like `call`, for code that is not async."""
        return self.begin(do).result()

    def last_output(self) -> str:
        """The worker's last output, for a message."""
        return self._output.last_output()

    def close(self) -> None:
        """End the worker, and all processes that it started."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(LAST_BREATH)
        kill_process_tree(self._process.pid, self._mark)
        self._process.wait()
        self._reader.join()
        self._lines.close()
        self._connection.close()
        self._output.join()

    def begin(self, do: Verb) -> Future[Any]:
        """Send an order; the future receives its result."""
        self._output.begin_call()
        future: Future[Any] = Future()
        number = next(self._numbers)
        with self._lock:
            if self._ended is not None:
                raise RunError(self._ended)
            self._pending[number] = future
            self._send_order(Order(number=number, do=do))

        def withdraw_if_cancelled(done: Future[Any]) -> None:
            if done.cancelled():
                with self._lock:
                    if self._pending.pop(number, None) is not None:
                        self._send_order(Order(cancel=number))

        future.add_done_callback(withdraw_if_cancelled)
        return future

    def _send_order(self, order: Order) -> None:
        line = order.model_dump_json() + "\n"
        with suppress(OSError):  # the worker has ended; the reading thread handles that
            self._connection.sendall(line.encode())

    def _start_and_read(
        self,
        python: Path,
        environment: Mapping[str, str],
        theirs: socket.socket,
        started: Future[subprocess.Popen[bytes]],
    ) -> None:
        """Run by the thread: start the process, take its answers, and fail the pending calls when it ends."""
        inherited = {k: v for k, v in own_environment().items() if not WITHHELD.search(k)}
        try:
            with theirs:
                process = subprocess.Popen(
                    [str(python), "-P", "-s", str(MAIN), str(theirs.fileno()), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    env={**inherited, **environment, MARK: self._mark},
                )
        except Exception as error:  # noqa: BLE001 — belongs to the caller that waits for the start
            self._lines.close()
            self._connection.close()
            started.set_exception(error)
            return
        started.set_result(process)
        with suppress(OSError, ValueError):
            for line in self._lines:
                self._handle_answer(Answer.model_validate_json(line))
        with suppress(subprocess.TimeoutExpired):
            process.wait(LAST_BREATH)
        how = describe_exit(process.poll())
        reason = f"The Tunix worker ended: {how}{self._output.last_output()}"
        with self._lock:
            self._ended = reason
            pending, self._pending = self._pending, {}
        for future in pending.values():
            if future.set_running_or_notify_cancel():
                future.set_exception(RunError(reason))

    def _handle_answer(self, answer: Answer) -> None:
        with self._lock:
            future = self._pending.pop(answer.number, None)
        if future is None or not future.set_running_or_notify_cancel():
            return
        if answer.error is None:
            future.set_result(answer.result)
        else:
            kind = getattr(errors, answer.error.kind)
            future.set_exception(kind(answer.error.message))
