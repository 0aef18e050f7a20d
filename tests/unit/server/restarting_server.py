"""A server in this process that can be restarted under its clients: the real routes over the fake engine, without a socket.

A restart does what `serve` does at SIGTERM: new work is refused, the service shuts down, requests that are still answered get a moment
more, and what is left of them is cut off. While no server runs, connections fail. Then the next one goes on from the same folder.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx2
from fastapi import FastAPI

from groupwise.api.client.async_training_client import AsyncTrainingClient
from groupwise.core.errors import UsageError
from groupwise.core.retry import Timing
from groupwise.server.engine.engine_protocol import EngineLost
from groupwise.server.serve import make_app
from tests.fake_engine import FakeEngine, Point
from tests.unit.server.http_client import serving_of
from tests.unit.server.serving import Served

LINGER = 0.02
"""Seconds that requests get to end by themselves after the service has shut down."""

Passed = Callable[[str], Any]
"""Called, and awaited, with the name of each point that a call to the engine or the ledger passes."""


class PointedEngine(FakeEngine):
    """Reports its points. Once it is closed, calls fail as with parts that are half closed: by an error that is not an EngineLost."""

    def __init__(self, passed: Passed) -> None:
        super().__init__()
        self._passed = passed

    async def pass_point(self, verb: str, point: Point, call: int, step: int | None) -> None:
        await self._passed(f"{verb}:{point}")
        await super().pass_point(verb, point, call, step)

    async def _called(self, verb: Any, do: Any, *arguments: Any, step: int | None = None) -> Any:
        try:
            return await super()._called(verb, do, *arguments, step=step)
        except EngineLost:
            if verb == "sample":
                raise UsageError("The sampler is closed.") from None
            raise


class PointedServer(Served):
    """One server process, which reports what its engine and its ledger pass."""

    def __init__(self, folder: Path, passed: Passed, **config: Any) -> None:
        super().__init__(folder, **config)
        self._passed = passed
        do = self.ledger.do

        async def reported(operation: Any, *arguments: Any, **more: Any) -> Any:
            await passed(f"{operation.__name__}:before")
            result = await do(operation, *arguments, **more)
            await passed(f"{operation.__name__}:after")
            return result

        self.ledger.do = reported  # pyright: ignore[reportAttributeAccessIssue]
        self.app = make_app(self.service, self.config, None)

    async def _engine(self) -> FakeEngine:
        engine = PointedEngine(self._passed)
        self.engines.append(engine)
        return engine


class RestartingServer(httpx2.AsyncBaseTransport):
    """The transport of its clients. Use `restart` while they run."""

    def __init__(self, folder: Path, passed: Passed, **config: Any) -> None:
        self.server: PointedServer | None = None
        self.refused: list[tuple[str, int]] = []
        """Path and status of every refusal."""
        self._folder, self._passed, self._config = folder, passed, config
        self._answering: set[asyncio.Task[None]] = set()

    async def begin(self) -> PointedServer:
        server = PointedServer(self._folder, self._passed, **self._config)
        await server.service.begin()
        self.server = server
        return server

    async def end(self) -> None:
        server = self.server
        assert server is not None
        serving_of(server.app).end()
        await server.service.shut_down(5)
        await asyncio.sleep(LINGER)
        self.server = None
        for task in tuple(self._answering):
            task.cancel()

    async def restart(self) -> None:
        await self.end()
        await self.begin()

    def client(self) -> AsyncTrainingClient:
        """A client that waits little between its attempts."""

        async def soon(_: float) -> None:
            await asyncio.sleep(0.002)

        timing = Timing(sleep=soon)
        return AsyncTrainingClient("http://127.0.0.1", transport=self, timing=timing)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if self.server is None:
            raise httpx2.ConnectError("no server runs")
        messages: asyncio.Queue[Any] = asyncio.Queue()
        work = self._answer(self.server.app, request, messages)
        task = asyncio.create_task(work)
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)
        task.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            start = await messages.get()
        except BaseException:
            task.cancel()
            raise
        if start is None:
            raise httpx2.ReadError("the connection was cut")
        if start["status"] >= 400:
            self.refused.append((request.url.path, start["status"]))
        return httpx2.Response(
            start["status"], headers=start["headers"], stream=_Body(task, messages)
        )

    async def _answer(
        self, app: FastAPI, request: httpx2.Request, messages: asyncio.Queue[Any]
    ) -> None:
        unread = [await request.aread()]

        async def receive() -> dict[str, Any]:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            await asyncio.Event().wait()
            raise AssertionError

        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": "http",
            "path": request.url.path,
            "raw_path": request.url.raw_path,
            "query_string": request.url.query,
            "root_path": "",
            "server": None,
            "client": ("127.0.0.1", 1),
            "headers": [(name.lower(), value) for name, value in request.headers.raw],
        }
        await app(scope, receive, messages.put)


class _Body(httpx2.AsyncByteStream):
    def __init__(self, task: asyncio.Task[None], messages: asyncio.Queue[Any]) -> None:
        self._task, self._messages = task, messages

    async def __aiter__(self) -> AsyncIterator[bytes]:
        more = True
        while more:
            message = await self._messages.get()
            if message is None:
                raise httpx2.ReadError("the connection was cut")
            yield message.get("body", b"")
            more = message.get("more_body", False)

    async def aclose(self) -> None:
        self._task.cancel()
