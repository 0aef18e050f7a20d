"""The folder that results are fetched to: what appears in it, what is set aside, and which checkpoints are removed from it."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from groupwise.clouds.folder import EARLIER, INCOMING, ResultsFolder, results_folder, set_aside
from groupwise.clouds.port import Busy, CloudError
from groupwise.hosts.spec import FileEntry

RUN = "runs/run"
JOB = "job on this machine"


def entry(data: bytes) -> FileEntry:
    return FileEntry(hashlib.sha256(data).hexdigest(), 0o644, len(data))


@pytest.fixture
def results(tmp_path: Path) -> Iterator[ResultsFolder]:
    with results_folder(tmp_path, JOB) as found:
        yield found


def come(
    results: ResultsFolder, files: dict[str, bytes], attempt: int = 1, *, ended: bool = False
) -> set[str]:
    """An attempt offers these, and they are fetched; what came."""
    offered = {path: entry(data) for path, data in files.items()}
    wanted = results.lacking(offered)
    for path in wanted:
        (results.incoming / path).parent.mkdir(parents=True, exist_ok=True)
        (results.incoming / path).write_bytes(files[path])
    results.take(wanted, offered, attempt, ended=ended)
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


def test_only_one_fetches_into_a_folder(tmp_path: Path) -> None:
    with (
        results_folder(tmp_path, JOB),
        pytest.raises(CloudError, match="another process is fetching"),
        results_folder(tmp_path, JOB),
    ):
        pass
    with results_folder(tmp_path, JOB):
        pass


def test_what_is_here_comes_no_more_and_what_differs_does(results: ResultsFolder) -> None:
    files = {"a": b"one", "b": b"two", "c/d": b"three"}
    assert come(results, files) == set(files)
    (results.folder / "a").write_bytes(b"eno")
    (results.folder / "b").write_bytes(b"two!")
    assert come(results, files) == {"a", "b"}
    aside = {f"{EARLIER}/changed/a": b"eno", f"{EARLIER}/changed/b": b"two!"}
    assert content(results.folder) == {**files, **aside}


def test_results_of_two_jobs_do_not_meet(tmp_path: Path) -> None:
    with results_folder(tmp_path, JOB) as results:
        come(results, checkpoints(2), ended=True)
    with (
        pytest.raises(CloudError, match=r"holds the results of job on this machine; .* --to DIR"),
        results_folder(tmp_path, "another on this machine"),
    ):
        pass


def test_what_is_put_beside_a_checkpoint_stays(results: ResultsFolder) -> None:
    come(results, checkpoints(2))
    beside = results.folder / RUN / "checkpoints/step-2/my-evaluation.json"
    beside.write_text("{}")
    come(results, checkpoints(4))
    assert steps(results) == [4]
    assert beside.read_text() == "{}"


def test_a_disk_that_takes_nothing_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(CloudError, match="nothing can be brought to"),
        results_folder(tmp_path / "file", JOB),
    ):
        pass
    with (
        pytest.raises(CloudError, match=r"No space left on device.* fetch again"),
        results_folder(tmp_path, JOB),
    ):
        raise OSError(28, "No space left on device")


def test_a_later_attempt_sets_aside_what_it_has_otherwise_or_has_not(
    results: ResultsFolder,
) -> None:
    first = {"run.db": b"old", "run.db-wal": b"of the old one", "same": b"same", "notes": b"1"}
    come(results, first, ended=True)
    second = {"run.db": b"new", "same": b"same", "more": b"more"}
    assert come(results, second, attempt=2, ended=True) == {"run.db", "more"}
    aside = {
        f"{EARLIER}/attempt-1/{name}": first[name] for name in ("run.db", "run.db-wal", "notes")
    }
    assert content(results.folder) == {**second, **aside}


def test_as_long_as_it_runs_only_what_it_replaces_is_set_aside(results: ResultsFolder) -> None:
    come(results, {"run.db": b"old", "run.db-wal": b"of the old one"}, ended=True)
    come(results, checkpoints(4), attempt=2)
    assert content(results.folder).keys() >= {"run.db", "run.db-wal"}
    assert not (results.folder / EARLIER).exists()


def test_files_of_somebody_else_are_set_aside_too(results: ResultsFolder) -> None:
    (results.folder / "a").write_bytes(b"mine")
    (results.folder / "b").write_bytes(b"mine too")
    come(results, {"a": b"the job's"}, ended=True)
    here = {"a": b"the job's", "b": b"mine too", f"{EARLIER}/changed/a": b"mine"}
    assert content(results.folder) == here


def test_nothing_that_is_set_aside_is_overwritten(tmp_path: Path) -> None:
    for attempt in (1, 2, 1, 2):
        with results_folder(tmp_path, JOB) as results:
            come(results, {"a": f"{attempt}".encode()}, attempt, ended=True)
    assert content(tmp_path) == {
        "a": b"2",
        f"{EARLIER}/attempt-1/a": b"1",
        f"{EARLIER}/attempt-1/a.2": b"1",
        f"{EARLIER}/attempt-2/a": b"2",
    }


def test_of_checkpoints_the_folder_is_a_mirror(results: ResultsFolder) -> None:
    come(results, checkpoints(2))
    come(results, checkpoints(2, 4))
    assert steps(results) == [2, 4]
    come(results, checkpoints(4, 6))
    assert steps(results) == [4, 6]
    assert not (results.folder / RUN / "checkpoints/step-2").exists()
    come(results, {**checkpoints(6, 8), "log": b""}, attempt=2, ended=True)
    assert steps(results) == [6, 8]
    assert not (results.folder / EARLIER).exists()


def test_the_last_one_stays_where_the_place_has_none_or_older_ones(results: ResultsFolder) -> None:
    come(results, checkpoints(8))
    come(results, {})
    come(results, checkpoints(2), attempt=2, ended=True)
    assert steps(results) == [2, 8]


def test_checkpoints_of_somebody_else_stay(results: ResultsFolder) -> None:
    for path, data in checkpoints(2).items():
        (results.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (results.folder / path).write_bytes(data)
    come(results, checkpoints(4))
    come(results, checkpoints(6))
    assert steps(results) == [2, 6]


def test_one_that_was_half_removed_is_removed_the_next_time(results: ResultsFolder) -> None:
    come(results, checkpoints(2))
    (results.folder / RUN / "checkpoints/step-2/manifest.json").unlink()
    come(results, checkpoints(4))
    assert steps(results) == [4]


def test_a_manifest_that_is_no_checkpoints_is_kept(results: ResultsFolder) -> None:
    come(results, {"export/manifest.json": b'{"files": {}}'})
    come(results, checkpoints(4))
    assert (results.folder / "export/manifest.json").exists()


def test_a_note_that_cannot_be_read_loses_nothing(tmp_path: Path) -> None:
    with results_folder(tmp_path, JOB) as results:
        come(results, {"a": b"1"}, ended=True)
        (results.incoming / "brought.json").write_text("[")
    with results_folder(tmp_path, JOB) as results:
        come(results, {"a": b"2"}, attempt=2, ended=True)
    assert content(tmp_path) == {"a": b"2", f"{EARLIER}/changed/a": b"1"}


def test_before_another_job_of_that_name_all_that_was_brought_is_set_aside(tmp_path: Path) -> None:
    """Also where nobody wrote a result; what somebody else put there stays."""
    (tmp_path / "mine").write_text("mine")
    assert set_aside(tmp_path) is None
    for number in (1, 2):
        with results_folder(tmp_path, JOB) as results:
            come(results, {**checkpoints(500 * number), "log": b"said"})
            (results.incoming / "half").write_bytes(b"half")
            with pytest.raises(Busy):
                set_aside(tmp_path)
        aside = tmp_path / EARLIER / ("job" if number == 1 else "job.2")
        assert set_aside(tmp_path) == aside
        assert content(aside) == {**checkpoints(500 * number), "log": b"said"}
        assert sorted(each.name for each in tmp_path.iterdir()) == [EARLIER, "mine"]
    with results_folder(tmp_path, JOB) as results:
        come(results, checkpoints(10))
        assert steps(results) == [10]
        assert set(results.brought) == set(checkpoints(10))
