"""The HTTP side of a server: its routes, what goes before them, and the OpenAPI document that is made of both.

Routes raise a `Refusal`, FastAPI its own errors for addresses that do not exist and requests that are not valid; all of them become
refusals here, and are rendered in one place (`middleware.Observed`). The document names for each route who may ask and every problem that
it can answer with.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, NoReturn, cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from groupwise.api.http import strict_json
from groupwise.api.http.declared import Route, Shared, facts_of
from groupwise.api.http.middleware import BodyRead, CallerOf, Guarded, Observed, RouteTable
from groupwise.api.http.refusals import documented, problem_schema
from groupwise.api.schemas.idempotency import HEADERS as IDEMPOTENCY_HEADERS
from groupwise.api.schemas.keys import Role
from groupwise.api.schemas.problems import FieldError, Refusal
from groupwise.core.plugins import printable

BINARY = ("application/zip", "application/octet-stream")
SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
    "api-key": {"type": "apiKey", "in": "header", "name": "api-key"},
}


@dataclass(frozen=True, slots=True)
class About:
    """A server's title and introduction in the document."""

    title: str
    description: str


def assemble(
    about: About,
    routes: Sequence[Route],
    shared: Shared,
    caller_of: CallerOf,
    *,
    local_only: bool,
    before: Mapping[str, Any] | None = None,
) -> FastAPI:
    """The application of these routes. Its `state.shared` is what all requests share.

    `caller_of` tells who sends a request, from its headers, or raises `unauthorised`. `local_only`: there are no keys, so that only
    this machine is answered. `before`: what the document says of requests that are answered before they come here (`tags`, `paths`,
    `components`).
    """
    app = FastAPI(
        title=about.title,
        version=_version(),
        description=about.description + _roles(routes, shared.role_words),
        docs_url=None,  # pages that would load scripts from elsewhere
        redoc_url=None,
        openapi_url=None,  # ours is a route like any other
        redirect_slashes=False,
    )
    app.router.route_class = _StrictRoute
    app.state.shared = shared
    document = _Document(app, routes, before or {})
    shown = Route(
        method="GET",
        path="/openapi.json",
        handler=document.answer,
        role=None,
        tag="health",
        answer=dict[str, Any],
    )
    for route in (*routes, shown):
        _add(app, route, shared.role_words)
    _refuse_what_fastapi_refuses(app)
    # The last one that is added is the outermost.
    app.add_middleware(cast("Any", BodyRead), shared=shared)
    app.add_middleware(cast("Any", Guarded), shared=shared, who=caller_of, local_only=local_only)
    table = RouteTable((*routes, shown))
    app.add_middleware(cast("Any", Observed), shared=shared, table=table)
    return app


def _roles(routes: Sequence[Route], words: Mapping[Role, str]) -> str:
    """A table of the routes that each role may use."""
    rows = [
        "\n\nEach role may do what the ones above it may.\n",
        "| role of the key | routes |",
        "|---|---|",
    ]
    for role in (None, *Role):
        names = [f"`{route.name}`" for route in routes if route.role == role]
        rows.append(f"| {words[role] if role else 'no key'} | {', '.join(names)} |")
    return "\n".join(rows)


def _version() -> str:
    try:
        return metadata.version("groupwise")
    except metadata.PackageNotFoundError:  # run from a folder, without being installed
        return "0"


def _add(app: FastAPI, route: Route, words: Mapping[Role, str]) -> None:
    responses = documented(route.all_codes)
    if route.later:
        responses[202] = {"description": route.later, "model": route.answer}
    if route.path == "/readyz":
        responses[503] = {"description": "Not ready, and why.", "model": route.answer}
    if route.answer is None:
        schema = {"type": "string", **_format(route.media_type)}
        responses[200] = {"content": {route.media_type: {"schema": schema}}}
    app.add_api_route(
        route.path,
        route.handler,
        methods=[route.method],
        tags=[route.tag],
        name=route.handler.__name__,
        operation_id=route.handler.__name__,
        status_code=route.status,
        response_model=route.answer,
        response_class=route.response_class,
        responses=cast("Any", responses),
        openapi_extra={"x-role": words[route.role] if route.role else None},
    )


def _format(media_type: str) -> dict[str, str]:
    return {"format": "binary"} if media_type in BINARY else {}


# Reading strictly


class _StrictRequest(Request):
    """A request whose JSON is read by `strict_json`."""

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            self._json = await strict_json.parse_aside(await self.body())
        return self._json


