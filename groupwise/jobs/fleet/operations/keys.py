"""Keys of the fleet's HTTP API: made, listed and revoked by actors that are bound to no project; only their hashes are stored.

The form of a key is that of `groupwise.api.schemas.keys`. Added here are the projects it is bound to, and its expiry.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from groupwise.api.schemas.fleet import MAX_SECONDS
from groupwise.api.schemas.keys import Role, new_key
from groupwise.api.schemas.problems import Refusal
from groupwise.jobs.fleet.operations.actor import Actor
from groupwise.jobs.fleet.operations.documents import Document, key_document
from groupwise.jobs.fleet.operations.machines import LOCAL
from groupwise.jobs.fleet.queue.capacity import kept_for
from groupwise.jobs.fleet.store import events
from groupwise.jobs.fleet.store.database import database_time
from groupwise.jobs.fleet.store.tables import VM, ApiKey

ROLES: Mapping[str, Role] = {"read": Role.READ, "act": Role.ACT, "admin": Role.ADMIN}
"""Role names in a fleet."""


def make(
    session: Session,
    actor: Actor,
    role: str,
    *,
    projects: Sequence[str] | None = None,
    lasts: float | None = None,
    note: str | None = None,
) -> Document:
    """Make a key; its text is in `key` of this document and nowhere else. `lasts`: seconds; None: until revoked."""
    actor.require_all_projects("make a key")
    if role not in ROLES:
        raise Refusal("invalid_request", f"{role!r} is not a role; there are {', '.join(ROLES)}.")
    if lasts is not None and not 0 < lasts <= MAX_SECONDS:
        raise Refusal(
            "invalid_request",
            f"a key cannot last {lasts:g} seconds: more than 0 and at most {MAX_SECONDS:.0f} are wanted, or nothing at all: until it is "
            "revoked.",
        )
    new_api_key, now = new_key(ROLES[role]), database_time(session)
    project_names = None if projects is None else sorted(set(projects))
    row = ApiKey(
        key_id=new_api_key.id,
        role=role,
        digest=new_api_key.digest,
        projects=project_names,
        note=note,
        created_at=now,
        expires_at=None if lasts is None else now + lasts,
    )
    session.add(row)
    _append_event(
        session,
        actor,
        events.KEY_MADE,
        {"key_id": new_api_key.id, "role": role, "projects": project_names},
    )
    notes = [
        f"jobs of this key may run on {vm_id} as the user of the fleet itself, and can so read and change its keys, its secrets and what "
        f"others have: `groupwise fleet vm set {vm_id} --project P` keeps it for project P, `vm remove {vm_id}` takes it out"
        for vm_id in (machines_run_as_fleet_user(session, project_names) if role != "read" else ())
    ]
    return key_document(row) | {"key": new_api_key.key, "notes": notes}


def machines_run_as_fleet_user(session: Session, projects: Collection[str] | None) -> list[str]:
    """Machines where jobs of these projects run as the user of the control plane, and so can read and change the fleet's database, keys and
    secrets. None (all projects): such a submitter is trusted with that, so the list is empty."""
    if projects is None:
        return []
    local_machines = select(VM.vm_id, VM.projects).where(VM.active, VM.transport == LOCAL)
    return [
        vm_id
        for vm_id, column in session.execute(local_machines.order_by(VM.vm_id))
        if (allowed_projects := kept_for(column)) is None
        or not allowed_projects.isdisjoint(projects)
    ]


def bound_submitters(session: Session) -> dict[str, list[str]]:
    """Valid keys that may submit only for some projects, with these projects."""
    now = database_time(session)
    rows = session.execute(
        select(ApiKey.key_id, ApiKey.projects, ApiKey.expires_at)
        .where(ApiKey.role != "read", ApiKey.revoked_at.is_(None))
        .order_by(ApiKey.key_id)
    )
    return {
        key_id: projects
        for key_id, projects, expires_at in rows
        if projects is not None and (expires_at is None or expires_at > now)
    }


def revoke(session: Session, actor: Actor, key_id: str) -> Document:
    """Revoke a key: it is refused from the next request on. Raises `unknown_key`."""
    actor.require_all_projects("revoke a key")
    key = session.get(ApiKey, key_id, with_for_update=True)
    if key is None:
        known_ids = (
            ", ".join(session.scalars(select(ApiKey.key_id).order_by(ApiKey.key_id))) or "none"
        )
        raise Refusal("unknown_key", f"there is no key {key_id!r}; there are: {known_ids}.")
    if key.revoked_at is None:
        key.revoked_at = database_time(session)
        _append_event(session, actor, events.KEY_REVOKED, {"key_id": key_id})
    return key_document(key)


def listing(session: Session, actor: Actor) -> list[Document]:
    """All keys, the newest first, without their secret texts."""
    actor.require_all_projects("list keys")
    rows = session.scalars(select(ApiKey).order_by(ApiKey.created_at.desc(), ApiKey.key_id))
    return [key_document(key) for key in rows]


def _append_event(session: Session, actor: Actor, kind: str, detail: Document) -> None:
    events.append(session, actor=actor.name, kind=kind, detail=detail)
