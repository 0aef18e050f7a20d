"""Declarations of routes: who may call one, which refusals it has, whether it starts work, whether that ends with its client.

Each `Route` is declared once. The middleware enforces it, the OpenAPI document shows it, and the tests iterate over it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi.responses import Response
from pydantic import BaseModel

from groupwise.api.http.strict_json import MAX_KEYS
from groupwise.api.schemas.keys import Role

SMALL_BODY = 1 << 20
"""Bytes of a body with settings, names or ids alone."""
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
    """One method of one path."""

    method: str
    path: str
    handler: Callable[..., Any]
    role: Role | None
    """The lowest role that may call it; None: no key is needed."""
    tag: str
    """The section of the OpenAPI document that lists it."""
    answer: Any = None
    """The model of its response; None: not JSON."""
    media_type: str = "application/json"
    """Media type of its response."""
    codes: tuple[str, ...] = ()
    """Codes of the problems that the service itself may answer with."""
    takes_body: bool = False
    max_body_bytes: int | None = None
    """Limit on its body in bytes, below that of the server, for a route that needs no large bodies; None: the server's alone."""
    max_keys: int = MAX_KEYS
    """Limit on the keys of one object in its body."""
    takes_bytes: bool = False
    """True if the body may be any bytes, not only JSON."""
    reads: type[BaseModel] | None = None
    """The model of a body that the handler reads itself; None: the handler's parameters describe the body."""
    works: bool = False
    """True if it starts or changes something: a server that is shutting down refuses it."""
    ends_with_client: bool = True
    """True if its work is cancelled when the client disconnects."""
    named: bool = False
    """True if it accepts an Idempotency-Key."""
    status: int = 200
    """Status of a successful response."""
    later: str = ""
    """Meaning of a 202 response; empty if it never sends one."""
    example: Any = None
    """An example of a body."""
    response_class: type[Response] = Response

    @property
    def all_codes(self) -> frozenset[str]:
        """Every problem code that it can be answered with."""
        codes = {*self.codes, *OF_ALL} if self.role else {*self.codes, "internal"}
        codes |= {*OF_BODIES} if self.takes_body else set()
        codes |= {*OF_WORK} if self.works else set()
        codes |= {*OF_KEYS} if self.named else set()
        return frozenset(codes)

    @property
    def name(self) -> str:
        """`POST /start`: the route's name in the log and for idempotency keys."""
        return f"{self.method} {self.path}"


def json_response(model: BaseModel, status: int = 200) -> Response:
    """A model as a JSON response."""
    return Response(model.model_dump_json(), status, media_type="application/json")
