"""The layers that every request passes before its route, from the outermost to the innermost.

    RequestMiddleware   assigns an id, counts and logs the request, and answers exceptions: a `Refusal` as its problem body, any other as
                        `internal`, whose details are written only to the log, under that id
    AuthMiddleware      checks the caller's key, its role, its rate limit, and whether the server still accepts work
    BodyMiddleware      reads the body within a limit of bytes and time, and cancels the work if the client disconnects

Plain ASGI: streams pass unwrapped. The settings of a route are in its `Route`.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from groupwise.api.http.bodies import SHUTTING_DOWN_RETRY, VERY_LARGE, ClientGone, give_memory_back
from groupwise.api.http.logs import log_request
from groupwise.api.http.origins import check_local
from groupwise.api.http.route import Route
from groupwise.api.http.shared_state import SCOPE, Facts, Shared, facts_of
from groupwise.api.schemas.keys import Caller, Role
from groupwise.api.schemas.problems import MEDIA_TYPE, Refusal

logger = logging.getLogger(__name__)

REQUEST_ID = "X-Request-ID"
CLIENT_GONE = 499
"""Status in log and metrics of a request whose client disconnected."""

CallerOf = Callable[[Mapping[str, str]], Awaitable[Caller]]
"""Finds the caller from a request's headers. Raises `unauthorised`."""

_SAFE_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class RouteTable:
    """Finds the route of a request."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._routes = [(route, compile_path(route.path)[0]) for route in routes]

    def find(self, method: str, path: str) -> Route | None:
        """The route; None if no route matches."""
        for route, pattern in self._routes:
            if route.method == method and pattern.match(path):
                return route
        return None


class RequestMiddleware:
    """The outermost layer; see the module docstring."""

    def __init__(
        self, app: ASGIApp, shared: Shared, table: RouteTable, others: str = "other"
    ) -> None:
        """`others`: the name in the metrics for requests that match no route of the table."""
        self._app = app
        self._shared = shared
        self._table = table
        self._unmatched_name = others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request, count and log it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start_time = time.perf_counter()
        request_id = Headers(scope=scope).get(REQUEST_ID, "")
        if not _SAFE_ID.fullmatch(request_id):
            request_id = secrets.token_hex(8)
        facts = Facts(request_id, self._table.find(scope["method"], scope["path"]))
        scope[SCOPE] = facts
        answer = _Response(send, facts)
        try:
            await self._call_app(scope, receive, answer)
        finally:
            self._report(
                scope, facts, answer.status or CLIENT_GONE, time.perf_counter() - start_time
            )
        if facts.code:
            await self._shared.refused(facts)

    async def _call_app(self, scope: Scope, receive: Receive, answer: _Response) -> None:
        try:
            await self._app(scope, receive, answer.send)
        except Refusal as refusal:
            await answer.refuse(refusal)
        except ClientGone:
            answer.status = CLIENT_GONE
        except Exception as error:  # the boundary: a bug in one request must not affect others, and its details go to the log only
            if (known_refusal := self._shared.refusal_of(error)) is not None:
                await answer.refuse(known_refusal)
                return
            facts = facts_of(scope)
            logger.exception(
                "request %s failed",
                facts.request_id,
                extra={"facts": {"request_id": facts.request_id}},
            )
            await answer.refuse(Refusal("internal"))

    def _report(self, scope: Scope, facts: Facts, status: int, seconds: float) -> None:
        metrics = self._shared.metrics
        metrics.observe(facts.route.name if facts.route else self._unmatched_name, status, seconds)
        if facts.code:
            metrics.refusals[facts.code] += 1
        if facts.route is not None and facts.code and facts.code not in facts.route.all_codes:
            logger.warning(
                "%s answered %s, which its description lacks", facts.route.name, facts.code
            )
        if facts.caller is not None:
            name = facts.route.name if facts.route else self._unmatched_name
            self._shared.clients.note(facts.caller, name, facts.code)
        log_request(
            request_id=facts.request_id,
            method=scope["method"],
            path=scope["path"],
            status=status,
            seconds=seconds,
            key_id=facts.caller.key_id if facts.caller else "",
            code=facts.code,
        )


class _Response:
    """Tracks the part of the response already sent."""

    def __init__(self, send: Send, facts: Facts) -> None:
        self.status: int | None = None
        self._send = send
        self._facts = facts

    async def send(self, message: Message) -> None:
        """Send a message, with the request's id."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)[REQUEST_ID] = self._facts.request_id
        await self._send(message)

    async def refuse(self, refusal: Refusal) -> None:
        """Answer with a problem body. If a response has already started, it can only be broken off: raises `ResponseAborted`."""
        self._facts.code = refusal.code
        if self.status is not None:
            raise ResponseAborted(refusal.code)
        body = refusal.problem(self._facts.instance).model_dump_json().encode()
        headers = {
            "content-type": MEDIA_TYPE,
            "content-length": str(len(body)),
            "cache-control": "no-store",
            **refusal.headers,
            **self._facts.headers,
        }
        if refusal.status == 401:
            headers["www-authenticate"] = "Bearer"
        raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": refusal.status, "headers": raw})
        await self.send({"type": "http.response.body", "body": body})


