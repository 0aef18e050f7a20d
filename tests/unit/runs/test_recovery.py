"""What checkpoints contain of their run:

1. the newest one alone, copied elsewhere by its manifest, is a run again, with the whole record;
2. what it carries costs no disk, is hashed once, and is never changed;
3. whoever dies while a run is unpacked leaves what the next one can unpack.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from groupwise.core import atomic_files
from groupwise.core.errors import RunInUseError, RunNotFoundError
from groupwise.runs import checkpoints
from groupwise.runs.folder import RunFolder
from groupwise.runs.lock import RunLock
from groupwise.runs.record_segments import write_record_segment
from groupwise.runs.records import StepRecord
from groupwise.runs.recovery import add_run_files, recover_by_name, unpack
from groupwise.runs.store import Store


def save(folder: RunFolder, step: int) -> None:
    def fill(building: Path) -> None:
        (building / "weights").write_bytes(b"w" * step)
        write_record_segment(folder.path, folder.store.path, building, step)
        add_run_files(folder.path, building, step)

    checkpoints.save(folder.checkpoints, step, fill)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Six steps with checkpoints after 2, 4 and 6, of which the first is deleted."""
    with RunFolder.create(tmp_path / "old", "r", {"a": 1}, {"kind": "rl"}) as folder:
        (folder.path / "start").mkdir()
        (folder.path / "start/adapter").write_bytes(b"adapter")
        for step in range(6):
            record = StepRecord(step, step, step + 1, f"f{step}", (), 1e-5, 9.5, ())
            folder.store.commit_step(record, [], {"reward": step / 3})
            if step % 2:
                save(folder, step + 1)
        checkpoints.prune(folder.checkpoints, 2)
        return folder.path


def travel(run: Path, to: Path, *steps: int) -> Path:
    """What is sent by the manifests, and nothing else."""
    for found in checkpoints.complete(run / "checkpoints"):
        if found.step in steps:
            for name in (*found.files, "manifest.json"):
                place = to / "checkpoints" / found.path.name / name
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(found.path / name, place)
    return to


def record(run: Path) -> bytes:
    with Store.open(run / "run.db", readonly=True) as store:
        return store.deterministic_dump()


# 1


@pytest.mark.parametrize("steps", [(6,), (4, 6)])
def test_the_newest_alone_is_a_run_again(run: Path, tmp_path: Path, steps: tuple[int, ...]) -> None:
    new = travel(run, tmp_path / "new/r", *steps)
    made = recover_by_name(str(new / "checkpoints/step-6"), tmp_path / "nowhere")[new.resolve()]
    assert (made.steps, made.lost) == (6, ())
    assert record(new) == record(run)
    assert json.loads((new / "config.json").read_text()) == {"a": 1}
    assert (new / "start/adapter").read_bytes() == b"adapter"


def test_the_run_continues_with_pieces_of_its_own(run: Path, tmp_path: Path) -> None:
    new = travel(run, tmp_path / "new/r", 6)
    recover_by_name("r", tmp_path / "new")
    with RunFolder.open(new) as folder:
        folder.store.commit_step(StepRecord(6, 6, 7, "f6", (), 1e-5, 9.5, ()), [], {"reward": 2.0})
        save(folder, 8)
    third = travel(new, tmp_path / "third/r", 8)
    made = recover_by_name("r", tmp_path / "third")[third.resolve()]
    assert (made.steps, record(third)) == (7, record(new))


def test_torn_ones_are_passed_over(run: Path, tmp_path: Path) -> None:
    new = travel(run, tmp_path / "new/r", 4, 6)
    (new / "checkpoints/step-6/weights").write_bytes(b"torn")
    made = recover_by_name("r", tmp_path / "new")[new.resolve()]
    assert (made.steps, made.lost) == (4, ())


def test_a_checkpoint_without_a_record_is_refused(run: Path, tmp_path: Path) -> None:
    new = tmp_path / "new/r"
    checkpoints.save(new / "checkpoints", 6, lambda folder: None)
    with pytest.raises(RunNotFoundError, match="Copy the whole folder"):
        unpack(new)
    assert not unpack(run), "it is a run already"


# 2


def test_carried_files_are_links(run: Path) -> None:
    four, six = (run / f"checkpoints/step-{step}" for step in (4, 6))
    names = sorted(path.name for path in (six / "run/records").iterdir())
    assert names == ["step-2.db", "step-4.db"]
    assert (six / "run/records/step-4.db").samefile(four / "record.db")
    assert (six / "run/records/step-2.db").samefile(run / "records/step-2.db")
    assert (six / "run/start/adapter").samefile(run / "start/adapter")


def test_files_that_are_known_are_not_read_again(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    hashed = checkpoints._sha256

    def count(path: Path) -> str:
        read.append(path.name)
        return hashed(path)

    monkeypatch.setattr(checkpoints, "_sha256", count)
    with RunFolder.open(run) as folder:
        save(folder, 8)
    assert {"step-2.db", "step-4.db", "adapter"}.isdisjoint(read)
    assert {"weights", "record.db"} <= set(read)
    found = checkpoints.complete(run / "checkpoints", verify=True)
    assert [each.step for each in found] == [4, 6, 8]


def test_a_disk_without_second_names_gets_copies(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr("os.link", refuse)
    with RunFolder.open(run) as folder:
        save(folder, 8)
    new = travel(run, tmp_path / "new/r", 8)
    assert recover_by_name("r", tmp_path / "new")[new.resolve()].steps == 6


# 3


def test_a_dead_unpacker_is_followed_by_another(run: Path, tmp_path: Path) -> None:
    class Dead(BaseException):
        pass

    points: list[str] = []
    first = travel(run, tmp_path / "first/r", 6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(atomic_files, "on_write", points.append)
        unpack(first)
    assert points[-1] == "file:config.json:after"
    for number in range(len(points)):
        new = travel(run, tmp_path / f"{number}/r", 6)
        left = iter(range(number))

        def die(name: str, left: object = left) -> None:
            if next(left, None) is None:  # type: ignore[call-overload]
                raise Dead

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(atomic_files, "on_write", die)
            with pytest.raises(Dead):
                unpack(new)
        recover_by_name("r", new.parent)
        assert record(new) == record(run), points[number]


def test_two_do_not_unpack_at_once(run: Path, tmp_path: Path) -> None:
    new = travel(run, tmp_path / "new/r", 6)
    lock = RunLock.acquire(new)
    with pytest.raises(RunInUseError):
        unpack(new)
    lock.release()
    assert unpack(new)


def test_a_piece_that_is_there_twice_is_carried_once(run: Path) -> None:
    """As after a crash between the keeping of a piece and the deletion of its checkpoint."""
    atomic_files.keep_file(run / "checkpoints/step-4/record.db", run / "records/step-4.db")
    with RunFolder.open(run) as folder:
        save(folder, 8)
    names = sorted(path.name for path in (run / "checkpoints/step-8/run/records").iterdir())
    assert names == ["step-2.db", "step-4.db", "step-6.db"]
