"""The inputs of route handlers: the context of a request, with the service that handles it.

Each module of this folder has a tuple `ROUTES`.

A handler takes a `RequestContext`: the service and the caller. Its call may be cancelled at any point, because the client has
disconnected; committed changes stay. It returns bytes that the service may have stored before, so a repeated request gets the same answer,
byte for byte.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Annotated

from fastapi import Depends, Request
from fastapi.responses import Response

from groupwise.api.http.bodies import SHUTTING_DOWN_RETRY
from groupwise.api.http.shared_state import Facts, Limits, Shared, facts_of
from groupwise.api.schemas.activity import ActivityAnswer
from groupwise.api.schemas.idempotency import AnswerKey, body_hash, idempotency_key
from groupwise.api.schemas.keys import Caller
from groupwise.api.schemas.problems import Refusal
from groupwise.server.ledger.file import DiskFull, LedgerClosed
from groupwise.server.ledger.idempotency import InFlightRequests, StoredResponse
from groupwise.server.run.activity import known_clients
from groupwise.server.run.engine_supervisor import DISK_FULL_RETRY_SECONDS
from groupwise.server.run.service import Service
from groupwise.server.settings import ServerConfig

logger = logging.getLogger(__name__)

REPLAYED = "Idempotency-Replayed"
"""Header of a response that repeats an earlier one."""


class Serving(Shared):
    """State shared by all requests to one server."""

    def __init__(self, service: Service, config: ServerConfig) -> None:
        limits = Limits(config.max_body_bytes, config.requests_per_second, config.burst)
        super().__init__(limits)
        self.service = service
        self.config = config
        self.in_flight = InFlightRequests()

    async def activity(self) -> ActivityAnswer:
        """Current activity, including the clients."""
        clients = known_clients(self.clients.all(), self.clients.clock())
        return (await self.service.activity()).model_copy(update={"clients": clients})

    def refusal_of(self, error: Exception) -> Refusal | None:
        """Convert a full disk, and the ledger of a server that is shutting down, to refusals: they are not errors in the server's code."""
        if isinstance(error, LedgerClosed):
            return Refusal("shutting_down", retry_after=SHUTTING_DOWN_RETRY)
        if not isinstance(error, DiskFull):
            return None
        logger.error("%s", error)
        return Refusal("disk_full", retry_after=DISK_FULL_RETRY_SECONDS)

    async def refused(self, facts: Facts) -> None:
        """Count a refusal in the run's counters. This writes to the disk, so only refused work of authorised callers counts."""
        counts = facts.caller is not None and facts.route is not None and facts.route.works
        if counts and facts.code not in ("", "forbidden", "rate_limited", "internal"):
            await self.service.count_refusal(facts.code)


@dataclass(frozen=True, slots=True)
class RequestContext:
    """The context of one request, passed to its handler."""

    serving: Serving
    caller: Caller
    facts: Facts

    @property
    def service(self) -> Service:
        """The service that does the work."""
        return self.serving.service

    async def run_idempotent(
        self,
        work: Callable[[], Awaitable[StoredResponse]],
        wait_on: Callable[[StoredResponse], Awaitable[StoredResponse]] | None = None,
        media_type: str = "application/json",
    ) -> Response:
        """Answer with the result of `work`. A request with an Idempotency-Key that was answered before, or is being answered, gets that
        answer instead.

        `wait_on`: for requests that may wait after their work is done. For a repeated request it waits again, and builds
        the answer from the stored one.
        """
        if (response := await self.serving.in_flight.wait_for_first(self.caller)) is not None:
            return response_of(response, media_type, replayed=True)
        async with self.serving.in_flight.register(self.caller) as future:
            stored = await self.service.remembered(self.caller)
            if stored is not None:
                if wait_on is not None:
                    stored = await wait_on(stored)
                future.set_result(stored)
                return response_of(stored, media_type, replayed=True)
            fresh = await work()
            future.set_result(fresh)
        return response_of(fresh, media_type)


async def request_context(request: Request) -> RequestContext:
    """The context of a request: its caller, and the key under which its answer is stored."""
    facts = facts_of(request.scope)
    assert facts.caller is not None, "the middleware let it through"
    caller, route = facts.caller, facts.route
    if route is not None and route.named and (key := idempotency_key(request.headers)):
        name = f"{request.method} {request.url.path}"
        caller = replace(caller, answer_key=AnswerKey(name, key, body_hash(await request.body())))
    return RequestContext(request.app.state.shared, caller, facts)


Context = Annotated[RequestContext, Depends(request_context)]


def response_of(answer: StoredResponse, media_type: str, *, replayed: bool = False) -> Response:
    """Convert a stored answer to an HTTP response."""
    headers = {REPLAYED: "true"} if replayed else None
    return Response(answer.body, answer.status, headers, media_type)
