"""The HTTP side of a server: its routes, the middleware in front of them, and the OpenAPI document generated from both.

Routes raise a `Refusal`; FastAPI raises its own errors for unknown addresses and invalid requests, which become refusals here. All are
rendered in one place (`middleware.RequestMiddleware`). For each route the document names the role that may call it, and every problem
that it can answer with.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any, NoReturn, cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from groupwise.api.http import strict_json
from groupwise.api.http.bodies import LARGE, read_body
from groupwise.api.http.middleware import (
    AuthMiddleware,
    BodyMiddleware,
    CallerOf,
    RequestMiddleware,
    RouteTable,
)
from groupwise.api.http.route import Route
from groupwise.api.http.shared_state import Shared, facts_of
from groupwise.api.http.strict_json import NotStrict
from groupwise.api.schemas.idempotency import HEADERS as IDEMPOTENCY_HEADERS
from groupwise.api.schemas.keys import Role
from groupwise.api.schemas.problems import (
    KINDS,
    MEDIA_TYPE,
    FieldError,
    Problem,
    Refusal,
    summary_of,
)
from groupwise.core.plugins import printable

BINARY = ("application/zip", "application/octet-stream")
SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
    "api-key": {"type": "apiKey", "in": "header", "name": "api-key"},
}
ANY_BYTES = {
    "required": True,
    "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
}
IDEMPOTENCY = {
    "name": IDEMPOTENCY_HEADERS[0],
    "in": "header",
    "required": False,
    "description": f"Names the request: sent again under it, it is answered as before, for a day at least. Also {IDEMPOTENCY_HEADERS[1]}.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255},
}
EXAMPLE_INSTANCE = "urn:groupwise:request:0123456789abcdef"


@dataclass(frozen=True, slots=True)
class ApiInfo:
    """A server's title and introduction in the OpenAPI document."""

    title: str
    description: str


def assemble(
    about: ApiInfo,
    routes: Sequence[Route],
    shared: Shared,
    caller_of: CallerOf,
    *,
    local_only: bool,
    outer_document: Mapping[str, Any] | None = None,
) -> FastAPI:
    """The application of these routes. Its `state.shared` is the state that all requests share.

    `caller_of` finds the caller from a request's headers, or raises `unauthorised`. `local_only`: there are no keys, so only requests
    from this machine are answered. `outer_document`: the document's entries (`tags`, `paths`, `components`) for requests that another
    layer answers before they reach this application.
    """
    try:
        version = metadata.version("groupwise")
    except metadata.PackageNotFoundError:  # run from a source folder, not installed
        version = "0"
    app = FastAPI(
        title=about.title,
        version=version,
        description=about.description + _role_table(routes, shared.role_words),
        docs_url=None,  # FastAPI's pages would load scripts from other sites
        redoc_url=None,
        openapi_url=None,  # we serve the document by a route of our own
        redirect_slashes=False,
    )
    app.router.route_class = _StrictRoute
    app.state.shared = shared
    make = app.openapi

    @cache
    def document() -> dict[str, Any]:
        app.openapi_schema = _complete_document(make(), routes, outer_document or {})
        return app.openapi_schema

    @cache
    def document_bytes() -> bytes:
        return json.dumps(document()).encode()

    async def answer() -> Response:
        """This document."""
        return Response(document_bytes(), media_type="application/json")

    app.openapi = document
    document_route = Route(
        method="GET",
        path="/openapi.json",
        handler=answer,
        role=None,
        tag="health",
        answer=dict[str, Any],
    )
    for route in (*routes, document_route):
        _add_route(app, route, shared.role_words)
    app.add_exception_handler(RequestValidationError, cast("Any", _refuse_invalid_request))
    app.add_exception_handler(HTTPException, cast("Any", _refuse_http_exception))
    # The middleware that is added last is the outermost.
    app.add_middleware(cast("Any", BodyMiddleware), shared=shared)
    app.add_middleware(
        cast("Any", AuthMiddleware), shared=shared, who=caller_of, local_only=local_only
    )
    table = RouteTable((*routes, document_route))
    app.add_middleware(cast("Any", RequestMiddleware), shared=shared, table=table)
    return app


def _role_table(routes: Sequence[Route], words: Mapping[Role, str]) -> str:
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


def _add_route(app: FastAPI, route: Route, words: Mapping[Role, str]) -> None:
    """Add a route; in the document, with an example of every problem that it answers with, by status."""
    codes_by_status: dict[int | str, list[str]] = {}
    for code in sorted(route.all_codes):
        codes_by_status.setdefault(KINDS[code].status, []).append(code)
    responses: dict[int | str, dict[str, Any]] = {}
    for status, codes in sorted(codes_by_status.items(), key=lambda entry: str(entry[0])):
        problems = [(code, Refusal(code).problem(EXAMPLE_INSTANCE)) for code in codes]
        examples = {code: {"value": problem.model_dump(mode="json")} for code, problem in problems}
        schema = {"$ref": "#/components/schemas/Problem"}
        responses[status] = {
            "description": "\n\n".join(f"`{code}`: {KINDS[code].meaning}" for code in codes),
            "content": {MEDIA_TYPE: {"schema": schema, "examples": examples}},
        }
    if route.later:
        responses[202] = {"description": route.later, "model": route.answer}
    if route.path == "/readyz":
        responses[503] = {"description": "Not ready, and why.", "model": route.answer}
    if route.answer is None:
        schema = {"type": "string"} | ({"format": "binary"} if route.media_type in BINARY else {})
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


