"""Files that nothing refers to are removed, others stay, and a crash at any instant changes nothing of that."""

import os
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from groupwise.jobs.fleet.files import clearing
from groupwise.jobs.fleet.files.clearing import clear_away, named_blobs
from groupwise.jobs.fleet.operations import prune
from groupwise.jobs.fleet.operations.actor import Actor
from groupwise.jobs.fleet.store import events, rights
from groupwise.jobs.fleet.store.database import Database, database_time
from groupwise.jobs.fleet.store.tables import (
    GPU,
    VM,
    Attempt,
    BlobRight,
    Checkpoint,
    GPUHistory,
    Job,
)
from groupwise.jobs.hosts.files import SPARED, BlobStore
from groupwise.jobs.hosts.spec import FileEntry, JobSpec, as_json
from tests.meanwhile import right_before
from tests.unit.jobs.fleet.work_folder import JOB, WorkFolder, begin, entry

ADA = Actor("user:ada")


class Death(BaseException):
    """The process ends here."""


class Disk:
    """A control machine: a store, logs, artefacts."""

    def __init__(self, folder: Path, database: Database) -> None:
        self.store = BlobStore(folder / "blobs")
        self.logs, self.artefacts = folder / "logs", folder / "artefacts"
        self.database = database

    @property
    def folders(self) -> tuple[Path, Path]:
        return self.logs, self.artefacts

    def blob(self, data: bytes, *, old: bool = True) -> str:
        sha256 = self.store.put(data)
        if old:
            long_ago = self.store.now() - 2 * SPARED
            os.utime(self.store.path(sha256), (long_ago, long_ago))
        return sha256

    def job(self, job_id: str, **files: str) -> None:
        """One that has ended, with such files, a log and artefacts."""
        listed = {name: FileEntry(sha256, 0o644, 1) for name, sha256 in files.items()}
        spec = as_json(JobSpec(("true",), files=listed))

        def write(session: Session) -> None:
            session.add(Job(job_id=job_id))
            session.flush()
            session.get_one(Job, job_id).spec = spec
            for status in ("running", "completed"):
                session.get_one(Job, job_id).status = status
                session.flush()

        self.database.run(write)
        for folder in (self.logs / job_id, self.artefacts / job_id / "1"):
            folder.mkdir(parents=True)
            (folder / "1.log").write_text("x")
        (self.logs / f"{job_id}.log").symlink_to(f"{job_id}/1.log")

    def clear(self) -> int:
        return clear_away(self.database, self.store, self.folders)

    def prune(self) -> Any:
        return prune.clear_away(self.database, self.store, self.folders, ADA, 0.0)

    def check(self) -> None:
        """No row is without its files."""
        for sha256 in self.database.read(named_blobs) or ():
            assert sha256 in self.store
        for job_id in self.database.read(lambda s: list(s.scalars(select(Job.job_id)))):
            for path in (self.logs / job_id / "1.log", self.artefacts / job_id / "1" / "1.log"):
                assert path.exists()

    def left(self) -> set[str]:
        names = {path.name for folder in self.folders for path in folder.iterdir()}
        return names | {path.name for path in self.store.root.glob("??/*")}


def rights_of(database: Database) -> set[tuple[str, str]]:
    query = select(BlobRight.sha256, BlobRight.project)
    return database.run(lambda s: {(sha256, project) for sha256, project in s.execute(query)})


@pytest.fixture
def disk(tmp_path: Path, database: Database) -> Disk:
    return Disk(tmp_path, database)


def test_only_what_nothing_names_goes(disk: Disk) -> None:
    shared, own, free, young = (disk.blob(data) for data in (b"s", b"own", b"free!", b"young"))
    disk.blob(b"young", old=False)
    disk.job("one", shared=shared, own=own)
    disk.job("two", shared=shared)
    assert disk.clear() == len(b"free!")
    assert free not in disk.store
    disk.check()
    disk.database.run(lambda s: prune.remove(s, ADA, ["one"]))
    assert disk.clear() == len(b"own")
    assert disk.left() == {"two", "two.log", shared, young}
    disk.check()


def age(database: Database) -> None:
    """All rights are two days old."""
    write = update(BlobRight).values(at=BlobRight.at - 2 * SPARED)
    database.run(lambda s: s.execute(write))


