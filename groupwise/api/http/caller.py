"""Who asks, as the service sees it: the key, its role, and how the request names itself where it may come twice."""

from __future__ import annotations

from dataclasses import dataclass

from groupwise.api.schemas.keys import Role


@dataclass(frozen=True, slots=True)
class AnswerKey:
    """Of a request with an Idempotency-Key."""

    route: str
    """Method and path: `POST /rewards`."""
    key: str
    body_hash: str


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks."""

    key_id: str
    """Of the API key; `local` where the server has none."""
    role: Role
    projects: frozenset[str] | None = None
    """Whose jobs the key is for; None: everybody's."""
    answer_key: AnswerKey | None = None
    """None: the request does not name itself, so that it is done whenever it comes."""