# Reading strictly


class _StrictRequest(Request):
    """A request whose JSON is read by `strict_json`."""

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            self._json = self._parse(await self.body())
        return self._json

    async def read_large_body(self, validate: Callable[..., tuple[Any, list[Any]]]) -> None:
        """Parse a large body, and validate it, in the thread of large bodies; FastAPI then takes the value as it is."""

        def read(body: bytes) -> Any:
            value, errors = validate(self._parse(body), loc=("body",))
            if errors:
                raise RequestValidationError(errors)
            return value

        try:
            self._json = await read_body(await self.body(), read)
        except NotStrict as error:
            wrong = {"type": "json_invalid", "loc": ("body", error.pos), "msg": "JSON decode error"}
            raise RequestValidationError(
                [wrong | {"input": {}, "ctx": {"error": error.msg}}]
            ) from None

    def _parse(self, body: bytes) -> Any:
        route = facts_of(self.scope).route
        return strict_json.parse(body, strict_json.MAX_KEYS if route is None else route.max_keys)


class _StrictRoute(APIRoute):
    """A route that uses `_StrictRequest`, in the way FastAPI recommends. Unknown query parameters are refused."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            route = facts_of(request.scope).route
            known_names = [field.alias for field in self.dependant.query_params]
            unknown = [name for name in request.query_params if name not in known_names]
            # Routes without a key, for health probes, accept any parameters.
            if route is not None and route.role is not None and unknown:
                name = unknown[0]
                close_matches = difflib.get_close_matches(name, known_names, n=1)
                existing = f"there are: {', '.join(known_names) or 'none'}"
                hint = f"did you mean {close_matches[0]}?" if close_matches else existing
                message = f"is not a query parameter of {route.name}; {hint}"
                field = printable(name)[:100]
                raise Refusal("invalid_request", f"{field} {message}", field=field, problem=message)
            strict_request = _StrictRequest(request.scope, request.receive)
            if self.body_field is not None and len(await strict_request.body()) > LARGE:
                await strict_request.read_large_body(self.body_field.validate)
            return await handler(strict_request)

        return strict


# Refusals of the framework


async def _refuse_invalid_request(request: Request, error: RequestValidationError) -> NoReturn:
    body = cast("APIRoute", request.scope["route"]).body_field
    errors: list[FieldError] = []
    for of_body in (True, False):
        details = [
            # The first item of FastAPI's location is the wrong part of the request: its body, query, path or a header.
            {**detail, "loc": detail["loc"][1:]}
            for detail in error.errors()
            if (detail["loc"][0] == "body") is of_body
        ]
        model = body.field_info if body is not None and of_body else None
        errors += Refusal.of_fields(details, model).errors
    raise Refusal("invalid_request", summary_of(errors), errors=errors) from None


async def _refuse_http_exception(request: Request, error: HTTPException) -> NoReturn:
    request_line = f"{request.method} {request.url.path[:200]}"
    if error.status_code == 404:
        raise Refusal(
            "not_found", f"There is no route {request_line}; GET /openapi.json has those there are."
        )
    if error.status_code == 405:
        allowed_methods = (error.headers or {}).get("Allow", "")
        facts_of(request.scope).headers["Allow"] = allowed_methods
        raise Refusal(
            "method_not_allowed",
            f"There is no route {request_line}; this address takes {allowed_methods}.",
        )
    raise Refusal("invalid_request", f"{request_line} cannot be answered: {error.detail}")


# The document


def _complete_document(
    document: dict[str, Any], routes: Sequence[Route], outer_document: Mapping[str, Any]
) -> dict[str, Any]:
    """FastAPI's document with additions: problems, keys, bodies that handlers read themselves, and other protocols."""
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    components["securitySchemes"] = SECURITY

    def add_schema(model: type[BaseModel]) -> None:
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas.update(schema.pop("$defs", {}))
        schemas[model.__name__] = schema

    add_schema(Problem)
    keys: list[dict[str, list[str]]] = [{name: []} for name in SECURITY]
    for route in routes:
        path = re.sub(r":\w+\}", "}", route.path)  # the document drops converters: `{name:path}`
        operation = document["paths"][path][route.method.lower()]
        if route.reads is not None:
            add_schema(route.reads)
            content = {"schema": {"$ref": f"#/components/schemas/{route.reads.__name__}"}}
            operation["requestBody"] = {"required": True, "content": {"application/json": content}}
        elif route.takes_bytes:
            operation["requestBody"] = ANY_BYTES
        operation["security"] = keys if route.role else []
        if route.named:
            operation.setdefault("parameters", []).append(IDEMPOTENCY)
        if route.example is not None:
            operation["requestBody"]["content"]["application/json"]["example"] = route.example
    for path, operations in outer_document.get("paths", {}).items():
        document["paths"][path] = {
            method: {"security": keys, **operation} for method, operation in operations.items()
        }
    schemas.update(outer_document.get("components", {}).get("schemas", {}))
    if tags := outer_document.get("tags"):
        document.setdefault("tags", []).extend(tags)
    return document
