"""How a route is declared, and what its handler is given.

Each module of this folder has a tuple `ROUTES`. A `Route` says everything of it in one place: who may ask, what it can be refused,
whether it begins work (which a server that ends refuses), and whether the work ends with the client that asked. The middleware enforces
it, the OpenAPI document shows it, and the tests walk it: there is no second list.

A handler takes `Asked`: the service, and who asks. It returns bytes that the service may have kept before, so that a request that comes
twice gets the same answer to the byte.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol, cast

from fastapi import Depends, Request
from fastapi.responses import Response
from pydantic import BaseModel

from groupwise.server.bodies import Bodies
from groupwise.server.caller import AnswerKey, Caller
from groupwise.server.downloads import OpenVersion
from groupwise.server.idempotent import UnderWay
from groupwise.server.ledger.answers import Answer
from groupwise.server.metrics import Metrics
from groupwise.server.settings import ServerConfig
from groupwise.wire.idempotency import body_hash, idempotency_key
from groupwise.wire.keys import Role
from groupwise.wire.training import (
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

REPLAYED = "Idempotency-Replayed"
"""Header of an answer that was given before."""
OF_ALL = ("unauthorised", "forbidden", "rate_limited", "invalid_request", "internal")
OF_BODIES = (
    "invalid_request",
    "too_large",
    "unsupported_media_type",
    "timed_out",
    "shutting_down",
)
OF_WORK = ("shutting_down",)
OF_KEYS = ("idempotency_key_reused", "invalid_request")


class ServiceLike(Protocol):
    """Everything that the routes ask for. What a client can get is raised as `Refusal`.

    Calls may be cancelled at any point, because their client has gone; what has been committed stands all the same.
    """

    async def begin(self) -> None:
        """Open what was left by the last server; an engine that has to be started first is started behind it."""
        ...

    async def shut_down(self, seconds: float) -> None:
        """Answer everybody who waits, save, and end the engine, within so many seconds."""
        ...

    def ready(self) -> str | None:
        """Why requests are not answered; None: they are."""
        ...

    async def start(self, request: StartRequest, caller: Caller) -> StartAnswer:
        """Begin a run."""
        ...

    async def stop(self) -> StopAnswer:
        """End it."""
        ...

    async def completions(
        self, request: CompletionsRequest, caller: Caller
    ) -> Sequence[GroupAnswer]:
        """One group for each prompt."""
        ...

    async def give_up(self, group_id: str, /) -> None:
        """Nobody will reward the group."""
        ...

    async def rewards(
        self, request: RewardsOfOne | RewardsOfSeveral, caller: Caller
    ) -> Sequence[RewardAnswer]:
        """One answer for each group."""
        ...

    async def rewards_trained(
        self, answers: Sequence[RewardAnswer], seconds: float
    ) -> Sequence[RewardAnswer]:
        """The answers to a post that came before, after the step that learns from it, or after so many seconds."""
        ...

    async def step(self, request: StepRequest, caller: Caller) -> StepAnswer:
        """Take a step."""
        ...

    async def step_taken(self, answer: StepAnswer, seconds: float) -> StepAnswer:
        """The answer about a step that was planned before, after it, or after so many seconds."""
        ...

    async def status(self) -> StatusAnswer:
        """Where everything stands."""
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
        """Those there are."""
        ...

    async def save_checkpoint(self, name: str, caller: Caller, /) -> CheckpointAnswer:
        """Write one now."""
        ...

    async def tokenizer(self) -> TokenizerAnswer:
        """Of the run."""
        ...

    async def count_refusal(self, code: str) -> None:
        """A request for work was refused; told by `status`."""
        ...

    async def remembered(self, caller: Caller) -> Answer | None:
        """What the request with this Idempotency-Key was answered before."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One method of one address."""

    method: str
    path: str
    handler: Callable[..., Any]
    role: Role | None
    """The lowest that may ask; None: everybody, also without a key."""
    tag: str
    """The part of the document where it stands."""
    answer: Any = None
    """The model of its answer; None: no JSON."""
    media_type: str = "application/json"
    """Of its answer."""
    codes: tuple[str, ...] = ()
    """What the service may refuse it for."""
    takes_body: bool = False
    takes_bytes: bool = False
    """Whether the body may be anything, and not JSON alone."""
    reads: type[BaseModel] | None = None
    """The model of a body that the handler reads itself; None: its parameters say it."""
    works: bool = False
    """Whether it begins or changes something: a server that ends refuses it."""
    ends_with_client: bool = True
    """Whether what is done for it is cancelled when the client goes away."""
    named: bool = False
    """Whether it takes an Idempotency-Key."""
    later: str = ""
    """What it means when it answers 202; empty: it does not."""
    example: Any = None
    """A body."""
    response_class: type[Response] = Response

    @property
    def all_codes(self) -> frozenset[str]:
        """Every problem that it can be answered with."""
        codes = {*self.codes, *OF_ALL} if self.role else {*self.codes, "internal"}
        codes |= {*OF_BODIES} if self.takes_body else set()
        codes |= {*OF_WORK} if self.works else set()
        codes |= {*OF_KEYS} if self.named else set()
        return frozenset(codes)

    @property
    def name(self) -> str:
        """`POST /start`: in the log, and for idempotency keys."""
        return f"{self.method} {self.path}"


