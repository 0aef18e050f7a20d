"""The routes of the Tinker API over one service, with a key.

The client's package `tinker` is part of the extra `dev`; where it is missing, the tests that import this fail and say so.
"""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.requests import Request

from groupwise.api.http.bodies import Bodies
from groupwise.api.schemas.problems import Refusal
from groupwise.server.tinker.routes import tinker_routes
from groupwise.server.tinker.service import TinkerService
from groupwise.server.tinker.tensors import is_installed

KEY = "tml-1-secret"

assert is_installed(), "The Tinker client is not installed: pip install 'groupwise[dev]'"


def only_this_key(request: Request) -> None:
    if request.headers.get("x-api-key") != KEY:
        raise Refusal("unauthorised")


def app(service: TinkerService, poll: float = 0.2, bodies: Bodies | None = None) -> Starlette:
    return Starlette(routes=tinker_routes(service, only_this_key, poll=poll, bodies=bodies))
