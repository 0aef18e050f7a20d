"""The page on which a user enters a key."""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from groupwise.dashboard.access import LASTS, cookie_name, refuse_other_sites
from groupwise.dashboard.context import DashboardContext
from groupwise.dashboard.pages import above, read_form, visitor_of
from groupwise.dashboard.templates import render


async def show(request: Request) -> Response:
    """The form."""
    place: DashboardContext = request.app.state.place
    there = _here(request, request.query_params.get("next"))
    if place.door.is_open or visitor_of(request):
        return RedirectResponse(there, 303)
    return _form(request, there)


async def enter(request: Request) -> Response:
    """Exchange a key for a cookie. Signing in requires the key itself, so no other site can make a browser do it."""
    place: DashboardContext = request.app.state.place
    refuse_other_sites(request.headers)
    form = await read_form(request)
    address = request.client.host if request.client else ""
    there = _here(request, form.get("next"))
    cookie = await run_in_threadpool(place.door.admit, form.get("key", ""), address)
    if cookie is None:
        return _form(request, there, wrong=True)
    response = RedirectResponse(there, 303)
    secure = request.url.scheme == "https"
    response.set_cookie(
        cookie_name(request.headers, above(request)),
        cookie,
        max_age=LASTS,
        httponly=True,
        samesite="lax",
        secure=secure,
        path=_own(request),
    )
    return response


async def leave(request: Request) -> Response:
    """Forget the cookie."""
    refuse_other_sites(request.headers)
    place: DashboardContext = request.app.state.place
    response = RedirectResponse(above(request) + "/sign-in", 303)
    name = cookie_name(request.headers, above(request))
    place.door.leave(request.cookies.get(name))
    response.delete_cookie(name, path=_own(request), httponly=True, samesite="lax")
    return response


def _own(request: Request) -> str:
    """The path prefix for which the cookie is valid."""
    return above(request) or "/"


def _form(request: Request, there: str, *, wrong: bool = False) -> Response:
    page = render("sign_in.html", {"next": there, "wrong": wrong}, above(request))
    return HTMLResponse(page, 401 if wrong else 200)


def _here(request: Request, address: str | None) -> str:
    """An address of this dashboard; any other address is replaced by the first page."""
    first = f"{above(request)}/runs"
    if not address or not address.startswith(f"{above(request)}/"):
        return first
    if address.startswith(("//", "/\\")):
        return first
    try:
        found = urlsplit(address)
    except ValueError:
        return first
    return first if found.netloc or found.scheme else address


ROUTES = (
    Route("/sign-in", show, methods=["GET"]),
    Route("/sign-in", enter, methods=["POST"]),
    Route("/sign-out", leave, methods=["POST"]),
)
