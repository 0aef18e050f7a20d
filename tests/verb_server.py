"""The verbs over a fake engine on loopback, and the real client pointed to them.

The client's package `tinker` is part of the extra `dev`; where it is missing, the tests that import this fail and say so.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from groupwise.http.bodies import Bodies
from groupwise.server.verbs.messages import installed
from groupwise.server.verbs.routes import verb_routes
from groupwise.server.verbs.service import VerbService
from groupwise.testing.fake_verbs import FakeVerbs
from groupwise.wire.problems import Refusal

KEY = "tml-1-secret"

assert installed(), "The Tinker client is not installed: pip install 'groupwise[dev]'"


def only_this_key(request: Request) -> None:
    if request.headers.get("x-api-key") != KEY:
        raise Refusal("unauthorised")


@dataclass
class VerbServer:
    """A server that is up. Every request is counted; the answers to some can be lost on their way."""

    url: str
    engine: FakeVerbs
    asked: list[str] = field(default_factory=list[str])
    """The path of each request, without the prefix."""
    lose: Callable[[str, int], bool] = lambda path, number: False
    """Whether the answer to the so-many-th request for a path is lost, after it has been acted upon."""

    def times(self, path: str) -> int:
        return self.asked.count(path)


def app(service: VerbService, poll: float = 0.2, bodies: Bodies | None = None) -> Starlette:
    return Starlette(routes=verb_routes(service, only_this_key, poll=poll, bodies=bodies))


def _lossy(inner: ASGIApp, server: VerbServer) -> ASGIApp:
    """Acts upon every request, and answers 502 in place of what is lost."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await inner(scope, receive, send)
            return
        path = scope["path"].removeprefix("/api/v1/")
        server.asked.append(path)
        if not server.lose(path, server.times(path)):
            await inner(scope, receive, send)
            return

        async def nowhere(message: Message) -> None:
            """The answer is lost."""

        await inner(scope, receive, nowhere)
        await Response(b"lost", 502)(scope, receive, send)

    return wrapped


@contextmanager
def serve_verbs(folder: Path) -> Generator[VerbServer]:
    engine = FakeVerbs(folder)
    service = VerbService(engine)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = VerbServer(f"http://127.0.0.1:{listening.getsockname()[1]}", engine)
        config = uvicorn.Config(
            _lossy(app(service), server), log_level="error", lifespan="off", ws="none"
        )
        running = uvicorn.Server(config)

        async def run() -> None:
            await service.open()
            await running.serve(sockets=[listening])
            await service.close()

        thread = threading.Thread(target=asyncio.run, args=(run(),))
        thread.start()
        try:
            while not running.started:
                assert thread.is_alive(), "the server has ended"
                threading.Event().wait(0.01)
            yield server
        finally:
            running.should_exit = running.force_exit = True
            thread.join()
