"""The dashboard of a training server, mounted under a path of the server: the same keys open it, and it shows the server's own
runs.

No network is used: pages run in threads, and query the server through its event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TYPE_CHECKING, TypeVar

from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from groupwise.api.schemas.activity import ActivityAnswer
from groupwise.api.schemas.keys import Keyring
from groupwise.api.schemas.problems import Refusal
from groupwise.api.schemas.training import StatusAnswer
from groupwise.dashboard.access import AccessControl
from groupwise.dashboard.app import make_app
from groupwise.dashboard.context import DashboardContext
from groupwise.dashboard.sources.runs import RunsIndex
from groupwise.dashboard.sources.server import TIMEOUT, WatchedServer
from groupwise.server.routes.context import Serving
from groupwise.server.run.run_config import RUNS
from groupwise.server.settings import ServerConfig

if TYPE_CHECKING:
    from groupwise.server.serve import InFrontOf

PREFIX = "/dashboard"
T = TypeVar("T")


def mount_dashboard(config: ServerConfig, keys: Keyring | None) -> InFrontOf:
    """Mounts the dashboard of these settings in front of a server's routes."""

    def mount(server_app: ASGIApp, serving: Serving) -> ASGIApp:
        server = WatchedServer(LocalServer(serving, asyncio.get_running_loop()))
        context = DashboardContext(
            RunsIndex(config.folder / RUNS),
            AccessControl(keys, count=serving.count),
            server=server,
            ending=serving.ending,
        )
        dashboard = make_app(context)

        async def dispatch(scope: Scope, receive: Receive, send: Send) -> None:
            path = scope.get("path", "")
            if scope["type"] != "http" or not (path == PREFIX or path.startswith(f"{PREFIX}/")):
                await server_app(scope, receive, send)
            elif path == PREFIX:
                address = scope.get("root_path", "") + PREFIX + "/server"
                await RedirectResponse(address, 303)(scope, receive, send)
            else:
                mounted_scope = {**scope, "root_path": scope.get("root_path", "") + PREFIX}
                await dashboard(mounted_scope, receive, send)

        return dispatch

    return mount


class LocalServer:
    """The server of this process, with methods for use in threads."""

    def __init__(self, serving: Serving, loop: asyncio.AbstractEventLoop) -> None:
        self._serving, self._loop = serving, loop

    def status(self) -> StatusAnswer:
        """See `ServerLike`."""
        return self._run_on_loop(self._serving.service.status())

    def activity(self) -> ActivityAnswer:
        """See `ServerLike`."""
        return self._run_on_loop(self._serving.activity())

    def _run_on_loop(self, work: Awaitable[T]) -> T:
        async def with_timeout() -> T:
            async with asyncio.timeout(TIMEOUT):
                return await work

        try:
            return asyncio.run_coroutine_threadsafe(with_timeout(), self._loop).result()
        except TimeoutError:
            raise Refusal("too_busy", retry_after=TIMEOUT) from None
