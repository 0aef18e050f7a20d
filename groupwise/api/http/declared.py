"""Declarations of routes, and the facts about a request.

A `Route` is described in one place: who may call it, which refusals it has, whether it begins work (which a server that is shutting
down refuses), and whether the work ends when its client goes away. The middleware enforces it, the OpenAPI document shows it, and the tests
walk it: there is no second list.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from fastapi.responses import Response
from pydantic import BaseModel

from groupwise.api.http.bodies import Bodies
from groupwise.api.http.caller import Caller
from groupwise.api.http.clients import Clients
from groupwise.api.http.prometheus import Requests
from groupwise.api.schemas.keys import WORDS, Role
from groupwise.api.schemas.problems import Refusal

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One method of one address."""

    method: str
    path: str
    handler: Callable[..., Any]
    role: Role | None
    """The lowest role that may ask; None: no key is needed."""
    tag: str
    """The section of the document that describes it."""
    answer: Any = None
    """The model of its answer; None: no JSON."""
    media_type: str = "application/json"
    """Media type of its answer."""
    codes: tuple[str, ...] = ()
    """Codes that the service may refuse it with."""
    takes_body: bool = False
    takes_bytes: bool = False
    """True if the body may be any bytes, not only JSON."""
    reads: type[BaseModel] | None = None
    """The model of a body that the handler reads itself; None: its parameters say it."""
    works: bool = False
    """True if it begins or changes something: a server that is shutting down refuses it."""
    ends_with_client: bool = True
    """True if its work is cancelled when the client goes away."""
    named: bool = False
    """True if it takes an Idempotency-Key."""
    status: int = 200
    """Status of a successful answer."""
    later: str = ""
    """Meaning of a 202 answer; empty if it never answers so."""
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


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on a server's requests."""

    max_body_bytes: int
    """Limit for one request."""
    requests_per_second: float | None = None
    """Long-run limit for each key; None: no limit."""
    burst: int = 50
    """Requests that a key may make at once before that counts."""
    max_json_bytes: int | None = None
    """Limit for a request whose body is JSON; None: as for any other."""


class Buckets:
    """How many requests each key has left: `burst` at once, and so many more each second."""

    def __init__(
        self, per_second: float, burst: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_second = per_second
        self._burst = burst
        self._clock = clock
        self._left: dict[str, tuple[float, float]] = {}
        """Key id -> what was left, and when; those last that have asked last, and none that is full again."""

    def take(self, key_id: str) -> float:
        """Take one; 0 if there was one, else the seconds until there is."""
        now = self._clock()
        full_since = now - self._burst / self._per_second
        while (oldest := next(iter(self._left), None)) and self._left[oldest][1] <= full_since:
            del self._left[oldest]
        left, since = self._left.pop(key_id, (float(self._burst), now))
        left = min(left + (now - since) * self._per_second, float(self._burst))
        enough = left >= 1
        self._left[key_id] = (left - 1 if enough else left, now)
        return 0.0 if enough else (1 - left) / self._per_second


class Shared:
    """State shared by all requests to one server. Each kind of server has its own subclass."""

    role_words: Mapping[Role, str] = WORDS
    """Its words for the roles of its keys."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.metrics = Requests()
        self.clients = Clients()
        self.ending = asyncio.Event()
        """Set when the server has been asked to end."""
        self.bodies = Bodies(limits.max_body_bytes)
        json_bytes = limits.max_json_bytes
        self.json_bodies = self.bodies if json_bytes is None else Bodies(json_bytes)
        rate = limits.requests_per_second
        self._buckets = None if rate is None else Buckets(rate, limits.burst)

    def count(self, key_id: str) -> None:
        """A key has made a request, whatever protocol it speaks. Raises `rate_limited`."""
        if self._buckets is not None and (seconds := self._buckets.take(key_id)):
            raise Refusal("rate_limited", retry_after=seconds)

    def end(self) -> None:
        """Take no new work, and none whose body is not here yet."""
        self.ending.set()
        self.bodies.give_up()
        self.json_bodies.give_up()

    def refusal_of(self, error: Exception) -> Refusal | None:
        """The refusal to answer an error that a route let through; None: it is a mistake of ours."""
        del error
        return None

    async def refused(self, facts: Facts) -> None:
        """A request was answered with a problem."""


@dataclass(slots=True)
class Facts:
    """Facts about a request, filled in on its way through the middleware."""

    request_id: str
    route: Route | None = None
    caller: Caller | None = None
    code: str = ""
    """Code of the problem that it is answered with."""
    headers: dict[str, str] = field(default_factory=dict[str, str])
    """Headers of a refusal, beside those that every refusal has."""

    @property
    def instance(self) -> str:
        """Id of the request in the problem and the log."""
        return f"urn:groupwise:request:{self.request_id}"


SCOPE = "groupwise.facts"
"""Key of the facts in the scope of a request."""


def facts_of(scope: Any) -> Facts:
    """Facts that the middleware has put into the scope."""
    return cast("Facts", scope[SCOPE])


def sent_model(model: BaseModel, status: int = 200) -> Response:
    """A model as a response."""
    return Response(model.model_dump_json(), status, media_type="application/json")
