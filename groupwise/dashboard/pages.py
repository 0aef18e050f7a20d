"""Pages: a template and the data that it shows. Programs that ask for JSON get the same data.

A page is a function of a `Visit` that returns a `Page`, or a response of its own if it gives a file. It may block: it runs in a
thread. Errors of users are raised as usual (`GroupwiseError`, `Refusal`) and become a page that says what to do.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar
from urllib.parse import parse_qsl, urlencode

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import to_jsonable_python
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from groupwise.api.http.bodies import BODY_SECONDS, ClientGone
from groupwise.api.schemas.keys import Role
from groupwise.api.schemas.problems import MEDIA_TYPE, Refusal
from groupwise.core.errors import GroupwiseError, RunNotFoundError, UsageError
from groupwise.core.settings.field_errors import field_errors
from groupwise.dashboard.access import Visitor, cookie_name
from groupwise.dashboard.context import DashboardContext
from groupwise.dashboard.templates import render

Q = TypeVar("Q", bound="Query")
T = TypeVar("T")
TOKEN = "token"
"""Field with the token, in every form that changes something."""
FORM = "application/x-www-form-urlencoded"
ROOT_PATH = "groupwise.above"
"""Scope key of the path prefix before our paths."""
MAX_FORM_BYTES = 64 * 1024
"""Largest form in bytes."""
LARGEST = 2**63 - 1
"""The largest integer that a record can be searched for."""


class Query(BaseModel):
    """The parameters of an address; an empty value counts as not given."""

    model_config = ConfigDict(extra="ignore", frozen=True)


@dataclass(frozen=True, slots=True)
class ListPage(Generic[T]):
    """One page of a long list."""

    rows: Sequence[T]
    page: int
    """Page number, from 1; the last page if a later one was requested."""
    pages: int


def paginate(rows: Sequence[T], page: int, most: int) -> ListPage[T]:
    """The page with number `page` of a list, with `most` rows per page."""
    pages = max(1, -(-len(rows) // most))
    page = min(page, pages)
    return ListPage(rows[(page - 1) * most : page * most], page, pages)


@dataclass(frozen=True, slots=True)
class Page:
    """A template with its data."""

    template: str
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The template's data, and the content of the JSON response."""
    live: str = ""
    """The address of the event stream after whose events the page reloads; empty: the page is static."""


@dataclass(frozen=True, slots=True)
class Visit:
    """A request for a page."""

    context: DashboardContext
    request: Request
    visitor: Visitor

    def path_part(self, name: str) -> str:
        """A part of the address's path, by its name."""
        return str(self.request.path_params[name])

    def query(self, kind: type[Q]) -> Q:
        """The address's parameters. Raises UsageError."""
        parameters: dict[str, Any] = {}
        list_fields = {
            name
            for name, field in kind.model_fields.items()
            if getattr(field.annotation, "__origin__", None) in (tuple, list)
        }
        for name in self.request.query_params:
            values = [value for value in self.request.query_params.getlist(name) if value != ""]
            if values:
                parameters[name] = values if name in list_fields else values[-1]
        try:
            return kind.model_validate(parameters)
        except ValidationError as error:
            field_error = field_errors(error, kind)[0]
            raise UsageError(
                f"{field_error.field}={field_error.given!s:.100}: {field_error.message}."
            ) from None

    def url_with(self, **changed: Any) -> str:
        """This page's address with changed parameters; None removes one."""
        unchanged = [(n, v) for n, v in self.request.query_params.multi_items() if n not in changed]
        replaced = [
            (name, str(value)) for name, value in changed.items() if value not in (None, "")
        ]
        return str(self.request.url.replace(query="").path) + _as_query([*unchanged, *replaced])


def live_url(*runs: str) -> str:
    """The address of the event stream of these runs."""
    return "/live" + _as_query([("run", name) for name in runs])


ShowPage = Callable[[Visit], Page | Response]


def page_route(path: str, show: ShowPage) -> Route:
    """The route of a page."""
    return Route(
        path, partial(_handle_page, show), methods=["GET"], name=getattr(show, "__name__", path)
    )


HandleForm = Callable[[Visit, Mapping[str, str]], str]
"""Executes a form and returns the address to show next."""


def form_route(path: str, do: HandleForm, role: Role = Role.ACT) -> Route:
    """The route of a form that changes something and requires a key of this role."""
    name = getattr(do, "__name__", path)
    return Route(path, partial(_handle_form, do, role), methods=["POST"], name=name)


def visitor_of(request: Request) -> Visitor | None:
    """See `AccessControl.visitor`."""
    context: DashboardContext = request.app.state.context
    cookie = request.cookies.get(cookie_name(request.headers, root_path(request)))
    return context.access.visitor(request.headers, cookie)


