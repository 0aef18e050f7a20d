"""Which doorbells a fleet has: the one of its folder always, PostgreSQL's where it has that, NATS where its settings name it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path

from groupwise.jobs.fleet.notify.base import Doorbell
from groupwise.jobs.fleet.notify.composite import SeveralDoorbells
from groupwise.jobs.fleet.notify.local import LocalDoorbell
from groupwise.jobs.fleet.store.database import Database


def doorbell_of(
    folder: Path, database: Database, nats_url: str | None, environment: Mapping[str, str]
) -> SeveralDoorbells:
    """All of them as one; what a fleet does not have is not loaded. The secrets of NATS come from the environment, see `access_from`."""
    doorbells: list[Doorbell] = [LocalDoorbell(folder)]
    if database.dialect == "postgresql":
        from groupwise.jobs.fleet.notify.postgres import PostgresDoorbell

        doorbells.append(PostgresDoorbell(database.connection_arguments()))
    if nats_url is not None:
        from groupwise.jobs.fleet.notify.nats import NatsDoorbell, access_from

        doorbells.append(NatsDoorbell(access_from(nats_url, environment)))
    return SeveralDoorbells(doorbells)


def ring_and_leave(doorbell: Doorbell, job_ids: Iterable[str]) -> None:
    """For a command that ends right after: ring, and give what is sent a moment to go out."""

    async def ring() -> None:
        doorbell.ring(job_ids)
        await doorbell.close()

    asyncio.run(ring())