@dataclass(slots=True)
class Serving:
    """What all requests to one server share."""

    service: ServiceLike
    config: ServerConfig
    metrics: Metrics = field(default_factory=Metrics)
    under_way: UnderWay = field(default_factory=UnderWay)
    ending: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the server has been asked to end."""
    bodies: Bodies = field(init=False)

    def __post_init__(self) -> None:
        self.bodies = Bodies(self.config.max_body_bytes)

    def end(self) -> None:
        """Take no new work, and none whose body is not here yet."""
        self.ending.set()
        self.bodies.give_up()


@dataclass(slots=True)
class Facts:
    """What is known of a request, filled in on its way through the middleware."""

    request_id: str
    route: Route | None = None
    caller: Caller | None = None
    code: str = ""
    """Of the problem that it is answered with."""
    headers: dict[str, str] = field(default_factory=dict[str, str])
    """Of a refusal, beside those that every refusal has."""

    @property
    def instance(self) -> str:
        """What problem and log call it."""
        return f"urn:groupwise:request:{self.request_id}"


SCOPE = "groupwise.facts"
"""Where the facts lie in the scope of a request."""


def facts_of(scope: Any) -> Facts:
    """Those that the middleware has put there."""
    return cast("Facts", scope[SCOPE])


@dataclass(frozen=True, slots=True)
class Asked:
    """What a handler is given."""

    serving: Serving
    caller: Caller

    @property
    def service(self) -> ServiceLike:
        """That does the work."""
        return self.serving.service

    async def once(
        self,
        work: Callable[[], Awaitable[Answer]],
        wait_on: Callable[[Answer], Awaitable[Answer]] | None = None,
    ) -> Response:
        """The answer of the work; where the request names itself and was answered before, or is being answered, that answer.

        `wait_on`, of a request that waits for more than its work: from the answer that was kept when the work was done to the one
        that a client which asks again is given.
        """
        if (given := await self.serving.under_way.answer(self.caller)) is not None:
            return sent(given, replayed=True)
        async with self.serving.under_way.first(self.caller) as told:
            if self.caller.answer_key is not None:
                before = await self.service.remembered(self.caller)
                if before is not None:
                    if wait_on is not None:
                        before = await wait_on(before)
                    told.set_result(before)
                    return sent(before, replayed=True)
            answer = await work()
            told.set_result(answer)
        return sent(answer)


async def asked(request: Request) -> Asked:
    """For handlers: who asks, with the name that the request gives itself."""
    facts = facts_of(request.scope)
    assert facts.caller is not None, "the middleware let it through"
    caller, route = facts.caller, facts.route
    if route is not None and route.named and (key := idempotency_key(request.headers)):
        name = f"{request.method} {request.url.path}"
        named = AnswerKey(name, key, body_hash(await request.body()))
        caller = Caller(caller.key_id, caller.role, named)
    return Asked(request.app.state.serving, caller)


AskedHere = Annotated[Asked, Depends(asked)]


def sent(answer: Answer, *, replayed: bool = False) -> Response:
    """An answer as a response."""
    headers = {REPLAYED: "true"} if replayed else None
    return Response(answer.body, answer.status, headers, "application/json")


def sent_model(model: BaseModel, status: int = 200) -> Response:
    """A model as a response."""
    return Response(model.model_dump_json(), status, media_type="application/json")
