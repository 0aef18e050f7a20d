"""Mounts the Tinker API in a server: built on its ledger and engines, and placed in front of its other routes.

Requests below `/api/v1` are handled here, with the server's own keys, roles and limits; all others are passed to the other routes.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from groupwise.api.http.bodies import SHUTTING_DOWN_RETRY
from groupwise.api.http.middleware import RequestMiddleware, RouteTable
from groupwise.api.http.origins import check_local
from groupwise.api.http.shared_state import facts_of
from groupwise.api.schemas.keys import Keyring, Role, caller_of
from groupwise.api.schemas.problems import Refusal
from groupwise.server.engine.engine_protocol import Engine
from groupwise.server.ledger.writer import Ledger
from groupwise.server.routes.context import Serving
from groupwise.server.run.engine_supervisor import EngineSupervisor, Limits
from groupwise.server.run.run_config import AllowedModels
from groupwise.server.run.service import Service
from groupwise.server.settings import ServerConfig
from groupwise.server.tinker.engine_manager import NAME, TinkerEngineManager
from groupwise.server.tinker.routes import PREFIX, Authorise, tinker_routes
from groupwise.server.tinker.service import TinkerService

logger = logging.getLogger(__name__)

FOLDER = "verbs"
"""Subfolder of the server's output for the weights that models save. It keeps its first name, so that servers find what they saved."""


class TinkerApi:
    """The Tinker API of one server: its service and the engines that it uses."""

    def __init__(
        self,
        config: ServerConfig,
        ledger: Ledger,
        runs: Service,
        make_engine: Callable[[], Awaitable[Engine]],
    ) -> None:
        limits = Limits(restarts=config.max_engine_restarts, window=config.restart_window)
        self._host = TinkerEngineManager(
            runs=runs,
            supervisor=EngineSupervisor(make_engine, limits),
            ledger=ledger,
            allowed=AllowedModels(
                Path(config.model_dir).expanduser(), tuple(config.allowed_models)
            ),
            folder=str(config.folder / FOLDER),
            most=config.max_models,
            longest=config.max_context_length,
        )
        self.service = TinkerService(self._host, ledger, keep_every=config.keep_models_every)
        runs.machine_users[NAME] = self
        runs.tinker_status = self.service.status
        runs.sessions = self.service.registry.list_sessions

    async def begin(self) -> None:
        """Load the sessions, models and calls of earlier processes, and continue the calls."""
        await self._host.open()
        await self.service.open()

    async def release_machine(self) -> None:
        """See `groupwise.server.run.lifecycle.MachineUser.release_machine`."""
        await self.service.registry.free_room()
        await self._host.release_machine(self.service.registry.with_models())

    async def release_for_replacement(self) -> None:
        """See `groupwise.server.run.lifecycle.MachineUser.release_for_replacement`."""
        for session in self.service.registry.with_models():
            logger.warning("the session %s ends for a run that is started with `replace`", session)
            await self.service.registry.finish(session)

    async def shut_down(self) -> None:
        """End the engine; waiting calls are left to the next server."""
        await self.service.close()
        await self._host.close()


class TinkerMiddleware:
    """Routes requests below `PREFIX` to the Tinker API, and all others to the wrapped application."""

    def __init__(
        self, app: ASGIApp, service: TinkerService, serving: Serving, keys: Keyring | None
    ) -> None:
        """`serving` and `keys` belong to the wrapped application."""
        self._behind = app
        routes = tinker_routes(service, authorising(serving, keys), bodies=serving.bodies)
        # One name in the metrics for all of them, because most requests are polls that return 408.
        self._tinker = RequestMiddleware(Starlette(routes=routes), serving, RouteTable(()), PREFIX)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request to the Tinker API, or pass it to the application."""
        ours = scope["type"] == "http" and scope["path"].startswith(f"{PREFIX}/")
        await (self._tinker if ours else self._behind)(scope, receive, send)


def authorising(serving: Serving, keys: Keyring | None) -> Authorise:
    """Returns a function that checks a request's key, as on every other route."""

    def authorise(request: Request) -> None:
        if keys is None:
            check_local(request.headers)
        caller = caller_of(keys, request.headers)
        facts_of(request.scope).caller = caller
        serving.count(caller.key_id)
        caller.require(Role.READ if request.method in ("GET", "HEAD") else Role.TRAIN)
        if serving.ending.is_set():
            raise Refusal("shutting_down", retry_after=SHUTTING_DOWN_RETRY)

    return authorise