class _StrictRoute(APIRoute):
    """A route for the custom request class, as FastAPI recommends."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            self._check_parameters(request)
            return await handler(_StrictRequest(request.scope, request.receive))

        return strict

    def _check_parameters(self, request: Request) -> None:
        """Refuse parameters that the route does not have, except on probes without a key."""
        route = facts_of(request.scope).route
        if route is None or route.role is None:
            return
        known = [field.alias for field in self.dependant.query_params]
        for name in request.query_params:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = (
                    f"did you mean {near[0]}?"
                    if near
                    else f"there are: {', '.join(known) or 'none'}"
                )
                message = f"is not a query parameter of {route.name}; {hint}"
                error = FieldError(field=printable(name)[:100], message=message)
                raise Refusal("invalid_request", f"{error.field} {message}", errors=[error])


# Refusals of the framework


def _refuse_what_fastapi_refuses(app: FastAPI) -> None:
    handlers: dict[Any, Callable[[Request, Any], Awaitable[Response]]] = {
        RequestValidationError: _invalid,
        HTTPException: _no_such_thing,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)


async def _invalid(request: Request, error: RequestValidationError) -> NoReturn:
    body = cast("APIRoute", request.scope["route"]).body_field
    details = [
        # FastAPI's locations begin with the part of the request that is wrong: its body, query, path or a header.
        {**detail, "loc": detail["loc"][1:]}
        for detail in error.errors()
        if body is None or detail["loc"][0] == "body"
    ]
    raise Refusal.of_fields(details, body.field_info if body else None) from None


async def _no_such_thing(request: Request, error: HTTPException) -> NoReturn:
    where = f"{request.method} {request.url.path[:200]}"
    if error.status_code == 404:
        raise Refusal(
            "not_found", f"There is no route {where}; GET /openapi.json has those there are."
        )
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        facts_of(request.scope).headers["Allow"] = allowed
        raise Refusal(
            "method_not_allowed", f"There is no route {where}; this address takes {allowed}."
        )
    raise Refusal("invalid_request", f"{where} cannot be answered: {error.detail}")


# The document


class _Document:
    """OpenAPI, made once."""

    def __init__(self, app: FastAPI, routes: Sequence[Route], before: Mapping[str, Any]) -> None:
        self._app = app
        self._routes = routes
        self._before = before
        self._make = app.openapi
        self._written = b""
        app.openapi = self.document

    async def answer(self) -> Response:
        """This document."""
        self._written = self._written or json.dumps(self.document()).encode()
        return Response(self._written, media_type="application/json")

    def document(self) -> dict[str, Any]:
        """The whole."""
        if self._app.openapi_schema is None:
            self._app.openapi_schema = self._complete(self._make())
        return self._app.openapi_schema

    def _complete(self, document: dict[str, Any]) -> dict[str, Any]:
        components = document.setdefault("components", {})
        components.setdefault("schemas", {}).update(problem_schema())
        components["securitySchemes"] = SECURITY
        for route in self._routes:
            if route.reads is not None:
                _add_body(document, route, route.reads)
            elif route.takes_bytes:
                _operation(document, route)["requestBody"] = _ANY_BYTES
        for route in self._routes:
            self._say_more(_operation(document, route), route)
        self._add_what_is_before(document)
        return document

    def _add_what_is_before(self, document: dict[str, Any]) -> None:
        keys: list[dict[str, list[str]]] = [{name: []} for name in SECURITY]
        for path, operations in self._before.get("paths", {}).items():
            document["paths"][path] = {
                method: {"security": keys, **operation} for method, operation in operations.items()
            }
        schemas = self._before.get("components", {}).get("schemas", {})
        document["components"]["schemas"].update(schemas)
        if tags := self._before.get("tags"):
            document.setdefault("tags", []).extend(tags)

    def _say_more(self, operation: dict[str, Any], route: Route) -> None:
        operation["security"] = [{name: []} for name in SECURITY] if route.role else []
        if route.named:
            operation.setdefault("parameters", []).append(_IDEMPOTENCY)
        if route.example is not None:
            content = operation["requestBody"]["content"]["application/json"]
            content["example"] = route.example


def _add_body(document: dict[str, Any], route: Route, model: type[BaseModel]) -> None:
    """Document the model of a body that the handler reads itself."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    document["components"]["schemas"].update(schema.pop("$defs", {}))
    document["components"]["schemas"][model.__name__] = schema
    content = {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}
    body = {"required": True, "content": {"application/json": content}}
    _operation(document, route)["requestBody"] = body


def _operation(document: dict[str, Any], route: Route) -> dict[str, Any]:
    return document["paths"][_PLAIN.sub("}", route.path)][route.method.lower()]


_PLAIN = re.compile(r":\w+\}")
"""A convertor of a path parameter, which the document does not have."""
_ANY_BYTES = {
    "required": True,
    "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
}
_IDEMPOTENCY = {
    "name": IDEMPOTENCY_HEADERS[0],
    "in": "header",
    "required": False,
    "description": f"Names the request: sent again under it, it is answered as before, for a day at least. Also {IDEMPOTENCY_HEADERS[1]}.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255},
}
