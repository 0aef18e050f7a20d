"""A client of an app in this process, and of one behind uvicorn, for the tests of the HTTP side."""

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, cast

import httpx2
import uvicorn
from fastapi import FastAPI

from groupwise.api.schemas.keys import Keyring, Role, new_key, read_key_file
from groupwise.server.routes.context import Serving
from groupwise.server.run.service import Service
from groupwise.server.serve import Uvicorn, make_app
from groupwise.server.settings import ServerConfig
from tests.unit.server.fake_service import FakeService

HERE = "http://127.0.0.1"


def app_of(service: FakeService, keys: Keyring | None = None, **settings: Any) -> FastAPI:
    return make_app(cast("Service", service), ServerConfig(output_dir="unused", **settings), keys)


def serving_of(app: FastAPI) -> Serving:
    return app.state.shared


def client_of(app: FastAPI, **headers: str) -> httpx2.AsyncClient:
    transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
    return httpx2.AsyncClient(transport=transport, base_url=HERE, headers=headers)


def keyring() -> tuple[Keyring, dict[Role, str]]:
    """A key of each role."""
    made = {role: new_key(role) for role in Role}
    stored = read_key_file("\n".join(key.line for key in made.values()), "keys")
    return Keyring(stored), {role: key.key for role, key in made.items()}


@asynccontextmanager
async def listening(app: FastAPI) -> AsyncGenerator[int]:
    """The port of a real server."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        config = uvicorn.Config(
            app, log_config=None, access_log=False, ws="none", lifespan="off", loop="asyncio"
        )
        config.timeout_graceful_shutdown = 5
        server = Uvicorn(config)
        task = asyncio.create_task(server.serve(sockets=[bound]))
        await server.listening.wait()
        try:
            yield bound.getsockname()[1]
        finally:
            server.should_exit = True
            await task