def test_a_right_to_what_is_sent_again_while_it_is_cleared_away_stays(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.job("one")
    sha256 = disk.blob(b"again")
    given = {(sha256, "red"), (sha256, "blue")}
    disk.database.run(lambda s: rights.record(s, given))
    age(disk.database)
    forget = rights.forget

    def late(session: Session, hashes: Sequence[str], age: float) -> None:
        disk.store.put(b"again")
        rights.record(session, {(sha256, "red")})
        forget(session, hashes, age)

    monkeypatch.setattr(rights, "forget", late)
    disk.clear()
    assert sha256 in disk.store
    assert rights_of(disk.database) == {(sha256, "red")}


def test_a_job_that_was_submitted_again_under_its_id_keeps_its_files(disk: Disk) -> None:
    """So does what has no row and was not pruned: the database may have been set back, or be another one."""
    disk.job("one")
    disk.prune()
    disk.job("one")
    (disk.logs / "unknown").mkdir()
    (disk.logs / "not an id").mkdir()
    disk.clear()
    disk.check()
    assert {"unknown", "not an id", "one"} <= disk.left()


def test_no_blob_is_collected_while_the_database_has_never_had_a_job(disk: Disk) -> None:
    blob = disk.blob(b"somebody's")
    assert disk.clear() == 0
    assert blob in disk.store
    disk.job("one", own=disk.blob(b"its"))
    assert disk.prune()["jobs"] == ["one"]
    assert disk.left() == set(), "the last job was cleared away"


def test_one_process_at_a_time_collects(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    disk.blob(b"free")
    disk.job("one")
    inside, go_on = threading.Event(), threading.Event()

    def slowly(session: Session) -> set[str] | None:
        inside.set()
        assert go_on.wait(60)
        return named_blobs(session)

    monkeypatch.setattr(clearing, "named_blobs", slowly)
    freed: list[int] = []
    other = threading.Thread(target=lambda: freed.append(disk.clear()))
    other.start()
    assert inside.wait(60)
    assert clear_away(disk.database, BlobStore(disk.store.root), disk.folders) == 0
    go_on.set()
    other.join(60)
    assert freed == [len(b"free")]


def test_blobs_added_during_a_collection_stay(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the collection takes: the next one may be a day later."""
    disk.job("one")
    put: list[str] = []

    def then_somebody_writes(session: Session) -> set[str] | None:
        named = named_blobs(session)
        put.append(disk.blob(b"new", old=False))
        later = disk.store.now() + 3 * SPARED
        monkeypatch.setattr(BlobStore, "now", lambda store: later)
        return named

    monkeypatch.setattr(clearing, "named_blobs", then_somebody_writes)
    disk.clear()
    assert put[0] in disk.store


def die_at(death: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every removal is an instant at which the process may end, before and after."""
    done: list[str] = []

    def deadly(remove: Callable[..., Any], name: str) -> Callable[..., Any]:
        def removing(*args: Any, **kwargs: Any) -> Any:
            for side in ("before", "after"):
                if len(done) == death:
                    raise Death
                done.append(f"{side} {name}")
                if side == "before":
                    remove(*args, **kwargs)

        return removing

    monkeypatch.setattr(Path, "unlink", deadly(Path.unlink, "unlink"))
    monkeypatch.setattr(shutil, "rmtree", deadly(shutil.rmtree, "rmtree"))
    monkeypatch.setattr(prune, "AT_ONCE", 1)
    monkeypatch.setattr(prune, "remove", deadly_verb(prune.remove, death, done))
    return done


def deadly_verb(
    verb: Callable[..., list[str]], death: int, done: list[str]
) -> Callable[..., list[str]]:
    def removing(session: Session, actor: Actor, job_ids: Sequence[str]) -> list[str]:
        if len(done) == death:
            raise Death
        done.append("rows")
        return verb(session, actor, job_ids)

    return removing


STEPS = 20
"""Of the two jobs below: rows, and before and after each removal."""


SOAK = pytest.mark.soak(suite="fleet")
OFTEN = (1, 6, 13, STEPS)


@pytest.mark.parametrize(
    "death",
    [*OFTEN, *(pytest.param(n, marks=SOAK) for n in range(STEPS) if n not in OFTEN)],
)
def test_dying_at_any_instant_leaves_no_row_without_its_files(
    disk: Disk, death: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, one, two = (disk.blob(data) for data in (b"shared", b"one", b"two"))
    kept = disk.blob(b"kept")
    disk.job("one", shared=shared, one=one)
    disk.job("two", shared=shared, two=two)

    def wait(session: Session) -> None:
        spec = as_json(JobSpec(("true",), files={"f": FileEntry(kept, 0o644, 4)}))
        session.add(Job(job_id="waits"))
        session.flush()
        session.get_one(Job, "waits").spec = spec

    disk.database.run(wait)
    for folder in (disk.logs / "waits", disk.artefacts / "waits" / "1"):
        folder.mkdir(parents=True)
        (folder / "1.log").write_text("x")
    with monkeypatch.context() as patched:
        done = die_at(death, patched)
        if death < STEPS:
            with pytest.raises(Death):
                disk.prune()
        else:
            disk.prune()
            assert len(done) == STEPS
    disk.check()
    assert disk.prune()["dry_run"] is False
    disk.check()
    assert disk.left() == {"waits", kept}


def test_a_week_of_each_gpu_is_kept_of_machines_that_have_left_too(disk: Disk) -> None:
    now = int(disk.database.read(database_time) // 60)
    old, young = now - clearing.HISTORY_MINUTES - 2, now - clearing.HISTORY_MINUTES + 2

    def write(session: Session) -> None:
        for vm_id, active in (("here", True), ("removed", False)):
            session.add(VM(vm_id=vm_id, active=active))
            session.flush()
            for index in range(clearing.GPUS_AT_ONCE):
                session.add(GPU(vm_id=vm_id, index=index, uuid=f"{vm_id}-{index}"))
        session.flush()
        for gpu_id in session.scalars(select(GPU.gpu_id)):
            session.add_all([GPUHistory(gpu_id=gpu_id, minute=each) for each in (old, young, now)])

    disk.database.run(write)
    disk.clear()
    lines = select(GPUHistory.minute, func.count()).group_by(GPUHistory.minute)
    gpus = 2 * clearing.GPUS_AT_ONCE
    kept = disk.database.read(lambda s: dict(s.execute(lines).all()))
    assert kept == {young: gpus, now: gpus}


# --- what is named --------------------------------------------------------------------------------


def test_blobs_that_jobs_or_attempts_need_are_named(database: Database) -> None:
    part = begin(database, WorkFolder())
    words = ("file", "resume", "smaller", "checkpoint", "waiting")
    file, resume, smaller, checkpoint, waiting = (entry(word.encode()) for word in words)

    def spec(listed: list[Any]) -> dict[str, Any]:
        return as_json(JobSpec(("true",), files={"x": FileEntry(*listed)}))

    def write(session: Session) -> None:
        session.get_one(Job, JOB).spec = spec(file)
        attempt = session.get_one(Attempt, part.epoch)
        attempt.resume_from = {"step": 1, "manifest": {"c": resume}}
        attempt.spec = spec(smaller)
        about = {"job_id": JOB, "generation": 0, "epoch": part.epoch, "path": "c", "step": 1}
        session.add(Checkpoint(**about, manifest={"c": checkpoint}, mirrored_at=0.0))
        session.add(Job(job_id="by-hand", request={"files": {"x": waiting, "y": 3}}))

    database.run(write)
    listed = (file, resume, smaller, checkpoint, waiting)
    assert database.read(named_blobs) == {each[0] for each in listed}
    ended = update(Attempt).values(state="ended", outcome="void")
    database.run(lambda s: s.execute(ended))
    assert database.read(named_blobs) == {each[0] for each in (file, checkpoint, waiting)}


def test_pruning_is_what_the_events_say(database: Database) -> None:
    def write(session: Session) -> None:
        events.append(session, actor="x", kind=events.JOB_PRUNED, job_id="gone")
        events.append(session, actor="x", kind=events.JOB_FAILED, job_id="lost")

    database.run(write)
    names = ["gone", "lost", *(f"job-{n}" for n in range(2500))]
    assert database.read(lambda s: clearing.pruned_jobs(s, names)) == ["gone"]


def test_files_that_another_prune_removes_while_they_are_measured_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / JOB / "1" / "out"
    folder.mkdir(parents=True)
    (tmp_path / JOB / "1" / "w").write_bytes(b"1" * 4096)
    right_before(monkeypatch, os, "scandir", folder.rmdir, lambda path: str(path) == str(folder))
    assert clearing.size_of_files([tmp_path], JOB) >= 4096
    assert not folder.exists()
