"""Transactions that share one: nobody suffers for another, and nobody is half done."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from groupwise.fleet.attempts import ending, records
from groupwise.fleet.attempts.decide import Move
from groupwise.fleet.attempts.together import Gathered, Reads, Writes
from groupwise.fleet.queue import claim
from groupwise.fleet.states import AttemptState, Outcome
from groupwise.fleet.store import events
from groupwise.fleet.store.database import CommitUnknown, Database
from groupwise.fleet.store.tables import VM, Attempt, Event
from groupwise.hosts.failures import FailureClass
from tests.fleet_rig import NoChance, Rig

REFUSED = Move(
    AttemptState.ENDED, Outcome.FAILED, FailureClass.LAUNCH_FAILURE, "why",
    {"rank": 0, "members": [{"rank": 0, "vm": "a", "refusal": "io: no space"}]},
)  # fmt: skip


@pytest.fixture
def rig(database: Database, tmp_path: Path) -> Rig:
    return Rig(database, tmp_path, {"a": [f"GPU-{n}" for n in range(8)]})


@pytest.fixture
def epochs(rig: Rig) -> list[int]:
    for number in range(4):
        rig.submit(f"job-{number}")
    made = rig.database.run(lambda s: claim.claim(s, owner="me", lease_seconds=30.0, limit=8).made)
    return [each.epoch for each in made]


def launching(epoch: int, owner: str = "me") -> Callable[[Session], None]:
    return lambda session: records.move(session, epoch, owner, AttemptState.LAUNCHING)


async def end(rig: Rig, epochs: Sequence[int], move: Move) -> None:
    """All of them, at the same moment."""

    def written(epoch: int) -> Callable[[Session], None]:
        return lambda session: ending.end(session, epoch, "me", move, NoChance())

    writes = Writes(rig.database)
    await asyncio.gather(*(writes.commit(each, written(each), ends=True) for each in epochs))


def states(rig: Rig) -> dict[int, str]:
    return rig.database.read(lambda s: dict(s.execute(select(Attempt.epoch, Attempt.state)).all()))


def counted(database: Database, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for each transaction that writes."""
    begun: list[None] = []
    real = database.run

    def run(fn: Callable[[Session], Any]) -> Any:
        begun.append(None)
        return real(fn)

    monkeypatch.setattr(database, "run", run)
    return begun


async def test_those_of_a_moment_share_a_transaction(
    rig: Rig, epochs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    writes, begun = Writes(rig.database), counted(rig.database, monkeypatch)
    await asyncio.gather(*(writes.commit(each, launching(each)) for each in epochs))
    assert set(states(rig).values()) == {"launching"}
    assert len(begun) == 1
    query = select(Event.epoch).where(Event.kind == "attempt.launching").order_by(Event.event_id)
    assert list(rig.database.read(lambda s: s.scalars(query).all())) == epochs


async def test_a_machine_that_refuses_many_at_once_is_told_of_each(
    rig: Rig, epochs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    transactions = counted(rig.database, monkeypatch)
    await end(rig, epochs, REFUSED)
    assert len(transactions) == 1
    query = select(VM.launch_failures, VM.cordoned)
    failures, cordoned = rig.database.read(lambda s: s.execute(query).one())
    assert failures == len(epochs)
    assert cordoned is not None


async def test_who_is_refused_is_refused_alone(rig: Rig, epochs: list[int]) -> None:
    writes = Writes(rig.database)
    told = await asyncio.gather(
        writes.commit(epochs[0], launching(epochs[0])),
        writes.commit(epochs[1], launching(epochs[1], owner="another")),
        writes.commit(epochs[2], launching(epochs[2])),
        return_exceptions=True,
    )
    assert isinstance(told[1], records.Stale)
    assert (told[0], told[2]) == (None, None)
    expected = ["launching", "reserved", "launching", "reserved"]
    assert [states(rig)[each] for each in epochs] == expected


async def test_what_refuses_alone_leaves_no_event_behind(rig: Rig, epochs: list[int]) -> None:
    def broken(session: Session) -> None:
        launching(epochs[0])(session)
        raise ZeroDivisionError

    writes = Writes(rig.database)
    told = await asyncio.gather(
        writes.commit(epochs[0], broken),
        writes.commit(epochs[1], launching(epochs[1])),
        return_exceptions=True,
    )
    assert isinstance(told[0], ZeroDivisionError)
    said = rig.database.run(lambda s: [e.epoch for e in events.after(s, 0, 99) if e.kind == "attempt.launching"])  # fmt: skip
    assert said == [epochs[1]]


async def test_a_commit_without_an_answer_is_said_to_all_and_done_again_by_nobody(
    rig: Rig, epochs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[None] = []

    def lost(fn: Any) -> Any:
        begun.append(None)
        raise CommitUnknown("no answer")

    monkeypatch.setattr(rig.database, "run", lost)
    writes = Writes(rig.database)
    work = (writes.commit(each, launching(each)) for each in epochs)
    told = await asyncio.gather(*work, return_exceptions=True)
    assert [type(each) for each in told] == [CommitUnknown] * 4
    assert len(begun) == 1


async def test_who_cannot_be_read_stops_nobody(rig: Rig, epochs: list[int]) -> None:
    def read(session: Session, asked: Sequence[int]) -> dict[int, records.Snapshot]:
        if epochs[0] in asked:
            raise ValueError("a row that makes no sense")
        return records.snapshots(session, asked, "me")

    reads = Reads(rig.database, read)
    told = await asyncio.gather(*map(reads.look, [*epochs, 999]), return_exceptions=True)
    assert isinstance(told[0], ValueError)
    assert [each.epoch for each in told[1:4] if isinstance(each, records.Snapshot)] == epochs[1:]
    assert told[4] is None


async def test_who_is_cancelled_is_held_until_it_is_over() -> None:
    go, dealt = asyncio.Event(), list[int]()

    async def deal(asked: Sequence[int]) -> Sequence[int]:
        await go.wait()
        dealt.extend(asked)
        return asked

    gathered = Gathered[int, int](deal)
    first = asyncio.create_task(gathered.ask(1))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    second = asyncio.create_task(gathered.ask(2))
    await asyncio.sleep(0)
    for task in (first, second):
        task.cancel()
    await asyncio.wait({second})
    assert not first.done(), "its write is under way"
    go.set()
    await asyncio.wait({first})
    assert (first.cancelled(), second.cancelled(), dealt) == (True, True, [1])
