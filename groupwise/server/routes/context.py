"""The inputs of route handlers: the context of a request, and the protocol of the service that handles it.

Each module of this folder has a tuple `ROUTES`.

A handler takes a `RequestContext`: the service and the caller. It returns bytes that the service may have stored before, so a repeated
request gets the same answer, byte for byte.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Protocol

from fastapi import Depends, Request
from fastapi.responses import Response

from groupwise.api.http.bodies import SHUTTING_DOWN_RETRY
from groupwise.api.http.shared_state import Facts, Limits, Shared, facts_of
from groupwise.api.schemas.activity import ActivityAnswer
from groupwise.api.schemas.idempotency import AnswerKey, body_hash, idempotency_key
from groupwise.api.schemas.keys import Caller
from groupwise.api.schemas.problems import Refusal
from groupwise.api.schemas.training import (
    AnyRewards,
    CheckpointAnswer,
    CheckpointsAnswer,
    CloseAnswer,
    CompletionsRequest,
    EventData,
    GroupAnswer,
    RewardAnswer,
    StartAnswer,
    StartRequest,
    StatusAnswer,
    StepAnswer,
    StepRequest,
    StopAnswer,
    TokenizerAnswer,
)
from groupwise.server.ledger.file import DiskFull, LedgerClosed
from groupwise.server.ledger.idempotency import InFlightRequests, StoredResponse
from groupwise.server.run.activity import known_clients
from groupwise.server.run.downloads import OpenVersion
from groupwise.server.run.engine_supervisor import FULL_SECONDS
from groupwise.server.settings import ServerConfig

logger = logging.getLogger(__name__)

REPLAYED = "Idempotency-Replayed"
"""Header of a response that repeats an earlier one."""


class ServiceLike(Protocol):
    """Everything that the routes call. Errors for the client are raised as `Refusal`.

    Calls may be cancelled at any point, because their client has disconnected; committed changes stay.
    """

    async def begin(self) -> None:
        """Open the run that was active when the last server ended. An engine that it needs is started in the background."""
        ...

    async def shut_down(self, seconds: float) -> None:
        """Answer all waiting requests, save, and end the engine, within `seconds`."""
        ...

    def ready(self) -> str | None:
        """Why requests are refused; None if they are served."""
        ...

    async def start(self, request: StartRequest, caller: Caller) -> StartAnswer:
        """Start a run."""
        ...

    async def stop(self) -> StopAnswer:
        """End the run."""
        ...

    async def completions(
        self, request: CompletionsRequest, caller: Caller
    ) -> Sequence[GroupAnswer]:
        """One group for each prompt."""
        ...

    async def give_up(self, group_id: str, /) -> None:
        """Release a group that will not be rewarded."""
        ...

    async def rewards(self, request: AnyRewards, caller: Caller) -> Sequence[RewardAnswer]:
        """Store rewards; one answer for each group."""
        ...

    async def close_group(self, name: str, caller: Caller, /) -> CloseAnswer:
        """Close a group of trajectories before all its places have a reward."""
        ...

    async def rewards_trained(
        self, answers: Sequence[RewardAnswer], seconds: float
    ) -> Sequence[RewardAnswer]:
        """The answers to earlier posted rewards: after the step that learns from them, or after `seconds`."""
        ...

    async def step(self, request: StepRequest, caller: Caller) -> StepAnswer:
        """Take a step."""
        ...

    async def step_taken(self, answer: StepAnswer, seconds: float) -> StepAnswer:
        """The answer about an earlier planned step: after it was taken, or after `seconds`."""
        ...

    async def status(self) -> StatusAnswer:
        """The state of the server and its run."""
        ...

    async def activity(self) -> ActivityAnswer:
        """Current activity, without the clients."""
        ...

    async def last_event(self) -> int:
        """The id of the newest event; 0 before the first."""
        ...

    async def events(self, after: int | None, limit: int) -> Sequence[EventData]:
        """The events after this one, oldest first."""
        ...

    async def next_event(self, after: int, seconds: float) -> None:
        """Wait until there is a newer event, or the time is over."""
        ...

    async def open_version(self, version: str | None) -> OpenVersion:
        """Open the files of a version."""
        ...

    async def checkpoints(self) -> CheckpointsAnswer:
        """All checkpoints of the run."""
        ...

    async def save_checkpoint(self, name: str, caller: Caller, /) -> CheckpointAnswer:
        """Write a checkpoint now."""
        ...

    async def tokenizer(self) -> TokenizerAnswer:
        """The run's tokenizer."""
        ...

    async def count_refusal(self, code: str) -> None:
        """Count a refused request; `status` shows the count."""
        ...

    async def remembered(self, caller: Caller) -> StoredResponse | None:
        """The stored answer to an earlier request with this Idempotency-Key; None if there is none."""
        ...


class Serving(Shared):
    """State shared by all requests to one server."""

    def __init__(self, service: ServiceLike, config: ServerConfig) -> None:
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
        """Convert a full disk, and the ledger of a server that is shutting down, to refusals: they are no errors of the server's code."""
        if isinstance(error, LedgerClosed):
            return Refusal("shutting_down", retry_after=SHUTTING_DOWN_RETRY)
        if not isinstance(error, DiskFull):
            return None
        logger.error("%s", error)
        return Refusal("disk_full", retry_after=FULL_SECONDS)

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
    def service(self) -> ServiceLike:
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
