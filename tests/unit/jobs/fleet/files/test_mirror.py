import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from groupwise.jobs.fleet.attempts.controller import MemberOutput
from groupwise.jobs.fleet.attempts.effects import Death, Gateway, Side
from groupwise.jobs.fleet.attempts.records import Stale
from groupwise.jobs.fleet.files.clearing import clear_away
from groupwise.jobs.fleet.files.mirror import CheckpointMirror
from groupwise.jobs.fleet.operations import status
from groupwise.jobs.fleet.operations.actor import Actor
from groupwise.jobs.fleet.store import rights
from groupwise.jobs.fleet.store.database import Database
from groupwise.jobs.fleet.store.tables import Attempt, Checkpoint, Event
from groupwise.jobs.hosts.files import SPARED_MARKED, BlobStore
from groupwise.jobs.hosts.host import RunnerRefused, RunnerResponse
from groupwise.jobs.hosts.spec import FileEntry
from tests.unit.jobs.fleet.work_folder import WorkFolder, begin


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


@pytest.fixture
def host() -> WorkFolder:
    return WorkFolder()


def rows(database: Database) -> list[Checkpoint]:
    return database.run(lambda s: list(s.scalars(select(Checkpoint).order_by(Checkpoint.step))))


def steps(database: Database) -> list[int]:
    return [row.step for row in rows(database)]


async def test_the_newest_complete_one_comes_and_only_what_is_new_of_it(
    database: Database, store: BlobStore, host: WorkFolder
) -> None:
    output = begin(database, host)
    mirror = CheckpointMirror(store, Gateway(database))
    host.checkpoint("outputs/c-10", 10, weights=b"w" * 100, config=b"same")
    host.checkpoint("outputs/c-20", 20, weights=b"v" * 100, config=b"same")
    await mirror.mirror(output)
    [row] = rows(database)
    assert (row.step, row.path, row.generation, row.epoch) == (20, "outputs/c-20", 0, output.epoch)
    for path, listed in row.manifest.items():
        assert store.read(FileEntry(*listed).sha256) == host.files[path]
    assert host.read_bytes() == 100 + len("same") + len("20")
    host.checkpoint("outputs/c-30", 30, weights=b"u" * 100, config=b"same")
    host.asked.clear()
    await mirror.mirror(output)
    assert host.read_bytes() == 100 + len("30")
    assert steps(database) == [20, 30]
    host.asked.clear()
    await mirror.mirror(output)
    assert host.read_bytes() == 0


class LaterStore(BlobStore):
    """One of which the clock can be ahead."""

    ahead = 0.0

    def now(self) -> float:
        return super().now() + self.ahead


@pytest.fixture
def later(tmp_path: Path) -> LaterStore:
    return LaterStore(tmp_path / "blobs")


@pytest.mark.parametrize(
    ("at", "side"),
    [("checkpoint.piece", "after"), ("checkpoint.blob", "before"), ("checkpoint.row", "before")],
)
async def test_blobs_that_a_mirror_needs_survive_a_collection(
    database: Database, later: LaterStore, host: WorkFolder, at: str, side: Side
) -> None:
    """Also what another checkpoint had that is kept no more."""
    output = begin(database, host)
    host.checkpoint("outputs/c-10", 10, one=b"same", two=b"10")
    await CheckpointMirror(later, Gateway(database), keep=1).mirror(output)
    collected = list[int]()

    def then_somebody_collects(name: str, when: Side) -> None:
        if (name, when) == (at, side):
            later.ahead += 2 * SPARED_MARKED
            collected.append(clear_away(database, later, ()))

    host.checkpoint("outputs/c-20", 20, three=b"new", one=b"same", four=b"also")
    slow = CheckpointMirror(later, Gateway(database, then_somebody_collects), keep=1)
    await slow.mirror(output)
    assert steps(database) == [20]
    assert collected
    for row in rows(database):
        assert all(listed[0] in later for listed in row.manifest.values())


async def test_a_manifest_that_names_the_file_of_another_project_does_not_get_it(
    database: Database, store: BlobStore, host: WorkFolder
) -> None:
    """It is written by the job, which may say anything."""
    output = begin(database, host)
    others = store.put(b"of others")
    database.run(lambda s: rights.record(s, {(others, "others")}))
    host.checkpoint("outputs/c-10", 10, weights=b"of others")
    host.files["outputs/c-10/weights"] = b"unrelated"
    mirror = CheckpointMirror(store, Gateway(database))
    await mirror.mirror(output)
    assert steps(database) == []
    assert store.read(others) == b"of others"
    host.files["outputs/c-10/weights"] = b"of others"
    await mirror.mirror(output)
    assert steps(database) == [10]


