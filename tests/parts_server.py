"""A training server with nothing but parts, in this process: its routes, its service, and an engine whose calls are pickled as across a
socket. Whoever sends requests by `transport` runs it in his own event loop.
"""

from __future__ import annotations

import asyncio
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

import httpx2

from groupwise.server.engine.core import EngineCore
from groupwise.server.engine.engine_protocol import EngineLost
from groupwise.server.engine.messages import pack, pack_error, unpack, unpack_error
from groupwise.server.parts.service import PartsService
from groupwise.server.routes.parts import parts_routes
from groupwise.server.run.run_config import AllowedModels
from groupwise.server.run.service import Service
from groupwise.server.serve import make_app
from groupwise.server.settings import ServerConfig
from tests.unit.server.fake_service import FakeService

HERE = "http://127.0.0.1:8000"


class EngineHere:
    """An engine in this process, as the HTTP process sees one in another."""

    def __init__(self, core: Any = None) -> None:
        self.core: Any = core or EngineCore()
        self.calls: list[str] = []
        self.lost: str | None = None
        """The reason why the engine ended."""
        self.closed = False

    @property
    def reason(self) -> str | None:
        return self.lost

    async def call(self, verb: str, *arguments: Any) -> Any:
        self._check()
        self.calls.append(verb)
        try:
            result = await attrgetter(verb)(self.core)(*unpack(pack(arguments)))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 — as in the engine's process
            raise unpack_error(pack_error(error)) from None
        self._check()
        return unpack(pack(result))

    async def close(self) -> None:
        self.closed = True
        await self.core.close()

    def _check(self) -> None:
        if self.lost is not None:
            raise EngineLost(self.lost)


class NoRuns:
    """Stands in for runs: none uses the machine."""

    def __init__(self) -> None:
        self.machine_lock = asyncio.Lock()

    def active_conductor(self) -> None:
        return None

    async def make_room(self, for_user: str) -> None:
        """There is nothing to remove."""


class PartsServer:
    """See the module."""

    def __init__(self, folder: Path, *, make_core: Any = EngineCore, **more: Any) -> None:
        """`make_core` makes an engine's core; `more` is passed to the service."""
        self.engines: list[EngineHere] = []
        self.fails: list[BaseException] = []
        """Errors that are raised in place of making the next engines, the last one first."""
        self._make_core = make_core
        limits = {"silence": 120.0, "longest_wait": 60.0, "most_bytes": 32 << 20}
        settings = {**limits, "runs": NoRuns(), **more}
        self.service = PartsService(
            make_engine=self._engine,  # pyright: ignore[reportArgumentType]
            allowed=AllowedModels(folder / "models", ()),
            folder=folder / "parts",
            **settings,
        )
        config = ServerConfig(output_dir=str(folder), max_body_bytes=settings["most_bytes"])
        app = make_app(
            cast("Service", FakeService()), config, None, also=parts_routes(self.service)
        )
        self.transport = httpx2.ASGITransport(app)  # pyright: ignore[reportArgumentType]

    async def _engine(self) -> EngineHere:
        if self.fails:
            raise self.fails.pop()
        self.engines.append(EngineHere(self._make_core()))
        return self.engines[-1]
