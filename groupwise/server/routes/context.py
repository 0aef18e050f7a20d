"""What handlers of routes receive: the context of a request, and the protocol of the service behind them.

Each module of this folder has a tuple `ROUTES`.

A handler takes `RequestContext`: the service, and the caller. It returns bytes that the service may have stored before, so that a request
that comes twice gets the same answer to the byte.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Protocol

from fastapi import Depends, Request
from fastapi.responses import Response

from groupwise.api.http.shared_state import Facts, Limits, Shared, facts_of
from groupwise.api.schemas.activity import ActivityAnswer
from groupwise.api.schemas.idempotency import AnswerKey, body_hash, idempotency_key
from groupwise.api.schemas.keys import Caller
from groupwise.api.schemas.problems import Refusal
from groupwise.api.schemas.training import (
    CheckpointAnswer,
    CheckpointsAnswer,
    CompletionsRequest,
    EventData,
    GroupAnswer,
    RewardAnswer,
    RewardsOfOne,
    RewardsOfSeveral,
    StartAnswer,
    StartRequest,
    StatusAnswer,
    StepAnswer,
    StepRequest,
    StopAnswer,
    TokenizerAnswer,
)
from groupwise.server.ledger.answers import StoredResponse, UnderWay
from groupwise.server.ledger.file import DiskFull
from groupwise.server.run.activity import known_clients
from groupwise.server.run.downloads import OpenVersion
from groupwise.server.run.engine_supervisor import FULL_SECONDS
from groupwise.server.settings import ServerConfig

logger = logging.getLogger(__name__)

REPLAYED = "Idempotency-Replayed"
"""Header of an answer that was given before."""


class ServiceLike(Protocol):
    """Everything that the routes call. Errors for the client are raised as `Refusal`.

    Calls may be cancelled at any point, because their client has gone; what has been committed stands all the same.
    """

    async def begin(self) -> None:
        """Open the run that the last server left. An engine that it needs is started in the background."""
        ...

    async def shut_down(self, seconds: float) -> None:
        """Answer all waiting requests, save, and end the engine, within `seconds`."""
        ...

    def ready(self) -> str | None:
        """Why requests are not answered; None if they are."""
        ...

    async def start(self, request: StartRequest, caller: Caller) -> StartAnswer:
        """Begin a run."""
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

    async def rewards(
        self, request: RewardsOfOne | RewardsOfSeveral, caller: Caller
    ) -> Sequence[RewardAnswer]:
        """Store rewards; one answer for each group."""
        ...

    async def rewards_trained(
        self, answers: Sequence[RewardAnswer], seconds: float
    ) -> Sequence[RewardAnswer]:
        """The answers to a post that came before, after the step that learns from it, or after `seconds`."""
        ...

    async def step(self, request: StepRequest, caller: Caller) -> StepAnswer:
        """Take a step."""
        ...

    async def step_taken(self, answer: StepAnswer, seconds: float) -> StepAnswer:
        """The answer about a step that was planned before: after it, or after `seconds`."""
        ...

    async def status(self) -> StatusAnswer:
        """The state of the server and its run."""
        ...

    async def activity(self) -> ActivityAnswer:
        """The state at this instant, without the clients."""
        ...

    async def last_event(self) -> int:
        """The id of the newest event; 0 before the first."""
        ...

    async def events(self, after: int | None, limit: int) -> Sequence[EventData]:
        """The events after this one, the oldest first."""
        ...

    async def next_event(self, after: int, seconds: float) -> None:
        """Return when there is a newer event, or when the time is over."""
        ...

    async def open_version(self, version: str | None) -> OpenVersion:
        """The files of a version."""
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
        """Count a refused request for work; `status` shows the number."""
        ...

    async def remembered(self, caller: Caller) -> StoredResponse | None:
        """The stored answer to the request with this Idempotency-Key."""
        ...


class Serving(Shared):
    """State that all requests to one server share."""

    def __init__(self, service: ServiceLike, config: ServerConfig) -> None:
        limits = Limits(config.max_body_bytes, config.requests_per_second, config.burst)
        super().__init__(limits)
        self.service = service
        self.config = config
        self.under_way = UnderWay()

    async def activity(self) -> ActivityAnswer:
        """The state at this instant, with the clients."""
        clients = known_clients(self.clients.all(), self.clients.clock())
        return (await self.service.activity()).model_copy(update={"clients": clients})

    def refusal_of(self, error: Exception) -> Refusal | None:
        """A full disk is no mistake of the server's."""
        if not isinstance(error, DiskFull):
            return None
        logger.error("%s", error)
        return Refusal("disk_full", retry_after=FULL_SECONDS)

    async def refused(self, facts: Facts) -> None:
        """Count the refusal with the run, which writes to the disk: only refusals of work, to callers who may ask for it."""
        known = facts.caller is not None and facts.route is not None and facts.route.works
        if known and facts.code not in ("", "forbidden", "rate_limited", "internal"):
            await self.service.count_refusal(facts.code)


@dataclass(frozen=True, slots=True)
class RequestContext:
    """The context of one request, which its handler is given."""

    serving: Serving
    caller: Caller

    @property
    def service(self) -> ServiceLike:
        """The service that does the work."""
        return self.serving.service

    async def once(
        self,
        work: Callable[[], Awaitable[StoredResponse]],
        wait_on: Callable[[StoredResponse], Awaitable[StoredResponse]] | None = None,
    ) -> Response:
        """Answer with what the work returns. A request with an Idempotency-Key that was answered before, or is being answered, gets
        that answer.

        `wait_on`: for a request that waits for more than its work. It makes the answer to a repeated request of the one that was stored
        when the work was done.
        """
        if (given := await self.serving.under_way.answer(self.caller)) is not None:
            return response_of(given, replayed=True)
        async with self.serving.under_way.first(self.caller) as future:
            if self.caller.answer_key is not None:
                before = await self.service.remembered(self.caller)
                if before is not None:
                    if wait_on is not None:
                        before = await wait_on(before)
                    future.set_result(before)
                    return response_of(before, replayed=True)
            answer = await work()
            future.set_result(answer)
        return response_of(answer)


async def request_context(request: Request) -> RequestContext:
    """The context of a request: its caller, and the name under which its answer is remembered."""
    facts = facts_of(request.scope)
    assert facts.caller is not None, "the middleware let it through"
    caller, route = facts.caller, facts.route
    if route is not None and route.named and (key := idempotency_key(request.headers)):
        name = f"{request.method} {request.url.path}"
        caller = replace(caller, answer_key=AnswerKey(name, key, body_hash(await request.body())))
    return RequestContext(request.app.state.shared, caller)


Context = Annotated[RequestContext, Depends(request_context)]


def response_of(answer: StoredResponse, *, replayed: bool = False) -> Response:
    """An answer as a response."""
    headers = {REPLAYED: "true"} if replayed else None
    return Response(answer.body, answer.status, headers, "application/json")