@pytest.mark.parametrize("torn", ["changed", "gone", "short"])
async def test_a_torn_one_is_skipped(
    torn: str, database: Database, store: BlobStore, host: WorkFolder
) -> None:
    output = begin(database, host)
    mirror = CheckpointMirror(store, Gateway(database))
    host.checkpoint("outputs/c-10", 10, weights=b"good")
    host.checkpoint("outputs/c-20", 20, weights=b"bad!")
    if torn == "gone":
        del host.files["outputs/c-20/weights"]
    else:
        host.files["outputs/c-20/weights"] = b"BAD!" if torn == "changed" else b"ba"
    await mirror.mirror(output)
    assert steps(database) == [10]
    host.files["outputs/c-20/weights"] = b"bad!"
    await mirror.mirror(output)
    assert steps(database) == [10, 20]


# --- of which somebody is told


def reported_reasons(database: Database) -> list[str]:
    """What the events say."""
    kind = "job.checkpoint_not_mirrored"
    said = database.run(lambda s: list(s.scalars(select(Event.detail).where(Event.kind == kind))))
    return [each["why"] for each in said if each is not None]


def alarms(database: Database) -> list[str]:
    found = database.read(lambda s: list(status.alarms(s, Actor("user:test")))) or []
    return [each["message"] for each in found if each["kind"] == "checkpoint_not_mirrored"]


async def test_a_checkpoint_that_is_too_large_is_reported_until_another_comes(
    database: Database, tmp_path: Path, host: WorkFolder
) -> None:
    """Not even its other files are fetched."""
    output = begin(database, host)
    mirror = CheckpointMirror(BlobStore(tmp_path / "blobs", largest=50), Gateway(database))
    for step in (10, 20):
        host.checkpoint(f"outputs/c-{step}", step, config=b"small", weights=b"w" * 100)
        await mirror.mirror(output)
        assert (steps(database), host.read_bytes()) == ([], 0)
    (why,) = reported_reasons(database)
    assert why.startswith("outputs/c-10 is not mirrored: outputs/c-10/weights: ")
    assert "100 bytes; at most 50" in why
    (alarm,) = alarms(database)
    assert "outputs/c-20" in alarm
    host.checkpoint("outputs/c-30", 30, weights=b"w" * 10)
    await mirror.mirror(output)
    assert (steps(database), alarms(database), len(reported_reasons(database))) == ([30], [], 1)


class Hasty(WorkFolder):
    """Its job removes a checkpoint before it has been read, while it is hasty."""

    hasty = True

    def _read(self, body: Any) -> RunnerResponse:
        if self.hasty:
            self.checkpoints.clear()
            raise RunnerRefused("not_found", f"{body['path']} is not there")
        return super()._read(body)