async def _handle_form(do: HandleForm, role: Role, request: Request) -> Response:
    context: DashboardContext = request.app.state.context
    visitor = visitor_of(request)
    if visitor is None:
        raise Refusal("unauthorised")
    form = await read_form(request)
    context.access.expect_actor(visitor, request.headers, form.get(TOKEN, ""), role)
    location = await run_in_threadpool(do, Visit(context, request, visitor), form)
    if wants_json(request):
        return JSONResponse({"location": location})
    return RedirectResponse(location, 303)


async def _handle_page(show: ShowPage, request: Request) -> Response:
    context: DashboardContext = request.app.state.context
    visitor = visitor_of(request)
    if visitor is None:
        if wants_json(request):
            raise Refusal("unauthorised")
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        return RedirectResponse(root_path(request) + "/sign-in" + _as_query([("next", path)]), 303)
    visit = Visit(context, request, visitor)

    def answer() -> Response:
        page = show(visit)
        return page if isinstance(page, Response) else respond(visit, page)

    return await run_in_threadpool(answer)


async def read_form(request: Request) -> dict[str, str]:
    """The fields of a form, each once. Raises `too_large`, and `unsupported_media_type` for content that our forms do not send."""
    if request.headers.get("content-type", "").partition(";")[0] != FORM:
        raise Refusal("unsupported_media_type")
    body = b""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_FORM_BYTES:
                    raise Refusal("too_large")
    except TimeoutError:
        raise Refusal("timed_out") from None
    except ClientDisconnect:
        raise ClientGone from None
    return dict(parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True))


def root_path(request: Request) -> str:
    """The path prefix of our addresses: empty, unless another server mounts us under a path."""
    return str(request.scope.get(ROOT_PATH, ""))


def respond(visit: Visit, page: Page) -> Response:
    """The page as HTML, or its data as JSON for a program."""
    if wants_json(visit.request):
        data = to_jsonable_python(page.data, inf_nan_mode="null", fallback=str)
        return Response(json.dumps(data, allow_nan=False), media_type="application/json")
    html = render(
        page.template,
        {
            **page.data,
            "visit": visit,
            "visitor": visit.visitor,
            "acts": visit.context.access.may_act(visit.visitor),
            "rules": visit.context.access.may_act(visit.visitor, Role.ADMIN),
            "has_fleet": visit.context.fleet is not None,
            "has_server": visit.context.server is not None,
            "live": page.live,
        },
        root_path(visit.request),
    )
    # A text with a lone surrogate is shown as well as possible.
    return HTMLResponse(html.encode("utf-8", "replace"))


def wants_json(request: Request) -> bool:
    """True if the client is a program: `?format=json`, or it accepts JSON but not HTML."""
    if request.query_params.get("format") == "json":
        return True
    accepts = request.headers.get("accept", "")
    return "application/json" in accepts and "text/html" not in accepts


async def respond_error(request: Request, error: Exception) -> Response:
    """Render an error as a page or a problem that says what to do."""
    if isinstance(error, Refusal):
        status, title, message = error.status, error.kind.title, error.detail
    elif isinstance(error, RunNotFoundError):
        status, title, message = 404, "There is no such thing", error.message
    elif isinstance(error, UsageError):
        status, title, message = 400, "This cannot be shown", error.message
    elif isinstance(error, GroupwiseError):
        status, title, message = 409, "This cannot be read", error.message
    else:
        status, title = 500, "Something went wrong here"
        message = "Its details are in the log of the dashboard."
    headers = error.headers if isinstance(error, Refusal) else {}
    if wants_json(request):
        body = {
            "type": "about:blank",
            "title": title,
            "status": status,
            "code": error.code if isinstance(error, GroupwiseError) else "internal",
            "detail": message,
        }
        content = json.dumps(body).encode()  # a lone surrogate is written as its code
        return Response(content, status, headers, media_type=MEDIA_TYPE)
    context: DashboardContext | None = getattr(request.app.state, "context", None)
    sources = {
        "has_fleet": context is not None and context.fleet is not None,
        "has_server": context is not None and context.server is not None,
    }
    data = {
        "title": title,
        "message": message,
        "status": status,
        "here": request.url.path,
        **sources,
    }
    html = render("failed.html", data, root_path(request))
    return HTMLResponse(html, status, headers)


def _as_query(pairs: list[tuple[str, str]]) -> str:
    return f"?{urlencode(pairs)}" if pairs else ""


async def respond_not_found(request: Request, error: Exception) -> Response:
    """The response for an unknown address, or for a method that an address does not support."""
    status = getattr(error, "status_code", 404)
    code = {404: "not_found", 405: "method_not_allowed"}.get(status, "invalid_request")
    return await respond_error(
        request, Refusal(code, f"There is no page {request.url.path[:200]}.")
    )
