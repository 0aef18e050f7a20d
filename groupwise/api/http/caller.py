"""The caller, as the service sees it: the key, its role, and the name that a repeatable request gives itself."""

from __future__ import annotations

from dataclasses import dataclass

from groupwise.api.schemas.keys import Role


@dataclass(frozen=True, slots=True)
class AnswerKey:
    """Identifies a request with an Idempotency-Key."""

    route: str
    """Method and path: `POST /rewards`."""
    key: str
    body_hash: str


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request."""

    key_id: str
    """Id of the API key; `local` if the server has none."""
    role: Role
    projects: frozenset[str] | None = None
    """Projects whose jobs the key is for; None: all."""
    answer_key: AnswerKey | None = None
    """None: the request does not name itself, so that it is done whenever it comes."""
