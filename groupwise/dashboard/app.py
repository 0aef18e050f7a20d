"""The dashboard's application: its pages, its static files, and the headers of every response.

A page is a template and data (`pages.py`), rendered here; there is no build step, and nothing is loaded from other hosts. Our
scripts draw plots and keep pages up to date (`static/plots.js`, `static/live.js`); the rest works without them.
"""

from __future__ import annotations

import mimetypes
from typing import cast

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from groupwise.core.errors import GroupwiseError
from groupwise.dashboard import server, sign_in
from groupwise.dashboard.context import DashboardContext
from groupwise.dashboard.fleet import jobs as fleet_jobs
from groupwise.dashboard.fleet import machines as fleet_machines
from groupwise.dashboard.live import Streams, live
from groupwise.dashboard.pages import ROOT_PATH, respond_error, respond_not_found, root_path
from groupwise.dashboard.runs import (
    compare_answers,
    compare_runs,
    curves,
    evaluations,
    files,
    overview,
    rollouts,
    run_list,
)
from groupwise.dashboard.templates import STATIC
from groupwise.runs.find import run_folders

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Headers of every response: scripts and styles are only our own files, and no other site may frame or read a page, or see its
address as a referrer.
"""
IMMUTABLE = "public, max-age=31536000, immutable"
"""Cache header of files whose address contains the hash of their content."""


def make_app(context: DashboardContext) -> ASGIApp:
    """The application. Its `state.context` holds everything that pages are made of."""
    routes = [
        Route("/", _redirect_to_first_page),
        *run_list.ROUTES,
        *compare_runs.ROUTES,
        *compare_answers.ROUTES,
        *curves.ROUTES,
        *overview.ROUTES,
        *files.ROUTES,
        *rollouts.ROUTES,
        *evaluations.ROUTES,
        *fleet_machines.ROUTES,
        *fleet_jobs.ROUTES,
        *server.ROUTES,
        *sign_in.ROUTES,
        Route("/live", live),
        Route("/healthz", _healthz),
        Mount("/static", _CachedStaticFiles(directory=STATIC)),
    ]
    app = Starlette(
        routes=routes,
        exception_handlers={
            GroupwiseError: respond_error,
            HTTPException: respond_not_found,
            Exception: respond_error,
        },
    )
    app.state.context = context
    app.state.streams = Streams()
    return _with_headers(app)


def _redirect_to_first_page(request: Request) -> Response:
    """The first page is the list of runs, or the fleet if there is one and no run."""
    context: DashboardContext = request.app.state.context
    is_fleet_alone = context.fleet is not None and not run_folders(context.runs.folder)
    return RedirectResponse(root_path(request) + ("/fleet" if is_fleet_alone else "/runs"), 303)


def _healthz(_: Request) -> Response:
    return Response("ok", media_type="text/plain")


class _CachedStaticFiles(StaticFiles):
    """Our static files, which browsers may cache."""

    def file_response(self, *args: object, **kwargs: object) -> Response:
        """See `StaticFiles.file_response`."""
        response = super().file_response(*args, **kwargs)  # pyright: ignore[reportArgumentType]
        scope = cast("Scope", args[2] if len(args) > 2 else kwargs["scope"])
        if Request(scope).query_params.get("v"):
            response.headers["Cache-Control"] = IMMUTABLE
        return response


def _with_headers(app: ASGIApp) -> ASGIApp:
    """The application, with the headers of every answer added."""

    async def app_with_headers(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        scope[ROOT_PATH] = scope.get("root_path", "")  # before a route below it makes that longer
        await app(scope, receive, send_with_headers)

    return app_with_headers


mimetypes.add_type("text/javascript", ".js")
