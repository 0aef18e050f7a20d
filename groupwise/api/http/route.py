"""Declarations of routes: who may call one, which refusals it has, whether it begins work, whether that ends with its client.

Each `Route` is described in one place. The middleware enforces it, the OpenAPI document shows it, and the tests walk it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi.responses import Response
from pydantic import BaseModel

from groupwise.api.schemas.keys import Role

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
    """The lowest role that may call it; None: no key is needed."""
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
    """An example of a body."""
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


def json_response(model: BaseModel, status: int = 200) -> Response:
    """A model as a JSON response."""
    return Response(model.model_dump_json(), status, media_type="application/json")
