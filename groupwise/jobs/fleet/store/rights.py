"""Rights to blobs: a project may name a blob if it has sent all of its bytes, has submitted a job with it, or has a job with it in a
checkpoint.

Blobs are stored once, regardless of their sender, and are named by their sha256. Knowing the hash of another project's file must not be
enough to get it, nor to learn whether it exists. So a caller bound to projects is told that a blob is missing if none of its projects has a
right to it, and has to send it. A caller bound to no project may name any blob."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable

from sqlalchemy import Table, delete, select
from sqlalchemy.orm import Session

from groupwise.jobs.fleet.store.database import clock
from groupwise.jobs.fleet.store.engine import upsert
from groupwise.jobs.fleet.store.tables import BlobRight

AT_ONCE = 1000
_TABLE: Table = BlobRight.__table__  # pyright: ignore[reportAssignmentType] — a mapped class's table is a Table


def lacking(
    session: Session, projects: Collection[str] | None, hashes: Iterable[str]
) -> frozenset[str]:
    """The blobs among these that none of the projects may name. `projects` None: all blobs may be named."""
    if projects is None:
        return frozenset()
    sorted_hashes = sorted(set(hashes))
    permitted = select(BlobRight.sha256).where(BlobRight.project.in_(projects))
    permitted_hashes = set[str]()
    for start in range(0, len(sorted_hashes), AT_ONCE):
        is_in_portion = BlobRight.sha256.in_(sorted_hashes[start : start + AT_ONCE])
        permitted_hashes.update(session.scalars(permitted.where(is_in_portion)))
    return frozenset(sorted_hashes) - permitted_hashes


def record(session: Session, rights: Iterable[tuple[str, str]]) -> None:
    """Grant rights: pairs of sha256 and project."""
    rows = [{"sha256": sha256, "project": project} for sha256, project in sorted(set(rights))]
    if not rows:
        return
    insert_rights = upsert(session, _TABLE).values(at=clock())
    # The time too: a concurrent cleaner that read the old time must not delete a right to a blob that was sent again.
    upsert_rights = insert_rights.on_conflict_do_update(
        index_elements=["sha256", "project"], set_={"at": insert_rights.excluded.at}
    )
    session.execute(upsert_rights, rows)


def sender(projects: Collection[str] | None) -> str:
    """A key that separates the unfinished uploads of different callers: a caller who knows only the end of a file must not get it by
    completing another project's upload."""
    if projects is None:
        return ""
    return hashlib.sha256(json.dumps(sorted(projects)).encode()).hexdigest()[:16]


def old(session: Session, age: float) -> list[str]:
    """Blobs with a right that was not recorded within this number of seconds."""
    query = select(BlobRight.sha256).where(BlobRight.at < clock() - age)
    return list(session.scalars(query.distinct()))


def forget(session: Session, hashes: Collection[str], age: float) -> None:
    """Delete rights to these blobs, except those that were recorded within `age` seconds."""
    outdated = BlobRight.sha256.in_(hashes) & (BlobRight.at < clock() - age)
    session.execute(delete(BlobRight).where(outdated).execution_options(synchronize_session=False))
