"""The folder that results are fetched to: what appears in it, what is set aside, and which checkpoints are removed from it."""

import fcntl
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from groupwise.jobs.clouds.backend import Busy, CloudError
from groupwise.jobs.clouds.folder import (
    EARLIER,
    INCOMING,
    NOTE,
    ResultsFolder,
    is_allowed_path,
    results_folder,
    set_aside,
)
from groupwise.jobs.hosts.spec import FileEntry
from tests.meanwhile import right_after

RUN = "runs/run"
JOB = "job on this machine"


def entry(data: bytes) -> FileEntry:
    return FileEntry(hashlib.sha256(data).hexdigest(), 0o644, len(data))


@pytest.fixture
def results(tmp_path: Path) -> Iterator[ResultsFolder]:
    with results_folder(tmp_path, JOB) as found:
        yield found


def fetch_files(
    results: ResultsFolder, files: dict[str, bytes], attempt: int = 1, *, ended: bool = False
) -> set[str]:
    """An attempt offers these, and they are fetched; what came."""
    offered = {path: entry(data) for path, data in files.items()}
    wanted = results.missing(offered)
    for path in wanted:
        (results.incoming / path).parent.mkdir(parents=True, exist_ok=True)
        (results.incoming / path).write_bytes(files[path])
    results.accept(wanted, offered, attempt, has_ended=ended)
    return set(wanted)


def checkpoints(*steps: int) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for step in steps:
        folder = f"{RUN}/checkpoints/step-{step}"
        manifest = json.dumps({"step": step, "files": {}}).encode()
        found |= {f"{folder}/weights": b"w" * step, f"{folder}/manifest.json": manifest}
    return found


def steps(results: ResultsFolder) -> list[int]:
    found = results.folder.glob(f"{RUN}/checkpoints/*/weights")
    return sorted(path.stat().st_size for path in found)


