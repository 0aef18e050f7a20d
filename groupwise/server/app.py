"""The training server's application: the routes of ask/post, and of further protocols."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI

from groupwise.api.http.app import ApiInfo, assemble
from groupwise.api.http.route import Route
from groupwise.api.schemas.keys import Caller, Keyring, caller_of
from groupwise.server.routes import events, health, models, training
from groupwise.server.routes.context import Serving
from groupwise.server.run.service import Service
from groupwise.server.settings import ServerConfig

ROUTES: tuple[Route, ...] = (*training.ROUTES, *models.ROUTES, *events.ROUTES, *health.ROUTES)
"""Routes of the ask/post protocol."""

DESCRIPTION = (
    "The server owns the model; the client owns the loop, the data and the rewards: it asks for completions of its prompts, scores them, "
    "and posts a number for each. Every refusal is a problem (RFC 9457) with a `code` that never changes its meaning."
)


def make_app(
    service: Service,
    config: ServerConfig,
    keys: Keyring | None,
    also: Sequence[Route] = (),
    before: Mapping[str, Any] | None = None,
) -> FastAPI:
    """Create the application. `also`: routes of further protocols; `before`: additions to the OpenAPI document for routes that are handled
    in front of this application (`tags`, `paths`, `components`). Its `state.shared` is a `Serving`.
    """

    async def who(headers: Mapping[str, str]) -> Caller:
        return caller_of(keys, headers)

    return assemble(
        ApiInfo("Groupwise training server", DESCRIPTION),
        (*ROUTES, *also),
        Serving(service, config),
        who,
        local_only=keys is None,
        outer_document=before,
    )
