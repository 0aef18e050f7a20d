"""This machine as a host: each call runs the bootstrap in its own process, exactly as over SSH, but without a shell.

So the embedded default and a fleet of machines use the same runner. Started attempts survive the end of the control plane, because the
runner detaches them.

A call ends when the answer is complete, not when the process's output ends: processes that it has started may keep that open for hours."""

from __future__ import annotations

import asyncio
import functools
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence

from groupwise.core.waiting import wait_at_most
from groupwise.jobs.hosts.bootstrap import BOOTSTRAP, FLAGS
from groupwise.jobs.hosts.framing import Exchange, checked_answer, request_bytes, timeout_message
from groupwise.jobs.hosts.host import HostUnreachable, OutcomeUnknown, Request, RunnerResponse

STANDARD_OUTPUT, STANDARD_ERROR = 1, 2
EXIT_GRACE = 2.0
"""Seconds that the runner has to end by itself after its answer."""
PASSED_VARIABLES = (
    "HOME",
    "USER",
    "LOGNAME",
    "PATH",
    "LANG",
    "TMPDIR",
    "XDG_RUNTIME_DIR",
    "SLURM_CONF",
)
"""Variables that a login sets. All others, such as keys of the control plane, are withheld: the started process may outlive it."""


class LocalHost:
    """The machine that the control plane itself runs on."""

    def __init__(
        self,
        python: str = sys.executable,
        *,
        environment: Mapping[str, str] | None = None,
        extra_variables: Iterable[str] = (),
    ) -> None:
        """`python` runs the bootstrap with `environment`; None: with those variables of this process that are in PASSED_VARIABLES or
        `extra_variables`."""
        self._command = (python, *FLAGS, "-c", BOOTSTRAP)
        if environment is None:
            names = (*PASSED_VARIABLES, *extra_variables)
            environment = {name: os.environ[name] for name in names if name in os.environ}
        self._environment = dict(environment)
        self._processes: set[_Process] = set()
        self._closed = False

    async def call(self, request: Request, *, timeout: float) -> RunnerResponse:
        """See `Host.call`."""
        if self._closed:
            raise HostUnreachable("this connection has been closed")
        process = _Process(request)
        try:
            await process.start(self._command, self._environment, request_bytes(request))
        except OSError as error:
            raise HostUnreachable(f"{self._command[0]} cannot be started here: {error}") from error
        self._processes.add(process)
        try:
            async with process.exchange.limit(timeout, request.longest):
                return checked_answer(await process.exchange.answer)
        except TimeoutError:
            raise OutcomeUnknown(timeout_message(request, "this machine", timeout)) from None
        finally:
            self._processes.discard(process)
            await process.end()

    async def close(self) -> None:
        """See `Host.close`."""
        self._closed = True
        for process in tuple(self._processes):
            process.exchange.fail(
                OutcomeUnknown("the connection to this machine was closed meanwhile")
            )


class _Process:
    """One process of the bootstrap: sends the request, and reads the answer as it arrives.

    It does not use asyncio's subprocesses: in Python 3.11, if a task is cancelled while one of them starts, it waits for ever."""

    def __init__(self, request: Request) -> None:
        self.exchange = Exchange(request)
        self._child: subprocess.Popen[bytes] | None = None
        self._pipes: list[asyncio.BaseTransport] = []
        self.open_outputs = {STANDARD_OUTPUT, STANDARD_ERROR}
        self._exited = asyncio.Event()

    async def start(
        self, command: Sequence[str], environment: Mapping[str, str], request: bytes
    ) -> None:
        """Start the process, and send it the request. If this fails or is cancelled, the process is ended. Raises OSError."""
        child = self._spawn(command, environment)
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        loop = asyncio.get_running_loop()
        try:
            for number, pipe in ((STANDARD_OUTPUT, child.stdout), (STANDARD_ERROR, child.stderr)):
                reader, _ = await loop.connect_read_pipe(
                    functools.partial(_Pipe, self, number), pipe
                )
                self._pipes.append(reader)
            writer, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, child.stdin)
            self._pipes.append(writer)
            self.exchange.is_sent = True
            writer.write(request)
            writer.write_eof()
        except BaseException:
            try:
                await self.end()
            finally:  # some pipes may have no transport yet
                for pipe in (child.stdin, child.stdout, child.stderr):
                    pipe.close()
            raise

    def _spawn(
        self, command: Sequence[str], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        # In its own session: Ctrl-C in the control plane's terminal must not reach the runner.
        child = self._child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=environment,
            cwd="/",
            start_new_session=True,
        )
        loop = asyncio.get_running_loop()
        handle = os.pidfd_open(child.pid)

        def has_ended() -> None:
            loop.remove_reader(handle)
            os.close(handle)
            self.exchange.status = child.wait()  # returns at once
            self._exited.set()
            self.check_for_end()

        loop.add_reader(handle, has_ended)
        return child

    async def end(self) -> None:
        """Stop watching the process. If it does not end by itself, it is killed; processes that it has started are not."""
        self.exchange.drop()
        try:
            await wait_at_most(EXIT_GRACE if self.exchange.is_answered else 0, self._exited)
        finally:
            for pipe in self._pipes:
                pipe.close()
            assert self._child is not None
            if not self._exited.is_set():
                self._child.kill()
        await wait_at_most(EXIT_GRACE, self._exited)

    def check_for_end(self) -> None:
        """The answer is whole once the process and both its outputs have ended."""
        if self._exited.is_set() and not self.open_outputs:
            self.exchange.end_of_output()


class _Pipe(asyncio.Protocol):
    """The reading end of one output of the process."""

    def __init__(self, process: _Process, number: int) -> None:
        self._process, self._number = process, number

    def data_received(self, data: bytes) -> None:
        if self._number == STANDARD_ERROR:
            self._process.exchange.take_stderr(data)
        else:
            self._process.exchange.take_stdout(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._process.open_outputs.discard(self._number)
        self._process.check_for_end()