def content(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    named = {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
    return {name: data for name, data in named.items() if not name.startswith(INCOMING)}


def test_a_results_folder_belongs_to_one_job_and_one_process(tmp_path: Path) -> None:
    folder, file = tmp_path / "folder", tmp_path / "file"
    with results_folder(folder, JOB) as results:
        fetch_files(results, checkpoints(2), ended=True)
        with (
            pytest.raises(CloudError, match="another process"),
            results_folder(folder, JOB),
        ):
            pass
    other = results_folder(folder, "another on this machine")
    with pytest.raises(CloudError, match=r"results of job .* --to"), other:
        pass
    file.touch()
    with pytest.raises(CloudError, match="nothing can be"), results_folder(file, JOB):
        pass
    with pytest.raises(CloudError, match=r"TB .* are free"), results_folder(folder, JOB) as found:
        found.check_room({"vast": FileEntry("0" * 64, 0o644, 1 << 62)})
    with pytest.raises(CloudError, match="fetch again"), results_folder(folder, JOB):
        raise OSError(28, "No space left on device")


def test_only_files_that_differ_are_fetched_again(results: ResultsFolder) -> None:
    """Also what somebody else has put there."""
    (results.folder / "mine").write_bytes(b"mine")
    (results.folder / "c").mkdir()
    (results.folder / "c/d").write_bytes(b"mine too")
    files = {"a": b"one", "b": b"two", "c/d": b"three"}
    assert fetch_files(results, files) == set(files)
    (results.folder / "a").write_bytes(b"eno")
    (results.folder / "b").write_bytes(b"two!")
    assert fetch_files(results, files, ended=True) == {"a", "b"}
    changed = {"a": b"eno", "b": b"two!", "c/d": b"mine too"}
    aside = {f"{EARLIER}/changed/{name}": data for name, data in changed.items()}
    assert content(results.folder) == {**files, **aside, "mine": b"mine"}


def test_a_later_attempt_sets_aside_what_it_has_otherwise_or_has_not(
    results: ResultsFolder,
) -> None:
    """As long as it runs, only what it replaces."""
    first = {"run.db": b"old", "run.db-wal": b"of the old one", "same": b"same", "notes": b"1"}
    fetch_files(results, first, ended=True)
    fetch_files(results, checkpoints(4), attempt=2)
    assert content(results.folder) == {**first, **checkpoints(4)}
    second = {"run.db": b"new", "same": b"same", "more": b"more", **checkpoints(4)}
    assert fetch_files(results, second, attempt=2, ended=True) == {"run.db", "more"}
    gone = ("run.db", "run.db-wal", "notes")
    aside = {f"{EARLIER}/attempt-1/{name}": first[name] for name in gone}
    assert content(results.folder) == {**second, **aside}


def test_nothing_that_is_set_aside_is_overwritten(tmp_path: Path) -> None:
    for attempt in (1, 2, 1, 2):
        with results_folder(tmp_path, JOB) as results:
            fetch_files(results, {"a": f"{attempt}".encode()}, attempt, ended=True)
    aside = {"attempt-1/a": b"1", "attempt-1/a.2": b"1", "attempt-2/a": b"2"}
    assert content(tmp_path) == {"a": b"2", **{f"{EARLIER}/{k}": v for k, v in aside.items()}}


def test_checkpoints_in_the_results_folder_mirror_those_of_the_machine(
    results: ResultsFolder,
) -> None:
    fetch_files(results, checkpoints(2))
    fetch_files(results, checkpoints(2, 4))
    assert steps(results) == [2, 4]
    (results.folder / RUN / "checkpoints/step-2/manifest.json").unlink()  # half removed
    fetch_files(results, checkpoints(4, 6))
    assert steps(results) == [4, 6]
    assert not (results.folder / RUN / "checkpoints/step-2").exists()
    fetch_files(results, {**checkpoints(6, 8), "log": b""}, attempt=2, ended=True)
    assert steps(results) == [6, 8]
    assert not (results.folder / EARLIER).exists()


def test_the_last_checkpoint_stays_if_the_place_has_none_or_older_ones(
    results: ResultsFolder,
) -> None:
    fetch_files(results, checkpoints(8))
    fetch_files(results, {})
    fetch_files(results, checkpoints(2), attempt=2, ended=True)
    assert steps(results) == [2, 8]


def test_files_that_others_put_into_the_folder_stay(results: ResultsFolder) -> None:
    """Checkpoints, files beside a checkpoint, and folders that only have the name of one."""
    for path, data in checkpoints(2).items():
        (results.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (results.folder / path).write_bytes(data)
    fetch_files(results, {**checkpoints(4), "export/manifest.json": b'{"files": {}}'})
    beside = results.folder / RUN / "checkpoints/step-4/my-evaluation.json"
    beside.write_text("{}")
    fetch_files(results, checkpoints(6))
    assert steps(results) == [2, 6]
    assert beside.read_text() == "{}"
    assert (results.folder / "export/manifest.json").exists()


def test_a_note_that_cannot_be_read_loses_nothing(tmp_path: Path) -> None:
    with results_folder(tmp_path, JOB) as results:
        fetch_files(results, {"a": b"1"}, ended=True)
        (results.folder / INCOMING / "brought.json").write_text("[")
    with results_folder(tmp_path, JOB) as results:
        fetch_files(results, {"a": b"2"}, attempt=2, ended=True)
    assert content(tmp_path) == {"a": b"2", f"{EARLIER}/changed/a": b"1"}


def test_a_machine_names_no_file_that_the_folder_needs_nor_one_outside(tmp_path: Path) -> None:
    """What it offers is not believed, nor a note that may have come from it."""
    place, outside = tmp_path / "results", tmp_path / "thesis" / "manifest.json"
    outside.parent.mkdir()
    outside.write_text("mine")
    names = (
        f"{INCOMING}/brought.json",
        f"{INCOMING.upper()}/x",
        f"{EARLIER}/x",
        "../thesis/x",
        "/x",
    )
    assert [name for name in names if is_allowed_path(name)] == []
    said = {"of": JOB, "files": {"../thesis/manifest.json": [1, "0" * 64], "a": [1, "0" * 64]}}
    with results_folder(place, JOB) as results:
        fetch_files(results, {"brought.json": json.dumps(said).encode()})
    assert (place / "brought.json").exists()
    (place / INCOMING / "brought.json").write_text(json.dumps(said))
    with results_folder(place, JOB) as results:
        assert set(results.fetched) == {"a"}
        fetch_files(results, checkpoints(2), ended=True)
    assert outside.read_text() == "mine"


def test_before_another_job_of_that_name_all_that_was_brought_is_set_aside(tmp_path: Path) -> None:
    """Also where nobody wrote a result; what somebody else put there stays."""
    (tmp_path / "mine").write_text("mine")
    assert set_aside(tmp_path) is None
    for number in (1, 2):
        with results_folder(tmp_path, JOB) as results:
            fetch_files(results, {**checkpoints(500 * number), "log": b"said"})
            (results.incoming / "half").write_bytes(b"half")
            with pytest.raises(Busy):
                set_aside(tmp_path)
        aside = tmp_path / EARLIER / ("job" if number == 1 else "job.2")
        assert set_aside(tmp_path) == aside
        assert content(aside) == {**checkpoints(500 * number), "log": b"said"}
        assert sorted(each.name for each in tmp_path.iterdir()) == [EARLIER, "mine"]
    with results_folder(tmp_path, JOB) as results:
        fetch_files(results, checkpoints(10))
        assert steps(results) == [10]
        assert set(results.fetched) == set(checkpoints(10))


@pytest.mark.parametrize("removed", ["results", "lock"])
def test_results_that_another_process_sets_aside_meanwhile(
    removed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with results_folder(tmp_path, JOB) as results:
        fetch_files(results, {"w": b"1"})
    note = tmp_path / INCOMING / NOTE
    change = note.unlink if removed == "results" else lambda: shutil.rmtree(note.parent)
    right_after(monkeypatch, fcntl, "flock", change)
    if removed == "results":
        assert set_aside(tmp_path) is None
    else:  # what was locked is not the folder's lock any more
        with pytest.raises(Busy):
            set_aside(tmp_path)
    assert not (tmp_path / EARLIER).exists()
