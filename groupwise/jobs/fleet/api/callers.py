"""Identifies the sender of a request: the holder of a key, looked up in the database each time.

So a key that is revoked is refused from the next request on, by every process that answers.
"""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import select
from sqlalchemy.orm import Session

from groupwise.api.schemas.keys import Caller, Keyring, StoredKey, id_in, presented_key
from groupwise.api.schemas.problems import Refusal
from groupwise.jobs.fleet.store.database import seconds
from groupwise.jobs.fleet.store.tables import ApiKey
from groupwise.jobs.fleet.verbs.keys import ROLES


def caller_of(session: Session, headers: Mapping[str, str], plain: str | None) -> Caller:
    """Who sends a request with these headers. `plain`: the key from the server's environment; its role is admin. Raises `unauthorised`."""
    presented = presented_key(headers)
    if presented is None:
        raise Refusal("unauthorised")
    caller = Keyring(_stored(session, presented), plain).caller(presented)
    if caller is None:
        raise Refusal(
            "unauthorised",
            "The fleet does not know this key, or it was revoked, or its time is over. Whoever runs the fleet makes one with "
            "`groupwise fleet key new ROLE`.",
        )
    return caller


def any_key(session: Session) -> bool:
    """True if a key was ever made, even if revoked or expired: from then on every request needs one."""
    return session.scalar(select(ApiKey.key_id).limit(1)) is not None


def _stored(session: Session, presented: str) -> tuple[StoredKey, ...]:
    """The row that it names, if it may still be used."""
    key = session.get(ApiKey, id_in(presented) or "")
    if key is None or key.revoked_at is not None:
        return ()
    if key.expires_at is not None and seconds(session) >= key.expires_at:
        return ()
    projects = None if key.projects is None else frozenset(key.projects)
    return (StoredKey(key.key_id, ROLES[key.role], bytes(key.digest), projects),)
