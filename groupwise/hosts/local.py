"""This machine as a host: each call runs the bootstrap as a process of its own, exactly as it would be run over SSH, without a shell.

So the embedded default and a fleet of machines go through the same runner, and what is started lives on when the control plane ends:
the runner detaches it.

A call ends when the answer is whole, not when the process's output ends: what it left behind may hold that open for hours.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Mapping
from typing import cast

from groupwise.hosts.bootstrap import BOOTSTRAP, FLAGS
from groupwise.hosts.framing import Exchange, accepted, no_answer, request_bytes
from groupwise.hosts.port import Answer, HostUnreachable, OutcomeUnknown, Request

STANDARD_INPUT, STANDARD_OUTPUT, STANDARD_ERROR = 0, 1, 2
ENDS_BY_ITSELF = 2.0
"""Seconds that the runner has to end after its answer."""
PASSED_ON = ("HOME", "USER", "LOGNAME", "PATH", "LANG", "TMPDIR", "XDG_RUNTIME_DIR")
"""What a login sets. The rest, keys of the control plane among it, is nothing for a process that outlives it."""


def _of_a_login() -> dict[str, str]:
    return {name: os.environ[name] for name in PASSED_ON if name in os.environ}


class LocalHost:
    """The machine that the control plane itself runs on."""

    def __init__(
        self, python: str = sys.executable, *, environment: Mapping[str, str] | None = None
    ) -> None:
        """`python` runs the bootstrap, with those variables of this process that a login would set too, or with `environment`."""
        self._command = (python, *FLAGS, "-c", BOOTSTRAP)
        self._environment = dict(environment if environment is not None else _of_a_login())
        self._under_way: set[_Process] = set()
        self._closed = False

    async def call(self, request: Request, *, timeout: float) -> Answer:
        """See `Host.call`."""
        if self._closed:
            raise HostUnreachable("this connection has been closed")
        process = await self._begin(request)
        self._under_way.add(process)
        try:
            async with process.exchange.limit(timeout, request.longest):
                return accepted(await process.exchange.answer)
        except TimeoutError:
            raise OutcomeUnknown(no_answer(request, "this machine", timeout)) from None
        finally:
            self._under_way.discard(process)
            await process.end()

    async def _begin(self, request: Request) -> _Process:
        try:
            # A session of its own: Ctrl-C in the terminal of the control plane is not meant for the runner.
            _, process = await asyncio.get_running_loop().subprocess_exec(
                lambda: _Process(request_bytes(request)),
                *self._command,
                env=self._environment,
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            raise HostUnreachable(f"{self._command[0]} cannot be started here: {error}") from error
        return process

    async def close(self) -> None:
        """See `Host.close`."""
        self._closed = True
        for process in tuple(self._under_way):
            process.exchange.fail(
                OutcomeUnknown("the connection to this machine was closed meanwhile")
            )


class _Process(asyncio.SubprocessProtocol):
    """One process of the bootstrap: the request goes in, the answer is read as it comes."""

    def __init__(self, request: bytes) -> None:
        self.exchange = Exchange()
        self._request = request
        self._transport: asyncio.SubprocessTransport | None = None
        self._open = {STANDARD_OUTPUT, STANDARD_ERROR}
        self._exited = asyncio.Event()

    async def end(self) -> None:
        """Let go of it. A process that does not end by itself is killed; what it has started is not."""
        self.exchange.drop()
        assert self._transport is not None
        try:
            await self._exits(within=ENDS_BY_ITSELF if self.exchange.answered else 0)
        finally:
            self._transport.close()
        await self._exits(within=ENDS_BY_ITSELF)

    async def _exits(self, within: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                await self._exited.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.SubprocessTransport", transport)
        pipe = cast("asyncio.WriteTransport", self._transport.get_pipe_transport(STANDARD_INPUT))
        pipe.write(self._request)
        pipe.write_eof()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == STANDARD_ERROR:
            self.exchange.complained(data)
        else:
            self.exchange.heard(data)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._open.discard(fd)
        self._perhaps_over()

    def process_exited(self) -> None:
        assert self._transport is not None
        self.exchange.status = self._transport.get_returncode()
        self._exited.set()
        self._perhaps_over()

    def _perhaps_over(self) -> None:
        if self._exited.is_set() and not self._open:
            self.exchange.over()
