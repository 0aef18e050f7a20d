"""Transactions that share one commit: no write fails because of another, and none is half done."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from groupwise.jobs.fleet.attempts import records
from groupwise.jobs.fleet.attempts.write_batching import (
    BatchedReads,
    BatchedWrites,
    Steps,
    in_steps,
    side_by_side,
)
from groupwise.jobs.fleet.queue import claim
from groupwise.jobs.fleet.states import AttemptState
from groupwise.jobs.fleet.store.database import CommitUnknown, Database
from groupwise.jobs.fleet.store.tables import Attempt, Project
from tests.in_process_fleet import InProcessFleet


@pytest.fixture
def fleet(database: Database, tmp_path: Path) -> InProcessFleet:
    return InProcessFleet(database, tmp_path, {"a": [f"GPU-{n}" for n in range(8)]})


@pytest.fixture
def epochs(fleet: InProcessFleet) -> list[int]:
    for number in range(4):
        fleet.submit(f"job-{number}")
    made = fleet.database.run(
        lambda s: claim.claim(s, owner="me", lease_seconds=30.0, limit=8).claimed
    )
    return [each.epoch for each in made]


def launching(epoch: int, owner: str = "me") -> Callable[[Session], None]:
    return lambda session: records.move(session, epoch, owner, AttemptState.LAUNCHING)


def states(fleet: InProcessFleet) -> dict[int, str]:
    return fleet.database.read(
        lambda s: dict(s.execute(select(Attempt.epoch, Attempt.state)).all())
    )


async def test_a_refused_write_does_not_fail_the_others_of_its_batch(
    fleet: InProcessFleet, epochs: list[int]
) -> None:
    writes = BatchedWrites(fleet.database)
    told = await asyncio.gather(
        writes.commit(epochs[0], launching(epochs[0])),
        writes.commit(epochs[1], launching(epochs[1], owner="another")),
        writes.commit(epochs[2], launching(epochs[2])),
        return_exceptions=True,
    )
    assert isinstance(told[1], records.Stale)
    assert (told[0], told[2]) == (None, None)
    expected = ["launching", "reserved", "launching", "reserved"]
    assert [states(fleet)[each] for each in epochs] == expected


async def test_an_unanswered_commit_is_reported_to_all_and_not_repeated(
    fleet: InProcessFleet, epochs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[None] = []

    def lost(fn: Any) -> Any:
        begun.append(None)
        raise CommitUnknown("no answer")

    monkeypatch.setattr(fleet.database, "run", lost)
    writes = BatchedWrites(fleet.database)
    work = (writes.commit(each, launching(each)) for each in epochs)
    told = await asyncio.gather(*work, return_exceptions=True)
    assert [type(each) for each in told] == [CommitUnknown] * 4
    assert len(begun) == 1


async def test_an_unreadable_attempt_does_not_fail_the_others_of_its_batch(
    fleet: InProcessFleet, epochs: list[int]
) -> None:
    def read(session: Session, asked: Sequence[int]) -> dict[int, records.Snapshot]:
        if epochs[0] in asked:
            raise ValueError("a row that makes no sense")
        return records.snapshots(session, asked, "me")

    reads = BatchedReads(fleet.database, read)
    told = await asyncio.gather(*map(reads.read, [*epochs, 999]), return_exceptions=True)
    assert isinstance(told[0], ValueError)
    assert [each.epoch for each in told[1:4] if isinstance(each, records.Snapshot)] == epochs[1:]
    assert told[4] is None


@in_steps
def two_steps(session: Session, name: str, told: list[str]) -> Steps:
    told.append(f"{name} 1")
    session.add(Project(name=name))
    yield None
    told.append(f"{name} 2")


@in_steps
def one_step(_: Session, name: str, told: list[str]) -> Steps:
    told.append(f"{name} 1")
    yield from ()


def test_a_step_of_all_comes_before_the_next_of_any(database: Database) -> None:
    told: list[str] = []

    def write(session: Session) -> None:
        with side_by_side(session):
            two_steps(session, "a", told)
            one_step(session, "b", told)
            two_steps(session, "c", told)
        two_steps(session, "d", told)

    database.run(write)
    assert told == ["a 1", "b 1", "c 1", "a 2", "c 2", "d 1", "d 2"]
