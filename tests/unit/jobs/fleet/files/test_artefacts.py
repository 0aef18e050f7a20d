import asyncio
import fcntl
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from groupwise.jobs.fleet.attempts.controller import Collected, MemberOutput
from groupwise.jobs.fleet.attempts.effects import Death, Gateway, Side
from groupwise.jobs.fleet.files import artefacts
from groupwise.jobs.fleet.files.artefacts import Collector, artefact_folder, record_of
from groupwise.jobs.fleet.store import rights
from groupwise.jobs.fleet.store.database import Database
from groupwise.jobs.hosts import driver, fetching
from groupwise.jobs.hosts.files import BlobStore
from groupwise.jobs.hosts.host import HostUnreachable, RunnerResponse
from groupwise.jobs.hosts.spec import Limits
from tests.disks import fill, small_disk
from tests.unit.jobs.fleet.work_folder import JOB, WorkFolder, begin

FILES = {
    "outputs/model.bin": bytes(range(95)),
    "outputs/empty": b"",
    "outputs/deep/er/x.json": b"{}",
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "artefacts"


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> WorkFolder:
    made = WorkFolder()
    made.files = dict(FILES)
    return made


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if files were large."""
    plain = driver.Runner.read

    async def read(
        self: driver.Runner, job: str, epoch: int, path: str, *, offset: int = 0
    ) -> bytes:
        return await plain(self, job, epoch, path, offset=offset, limit=5)

    monkeypatch.setattr(driver.Runner, "read", read)
    monkeypatch.setattr(fetching, "PIECE", 5)


def collector(place: Path, database: Database) -> Collector:
    return Collector(place, BlobStore(place.parent / "blobs"), Gateway(database))


def tree(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }


def names(place: Path) -> set[str]:
    return {p.name for p in (place / JOB).iterdir()}


async def test_all_output_files_are_collected_unchanged(
    database: Database, place: Path, host: WorkFolder
) -> None:
    output = begin(database, host)
    assert await collector(place, database).collect(output) == Collected()
    folder = artefact_folder(place, JOB, output.epoch)
    assert tree(folder) == tree(place / JOB / "current") == FILES
    assert json.loads(record_of(folder).read_text())["files"].keys() == FILES.keys()
    assert names(place) == {str(output.epoch), f"{output.epoch}.json", "current"}
    asked = len(host.asked)
    assert await collector(place, database).collect(output) == Collected()
    assert len(host.asked) == asked


async def test_current_is_the_newest_and_other_ranks_stand_beside(
    database: Database, place: Path, host: WorkFolder
) -> None:
    old, new, second = begin(database, host), begin(database, host), begin(database, host, rank=1)
    for output in (new, old, second):
        assert await collector(place, database).collect(output) == Collected()
    assert (place / JOB / "current").readlink() == Path(str(new.epoch))
    assert tree(place / JOB / f"{second.epoch}.1") == FILES


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("calls", [1, 8])
async def test_a_fetch_that_was_cut_off_continues(
    calls: int, database: Database, place: Path, host: WorkFolder
) -> None:
    output = begin(database, host)
    host.cut_after = calls
    with pytest.raises(HostUnreachable):
        await collector(place, database).collect(output)
    assert not artefact_folder(place, JOB, output.epoch).exists()
    host.cut_after = None
    assert await collector(place, database).collect(output) == Collected()
    assert tree(artefact_folder(place, JOB, output.epoch)) == FILES
    assert host.read_bytes() == sum(map(len, FILES.values()))


SOAK = pytest.mark.soak(suite="fleet")
SOAK_DEATHS = (1, 4, 7, 13, 16, 19, 22, 25, 31, 34, 37)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("death", [10, 28, *(pytest.param(n, marks=SOAK) for n in SOAK_DEATHS)])
async def test_a_crash_at_any_effect_leaves_a_state_from_which_another_continues(
    death: int, database: Database, place: Path, host: WorkFolder
) -> None:
    output = begin(database, host)
    effects = 0

    def hook(name: str, side: Side) -> None:
        nonlocal effects
        effects += 1
        if effects == death:
            raise Death

    dying = Collector(place, BlobStore(place.parent / "blobs"), Gateway(database, hook))
    with pytest.raises(Death):
        await dying.collect(output)
    assert await collector(place, database).collect(output) == Collected()
    assert tree(place / JOB / "current") == FILES
    assert names(place) == {str(output.epoch), f"{output.epoch}.json", "current"}


@pytest.mark.parametrize("torn", [50, 95])
async def test_partial_files_of_an_earlier_collection_are_fetched_again(
    torn: int, database: Database, place: Path, host: WorkFolder
) -> None:
    output = begin(database, host)
    partial = place / JOB / f".{output.epoch}.partial" / "outputs"
    partial.mkdir(parents=True)
    (partial / "model.bin").write_bytes(bytes(torn))
    (partial / "empty").write_bytes(b"not empty")
    (partial / "foreign").write_bytes(b"of another list")
    assert await collector(place, database).collect(output) == Collected()
    assert tree(artefact_folder(place, JOB, output.epoch)) == FILES


async def test_links_and_pipes_are_left_out_and_listed(
    database: Database, place: Path, host: WorkFolder
) -> None:
    output = begin(database, host)
    host.refused = [["outputs/latest", "link"], ["outputs/pipe", "fifo"]]
    evil = dict.fromkeys(("../../escaped", "/tmp/escaped"), b"x")
    host.files |= evil
    assert await collector(place, database).collect(output) == Collected(left_out=4)
    folder = artefact_folder(place, JOB, output.epoch)
    assert tree(folder) == FILES
    left_out = {path for path, _ in json.loads(record_of(folder).read_text())["left_out"]}
    assert left_out == {"outputs/latest", "outputs/pipe", *evil}


@pytest.mark.parametrize(
    ("limits", "why"),
    [(Limits(artefact_files=2), "3 files"), (Limits(artefact_mb=0), r"model\.bin \(95 bytes\)")],
)
async def test_more_than_the_job_may_leave_is_not_fetched(
    limits: Limits, why: str, database: Database, place: Path, host: WorkFolder
) -> None:
    output = begin(database, host, limits=limits)
    problem = (await collector(place, database).collect(output)).problem
    assert problem is not None
    assert re.search(why, problem)
    assert host.read_bytes() == 0
    assert not artefact_folder(place, JOB, output.epoch).exists()


async def test_artefacts_that_would_fill_the_disk_are_not_fetched(
    database: Database, place: Path, host: WorkFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = begin(database, host)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=100, free=60))
    problem = (await collector(place, database).collect(output)).problem
    assert problem is not None
    assert "5% of the control machine's disk" in problem
    assert host.read_bytes() == 0


@pytest.mark.parametrize("gone", [True, False])
async def test_a_file_that_never_is_what_the_list_says_is_a_problem(
    gone: bool, database: Database, place: Path, host: WorkFolder
) -> None:
    output = begin(database, host)
    listed = host._manifest

    def lie(body: object) -> RunnerResponse:
        host.files["outputs/model.bin"] = b"right"
        answer = listed(body)
        host.files["outputs/model.bin"] = b"wrong"
        if gone:
            del host.files["outputs/model.bin"]
        return answer

    host._manifest = lie  # type: ignore[method-assign]
    problem = (await collector(place, database).collect(output)).problem
    assert problem is not None
    assert "bin has been changed" in problem
    assert not artefact_folder(place, JOB, output.epoch).exists()


async def test_a_list_that_names_the_file_of_another_project_does_not_get_it(
    database: Database, place: Path, host: WorkFolder
) -> None:
    """The machine says which file it is, and its job writes where the machine keeps that."""
    output = begin(database, host)
    others = BlobStore(place.parent / "blobs").put(b"of others")
    database.run(lambda s: rights.record(s, {(others, "others")}))
    listed = host._manifest

    def lie(body: object) -> RunnerResponse:
        host.files = {"outputs/x": b"of others"}
        answer = listed(body)
        host.files = {"outputs/x": b"my zeros!"}
        return answer

    host._manifest = lie  # type: ignore[method-assign]
    assert "outputs/x has been changed" in str(await collector(place, database).collect(output))
    assert not artefact_folder(place, JOB, output.epoch).exists()


@pytest.mark.parametrize(
    ("home", "write"),
    [(fetching, "_missing_files"), (fetching, "_write_batch"), (artefacts, "_publish_folder")],
)
async def test_a_folder_is_given_up_when_nobody_writes_there_any_more(
    home: ModuleType,
    write: str,
    database: Database,
    place: Path,
    host: WorkFolder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread goes on when its task is cancelled; what it wrote then would be in the way of who fetches next."""
    output = begin(database, host)
    plain, begun, go_on = getattr(home, write), threading.Event(), threading.Event()

    def held(*asked: Any) -> Any:
        begun.set()
        assert go_on.wait(30)
        return plain(*asked)

    monkeypatch.setattr(home, write, held)
    task = asyncio.create_task(collector(place, database).collect(output))
    assert await asyncio.to_thread(begun.wait, 30)
    task.cancel()
    await asyncio.wait([task], timeout=0.1)
    with pytest.raises(BlockingIOError), lock_of(place / JOB / f".{output.epoch}.partial"):
        pass
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    monkeypatch.setattr(home, write, plain)
    assert await collector(place, database).collect(output) == Collected()
    assert tree(place / JOB / "current") == FILES


@contextmanager
def lock_of(folder: Path) -> Iterator[None]:
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)


async def test_a_full_disk_is_reported_and_can_be_mended(
    database: Database, tmp_path: Path, host: WorkFolder
) -> None:
    output: MemberOutput = begin(database, host)
    with small_disk(tmp_path / "disk", "1m") as disk:
        BlobStore(disk / "blobs")
        ballast = fill(disk)
        host.files["outputs/model.bin"] = bytes(300_000)
        with pytest.raises(OSError, match="No space left"):
            await collector(disk / "artefacts", database).collect(output)
        ballast.unlink()
        assert await collector(disk / "artefacts", database).collect(output) == Collected()
        assert (disk / "artefacts" / JOB / "current/outputs/model.bin").stat().st_size == 300_000