async def test_a_checkpoint_that_does_not_fit_on_the_disk_is_not_fetched(
    database: Database, store: BlobStore, host: WorkFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = begin(database, host)
    host.checkpoint("outputs/c-10", 10, weights=b"w" * 100)
    host.asked.clear()
    for free, come in ((150, []), (152, [10])):
        usage = SimpleNamespace(total=1000, free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda _, usage=usage: usage)
        await CheckpointMirror(store, Gateway(database)).mirror(output)
        assert steps(database) == come
        assert bool(host.read_bytes()) == bool(come)
    assert "5% of the control machine's disk" in reported_reasons(database)[0]


async def test_checkpoints_that_vanish_before_they_are_fetched_are_reported(
    database: Database, store: BlobStore
) -> None:
    """One now and then is how many trainers do it."""
    host = Hasty()
    output, mirror = begin(database, host), CheckpointMirror(store, Gateway(database))
    for step in range(10, 90, 10):
        host.hasty = step != 30
        host.checkpoint(f"outputs/c-{step}", step, weights=b"w")
        await mirror.mirror(output)
        assert len(reported_reasons(database)) == int(step >= 60)
    assert steps(database) == [30]
    assert "c-60 is not mirrored: it" in reported_reasons(database)[0]
    host.hasty = False
    host.checkpoint("outputs/c-90", 90, weights=b"w")
    await mirror.mirror(output)
    assert (steps(database), alarms(database)) == ([30, 90], [])


SOAK, SOAK_DEATHS = pytest.mark.soak(suite="fleet"), (1, 3, 7, 9, 13, 15)


@pytest.mark.parametrize("death", [5, 11, *(pytest.param(n, marks=SOAK) for n in SOAK_DEATHS)])
async def test_dying_at_any_effect_leaves_no_row_without_its_blobs(
    death: int, database: Database, store: BlobStore, host: WorkFolder
) -> None:
    output = begin(database, host)
    host.checkpoint("outputs/c-10", 10, one=b"1" * 100, two=b"2" * 100)
    effects = 0

    def hook(name: str, side: Side) -> None:
        nonlocal effects
        effects += 1
        if effects == death:
            raise Death

    with pytest.raises(Death):
        await CheckpointMirror(store, Gateway(database, hook)).mirror(output)
    for row in rows(database):
        assert all(listed[0] in store for listed in row.manifest.values())
    await CheckpointMirror(store, Gateway(database)).mirror(output)
    assert steps(database) == [10]


async def test_only_the_leader_of_a_gang_mirrors_checkpoints(
    database: Database, store: BlobStore, host: WorkFolder
) -> None:
    output = begin(database, host, rank=1)
    host.checkpoint("outputs/c-10", 10, weights=b"x")
    await CheckpointMirror(store, Gateway(database)).mirror(output)
    assert (host.asked, steps(database)) == ([], [])


@pytest.mark.parametrize("generation", [0, 1])
async def test_a_job_that_started_again_keeps_what_it_does_now(
    database: Database, store: BlobStore, host: WorkFolder, generation: int
) -> None:
    """Its own went as they came, because an earlier attempt had been further."""
    mirror = CheckpointMirror(store, Gateway(database))
    first = begin(database, host)
    for step in (990, 1000):
        host.checkpoint(f"outputs/c-{step}", step, weights=b"old")
        await mirror.mirror(first)
    host.checkpoints.clear()
    second = replace(begin(database, host), generation=generation)
    for step, left in ((100, [100, 1000]), (200, [100, 200]), (300, [200, 300])):
        host.checkpoint(f"outputs/c-{step}", step, weights=b"new")
        await mirror.mirror(second)
        assert steps(database) == left


async def test_a_checkpoint_handed_to_the_next_attempt_keeps_its_time(
    database: Database, store: BlobStore, host: WorkFolder
) -> None:
    mirror = CheckpointMirror(store, Gateway(database))
    host.checkpoint("outputs/c-10", 10, weights=b"x")
    await mirror.mirror(begin(database, host))
    database.run(lambda s: s.execute(update(Checkpoint).values(mirrored_at=5.0)))
    second = begin(database, host)
    await mirror.mirror(second)
    assert [(row.epoch, row.mirrored_at) for row in rows(database)][-1] == (second.epoch, 5.0)
    host.checkpoints.clear()
    host.checkpoint("outputs/c-10", 10, weights=b"another")
    await mirror.mirror(begin(database, host))
    assert max(row.mirrored_at for row in rows(database)) > 5.0


async def test_a_former_owner_of_the_attempt_records_no_checkpoint(
    database: Database, store: BlobStore, host: WorkFolder
) -> None:
    output: MemberOutput = begin(database, host)
    host.checkpoint("outputs/c-10", 10, weights=b"x")

    def taken(session: Session) -> None:
        session.get_one(Attempt, output.epoch).owner = "another"

    database.run(taken)
    with pytest.raises(Stale):
        await CheckpointMirror(store, Gateway(database)).mirror(output)
    assert steps(database) == []


async def test_damaged_checkpoints_are_removed_before_complete_ones(
    database: Database, store: BlobStore, host: WorkFolder
) -> None:
    mirror = CheckpointMirror(store, Gateway(database))
    for step in (80, 90):
        host.checkpoint(f"outputs/c-{step}", step, weights=str(step).encode())
        await mirror.mirror(begin(database, host))
    database.run(lambda s: s.execute(update(Checkpoint).values(damaged_at=1.0)))
    host.checkpoints.clear()
    for step in (5, 6):
        host.checkpoint(f"outputs/c-{step}", step, weights=str(step).encode())
        await mirror.mirror(begin(database, host))
    assert steps(database) == [5, 6]
