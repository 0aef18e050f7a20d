"""Keys of the fleet's HTTP interface: made by an operator, kept as hashes in the database, looked up anew for every request.

So a key that is revoked is refused from the next request on, on every process that answers. The form of a key and how it is checked are
those of `groupwise.wire.keys`; what is added here is where it is kept, for which projects it is, and until when.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from groupwise.fleet import events
from groupwise.fleet.database import seconds
from groupwise.fleet.tables import ApiKey
from groupwise.wire.keys import (
    Caller,
    Keyring,
    NewKey,
    Role,
    StoredKey,
    id_in,
    new_key,
    presented_key,
)
from groupwise.wire.problems import Refusal

WORDS: Mapping[Role, str] = {Role.READ: "read", Role.ACT: "act", Role.ADMIN: "admin"}
"""Roles as a fleet calls them."""


def make(
    session: Session,
    role: Role,
    *,
    actor: str,
    projects: frozenset[str] | None = None,
    lasts: float | None = None,
    note: str | None = None,
) -> NewKey:
    """A key that nobody has; what it says is told once, and only its hash is kept. `lasts`: seconds; None: until it is revoked."""
    made, now = new_key(role), seconds(session)
    session.add(
        ApiKey(
            key_id=made.id,
            role=WORDS[role],
            digest=made.digest,
            projects=None if projects is None else sorted(projects),
            note=note,
            created_at=now,
            expires_at=None if lasts is None else now + lasts,
        )
    )
    events.append(
        session,
        actor=actor,
        kind=events.KEY_MADE,
        detail={
            "key_id": made.id,
            "role": WORDS[role],
            "projects": None if projects is None else sorted(projects),
        },
    )
    return made


def revoke(session: Session, key_id: str, *, actor: str) -> None:
    """From now on nobody is known by it."""
    key = session.get(ApiKey, key_id)
    if key is None:
        known = ", ".join(session.scalars(select(ApiKey.key_id).order_by(ApiKey.key_id))) or "none"
        raise Refusal("unknown_key", f"There is no key {key_id}; there are: {known}.")
    if key.revoked_at is None:
        key.revoked_at = seconds(session)
        events.append(session, actor=actor, kind=events.KEY_REVOKED, detail={"key_id": key_id})


def listed(session: Session) -> list[ApiKey]:
    """All of them, the newest first."""
    return list(session.scalars(select(ApiKey).order_by(ApiKey.created_at.desc(), ApiKey.key_id)))


def caller_of(session: Session, headers: Mapping[str, str], plain: str | None) -> Caller:
    """Who sends a request. `plain`: the key from the environment of the server, whose role is admin. Raises `unauthorised`."""
    presented = presented_key(headers)
    if presented is None:
        raise Refusal("unauthorised")
    key = session.get(ApiKey, id_in(presented) or "")
    stored = () if key is None or key.revoked_at is not None else (_stored(session, key),)
    caller = Keyring([known for known in stored if known], plain).caller(presented)
    if caller is None:
        raise Refusal(
            "unauthorised",
            "The fleet does not know this key, or it was revoked, or its time is over. Whoever runs the fleet makes one with "
            "`groupwise fleet key new ROLE`.",
        )
    return caller


def role_of(word: str) -> Role:
    """The role that a fleet calls so. Raises `invalid_request`."""
    for role, known in WORDS.items():
        if known == word:
            return role
    raise Refusal("invalid_request", f"{word!r} is no role; there are {', '.join(WORDS.values())}.")


def document(key: ApiKey) -> dict[str, Any]:
    """What is known of a key; nobody can use it by that."""
    return {
        "key_id": key.key_id,
        "role": key.role,
        "projects": key.projects,
        "note": key.note,
        "created_at": key.created_at,
        "expires_at": key.expires_at,
        "revoked_at": key.revoked_at,
    }


def _stored(session: Session, key: ApiKey) -> StoredKey | None:
    """None where its time is over by the database's clock."""
    if key.expires_at is not None and seconds(session) >= key.expires_at:
        return None
    role = next(role for role, word in WORDS.items() if word == key.role)
    projects = None if key.projects is None else frozenset(key.projects)
    return StoredKey(key.key_id, role, bytes(key.digest), projects)
