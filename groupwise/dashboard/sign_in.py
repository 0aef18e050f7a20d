"""The page on which a user enters a key."""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from groupwise.dashboard.access import COOKIE_LIFETIME, cookie_name, refuse_other_sites
from groupwise.dashboard.context import DashboardContext
from groupwise.dashboard.pages import read_form, root_path, visitor_of
from groupwise.dashboard.templates import render


async def show(request: Request) -> Response:
    """The form."""
    context: DashboardContext = request.app.state.context
    destination = _safe_redirect(request, request.query_params.get("next"))
    if context.access.is_open or visitor_of(request):
        return RedirectResponse(destination, 303)
    return _form_response(request, destination)


async def enter(request: Request) -> Response:
    """Exchange a key for a cookie. Signing in requires the key itself, so no other site can make a browser do it."""
    context: DashboardContext = request.app.state.context
    refuse_other_sites(request.headers)
    form = await read_form(request)
    address = request.client.host if request.client else ""
    destination = _safe_redirect(request, form.get("next"))
    cookie = await run_in_threadpool(context.access.admit, form.get("key", ""), address)
    if cookie is None:
        return _form_response(request, destination, wrong_key=True)
    response = RedirectResponse(destination, 303)
    secure = request.url.scheme == "https"
    response.set_cookie(
        cookie_name(request.headers, root_path(request)),
        cookie,
        max_age=COOKIE_LIFETIME,
        httponly=True,
        samesite="lax",
        secure=secure,
        path=_cookie_path(request),
    )
    return response


async def leave(request: Request) -> Response:
    """Forget the cookie."""
    refuse_other_sites(request.headers)
    context: DashboardContext = request.app.state.context
    response = RedirectResponse(root_path(request) + "/sign-in", 303)
    name = cookie_name(request.headers, root_path(request))
    context.access.leave(request.cookies.get(name))
    response.delete_cookie(name, path=_cookie_path(request), httponly=True, samesite="lax")
    return response


def _cookie_path(request: Request) -> str:
    """The path prefix for which the cookie is valid."""
    return root_path(request) or "/"


def _form_response(request: Request, destination: str, *, wrong_key: bool = False) -> Response:
    page = render("sign_in.html", {"next": destination, "wrong": wrong_key}, root_path(request))
    return HTMLResponse(page, 401 if wrong_key else 200)


def _safe_redirect(request: Request, address: str | None) -> str:
    """An address of this dashboard; any other address is replaced by the first page."""
    default = f"{root_path(request)}/"
    if not address or not address.startswith(f"{root_path(request)}/"):
        return default
    if address.startswith(("//", "/\\")):
        return default
    try:
        parts = urlsplit(address)
    except ValueError:
        return default
    return default if parts.netloc or parts.scheme else address


ROUTES = (
    Route("/sign-in", show, methods=["GET"]),
    Route("/sign-in", enter, methods=["POST"]),
    Route("/sign-out", leave, methods=["POST"]),
)
