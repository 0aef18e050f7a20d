"""The verbs in a server: made over its ledger and engines, and put before its other routes.

Requests below `/api/v1` go to the verbs with the server's own keys, roles and limits; all others go on to the application of ask/post.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from groupwise.server.engine.port import Engine
from groupwise.server.keeper import Keeper, Limits
from groupwise.server.ledger.writer import Ledger
from groupwise.server.middleware import CLIENT_GONE, Buckets, check_local
from groupwise.server.orders import Allowed
from groupwise.server.routes.declared import Serving
from groupwise.server.service import Service
from groupwise.server.settings import ServerConfig
from groupwise.server.verbs.futures import TooManyCalls
from groupwise.server.verbs.host import NAME, Host
from groupwise.server.verbs.journal import LedgerJournal
from groupwise.server.verbs.routes import (
    PREFIX,
    Authorise,
    Ending,
    Forbidden,
    Unauthorised,
    verb_routes,
)
from groupwise.server.verbs.service import VerbService
from groupwise.wire.keys import Keyring, Role, caller_of
from groupwise.wire.problems import Refusal

FOLDER = "verbs"
"""Of the server's output: what models have saved."""


class Verbs:
    """All that clients train by verbs on one server."""

    def __init__(
        self,
        config: ServerConfig,
        ledger: Ledger,
        runs: Service,
        make_engine: Callable[[], Awaitable[Engine]],
    ) -> None:
        journal = LedgerJournal(ledger)
        limits = Limits(restarts=config.max_engine_restarts, window=config.restart_window)
        self._host = Host(
            runs=runs,
            keeper=Keeper(make_engine, limits),
            journal=journal,
            allowed=Allowed(Path(config.model_dir).expanduser(), tuple(config.allowed_models)),
            folder=str(config.folder / FOLDER),
            most=config.max_models,
            longest=config.max_context_length,
        )
        self.service = VerbService(self._host, journal=journal, keep_every=config.keep_models_every)
        runs.beside[NAME] = self
        runs.by_verbs = self.service.told

    async def begin(self) -> None:
        """Know what clients have opened before, and go on with their calls."""
        await self._host.open()
        await self.service.open()

    async def make_way(self) -> None:
        """See `groupwise.server.start_stop.Beside.make_way`."""
        await self.service.opened.end_silent_sessions()
        await self._host.make_way()

    async def shut_down(self) -> None:
        """End the engine; what waits is done by the next server."""
        await self.service.close()
        await self._host.close()


class InFront:
    """The verbs, and behind them the application for everything else."""

    def __init__(
        self, app: ASGIApp, service: VerbService, serving: Serving, keys: Keyring | None
    ) -> None:
        """`serving` and `keys`: of the application behind."""
        self._behind = app
        self._metrics = serving.metrics
        self._verbs = Starlette(routes=verb_routes(service, authorising(serving, keys)))
        self._verbs.state.most_bytes = serving.config.max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass it on."""
        if scope["type"] != "http" or not scope["path"].startswith(f"{PREFIX}/"):
            await self._behind(scope, receive, send)
            return
        began, status = time.perf_counter(), CLIENT_GONE

        async def noting(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._verbs(scope, receive, noting)
        finally:
            # Under one name, because polls that are to come again are most of them.
            self._metrics.observe(PREFIX, status, time.perf_counter() - began)


def authorising(serving: Serving, keys: Keyring | None) -> Authorise:
    """Who may ask: as on every other route."""
    config = serving.config
    rate = config.requests_per_second
    buckets = None if rate is None else Buckets(rate, config.burst)

    def authorise(request: Request) -> None:
        try:
            if keys is None:
                check_local(request.headers)
            caller = caller_of(keys, request.headers)
            caller.require(Role.READ if request.method == "GET" else Role.TRAIN)
        except Refusal as refusal:
            kind = Unauthorised if refusal.code == "unauthorised" else Forbidden
            raise kind(str(refusal)) from None
        if buckets is not None and buckets.take(caller.id):
            raise TooManyCalls("The key has asked too often; send this one again later.")
        if serving.ending.is_set():
            raise Ending("The server is shutting down; send this one again later.")

    return authorise