class ResponseAborted(Exception):
    """A response that cannot be finished. The connection is closed, so the client cannot take a part for the whole."""


class AuthMiddleware:
    """Passes authorised requests on."""

    def __init__(self, app: ASGIApp, shared: Shared, who: CallerOf, *, local_only: bool) -> None:
        self._app = app
        self._shared = shared
        self._caller_of = who
        self._local_only = local_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or raise the reason why not."""
        facts = facts_of(scope) if scope["type"] == "http" else None
        if facts is not None and (facts.route is None or facts.route.role is not None):
            route, headers = facts.route, Headers(scope=scope)
            if self._local_only:
                check_local(headers)
            facts.caller = caller = await self._caller_of(headers)
            self._shared.count(caller.key_id)
            caller.require((route and route.role) or Role.READ, self._shared.role_words)
            if route is not None and route.works and self._shared.ending.is_set():
                raise Refusal("shutting_down", retry_after=SHUTTING_DOWN_RETRY)
        await self._app(scope, receive, send)


class BodyMiddleware:
    """The innermost layer; see the module docstring."""

    def __init__(self, app: ASGIApp, shared: Shared) -> None:
        self._app = app
        self._shared = shared

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, then do the work as long as the client is connected."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        route, headers = facts_of(scope).route, Headers(scope=scope)
        body = b""  # a body sent to a route that takes none is discarded
        if route is not None and route.takes_body:
            shared = self._shared
            bodies = shared.bodies if route.takes_bytes else shared.json_bodies
            body = await bodies.read(headers, receive, route.max_body_bytes)
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            is_json = kind == "application/json" or (
                kind.startswith("application/") and kind.endswith("+json")
            )
            if body and not route.takes_bytes and not is_json:
                problem = "must be application/json"
                raise Refusal("unsupported_media_type", field="Content-Type", problem=problem)
        try:
            await _while_client_listens(self._app, scope, body, receive, send)
        finally:
            if len(body) > VERY_LARGE:
                give_memory_back()


async def _while_client_listens(
    app: ASGIApp, scope: Scope, body: bytes, receive: Receive, send: Send
) -> None:
    """Do the work. If the route has `ends_with_client`, cancel it when the client disconnects before the response is complete."""
    facts = facts_of(scope)
    route = facts.route
    is_read = is_answered = False

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def receive_body() -> Message:
        """The body that was read; on later calls waits for the client to disconnect and reports that."""
        nonlocal is_read
        if not is_read:
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}
        await asyncio.shield(client_gone)
        return {"type": "http.disconnect"}

    async def send_and_note(message: Message) -> None:
        nonlocal is_answered
        await send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            is_answered = True

    client_gone = asyncio.ensure_future(disconnected())
    response_task = asyncio.ensure_future(app(scope, receive_body, send_and_note))
    try:
        if route is None or route.ends_with_client:
            await asyncio.wait((response_task, client_gone), return_when=asyncio.FIRST_COMPLETED)
            if not response_task.done() and not is_answered:
                response_task.cancel()
                await asyncio.wait((response_task,))
                raise ClientGone
        await response_task
    finally:
        client_gone.cancel()
        if not response_task.done():
            response_task.cancel()
        await asyncio.gather(response_task, client_gone, return_exceptions=True)
        facts.note_delivery(is_answered)
