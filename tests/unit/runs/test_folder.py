from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from groupwise.core import atomic_files
from groupwise.core.errors import (
    NothingScoredError,
    RunInUseError,
    RunNotFoundError,
    UsageError,
)
from groupwise.runs import folder, lock
from groupwise.runs.folder import RunFolder, read_state, read_summary
from groupwise.runs.records import ResumeRecord, Rewound
from tests.meanwhile import right_after

CONFIG: dict[str, Any] = {"model": {"name": "tiny"}, "training": {"max_steps": 10}}

DieAt = Callable[[str, Callable[[], object]], None]


def create(runs: Path, name: str = "sort") -> RunFolder:
    return RunFolder.create(runs, name, CONFIG, {"model": "tiny", "max_steps": 10})


def finish(run: RunFolder) -> None:
    run.finish("finished", {"reward": 0.5})
    run.close()


@contextmanager
def live_holder(path: Path) -> Iterator[int]:
    """Another process that holds the folder; yields its number."""
    script = (
        "import sys; from pathlib import Path; from groupwise.runs.lock import RunLock;"
        "held = RunLock.acquire(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        yield other.pid
        other.kill()


class TestNew:
    def test_has_everything(self, tmp_path: Path) -> None:
        with create(tmp_path / "runs") as run:
            assert run.path == tmp_path / "runs" / "sort"
            assert run.config() == CONFIG
            assert run.state == "running"
            assert run.store.get_meta()["model"] == "tiny"
            assert run.checkpoints.is_dir()
            assert read_state(run.path) == "running"
            assert read_summary(run.path) is None
        assert [path.name for path in (tmp_path / "runs").iterdir()] == ["sort"]

    def test_is_refused_beside_an_unfinished_one(self, tmp_path: Path) -> None:
        """And beside a live one, or where something else lies."""
        for state in ("interrupted", "failed", "running"):
            run = create(tmp_path, state)
            run.finish(state)
            run._release()  # pyright: ignore[reportPrivateUsage]
            shown = "crashed" if state == "running" else state
            with pytest.raises(UsageError, match=rf"\({shown}\).*--resume.*run\.name="):
                create(tmp_path, state)
        with create(tmp_path), pytest.raises(RunInUseError, match=f"process {os.getpid()}"):
            create(tmp_path)
        (tmp_path / "other").mkdir()
        with pytest.raises(UsageError, match="not a run folder"):
            create(tmp_path, "other")

    @pytest.mark.parametrize(("point", "there"), [
        ("file:config.json:before", False), ("commit:migration:after", False),
        ("commit:meta:after", False), ("folder:sort:before", False), ("folder:sort:after", True),
    ])  # fmt: skip
    def test_is_there_whole_or_not_at_all(
        self, tmp_path: Path, point: str, there: bool, die_at: DieAt
    ) -> None:
        die_at(point, lambda: create(tmp_path))
        assert (tmp_path / "sort").exists() == there
        if there:
            assert read_state(tmp_path / "sort") == "crashed"
            RunFolder.open(tmp_path / "sort").close()
        else:
            finish(create(tmp_path))

    def test_sweeps_what_dead_builders_left(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, die_at: DieAt
    ) -> None:
        die_at("folder:sort:before", lambda: create(tmp_path))
        finish(create(tmp_path))
        assert len(list(tmp_path.glob(".building-*"))) == 1
        later = time.time() + 2 * folder.BUILDING_SECONDS
        monkeypatch.setattr(folder.time, "time", lambda: later)
        finish(create(tmp_path))
        assert list(tmp_path.glob(".building-*")) == []


class TestLock:
    def test_a_second_live_process_is_refused_with_its_number(self, tmp_path: Path) -> None:
        run = create(tmp_path)
        run.close()
        with live_holder(run.path) as pid:
            assert lock.is_held(run.path)
            holder = lock.holder(run.path)
            assert holder is not None
            assert holder.pid == pid
            with pytest.raises(RunInUseError, match=f"in use by process {pid} on .*run.name="):
                RunFolder.open(run.path)
        assert not lock.is_held(run.path)

    def test_a_dead_holder_is_taken_over(self, tmp_path: Path, die_at: DieAt) -> None:
        path = _closed(tmp_path)
        die_at("commit:meta:after", lambda: RunFolder.open(path))
        assert json.loads((path / "lock").read_text())["pid"] != os.getpid()
        assert read_state(path) == "crashed"
        with RunFolder.open(path) as run:
            assert json.loads((path / "lock").read_text())["pid"] == os.getpid()
            assert read_state(path) == run.state == "running"


class TestEnd:
    def test_is_recorded(self, tmp_path: Path) -> None:
        run = create(tmp_path)
        finish(run)
        assert read_state(run.path) == "finished"
        told = {"run": "sort", "state": "finished", "error": None, "reward": 0.5}
        assert read_summary(run.path) == told
        assert read_state(_closed(tmp_path / "other")) == "interrupted", "without a word"

    def test_by_an_error_is_recorded_with_its_code(self, tmp_path: Path) -> None:
        ends: tuple[tuple[BaseException, str, str], ...] = (
            (NothingScoredError("no reward"), "failed", "nothing_scored"),
            (ZeroDivisionError("oh"), "failed", "error"),
            (KeyboardInterrupt(), "interrupted", "interrupted"),
        )
        for error, state, code in ends:
            with pytest.raises(type(error)), create(tmp_path, code):
                raise error
            summary = read_summary(tmp_path / code)
            assert summary is not None
            assert (summary["state"], summary["error"]["code"]) == (state, code)
            assert read_state(tmp_path / code) == state

    def test_on_a_full_disk_keeps_the_first_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(name: str) -> None:
            raise OSError(28, "No space left on device")

        def train() -> None:
            with create(tmp_path):
                monkeypatch.setattr(atomic_files, "on_write", full)
                raise NothingScoredError("first")

        with pytest.raises(NothingScoredError):
            train()
        assert not lock.is_held(tmp_path / "sort")


class TestResume:
    def test_continues_with_the_new_config(self, tmp_path: Path) -> None:
        path = _closed(tmp_path)
        with RunFolder.open(path) as run:
            changed = {**CONFIG, "training": {"max_steps": 20}}
            note = ResumeRecord(0, Rewound(0, 0), 5.0, {"training.max_steps": [10, 20]})
            run.resume(changed, note)
            assert run.config() == changed
            assert run.store.resumes() == [note]

    def test_sweeps_what_was_left(self, tmp_path: Path) -> None:
        path = _closed(tmp_path)
        (path / "checkpoints" / ".building-step-3-1").mkdir()
        (path / ".building-summary.json-1").touch()
        RunFolder.open(path).close()
        assert list((path / "checkpoints").iterdir()) == []
        assert not list(path.glob(".building-*"))
        with pytest.raises(RunNotFoundError, match=r"no run\.db"):
            RunFolder.open(tmp_path)


class TestFiles:
    def test_the_log_holds_what_the_package_says(self, tmp_path: Path) -> None:
        logger = logging.getLogger("groupwise.training.loops.rl")
        level = logging.getLogger("groupwise").level
        with create(tmp_path) as run:
            logger.info("step %d\nof many", 3)
            logger.warning("a model said \x1b[31mred\x07")
        logger.warning("nobody listens any more")
        lines = (run.path / "log.txt").read_text().splitlines()
        assert lines[0].endswith("Z INFO step 3")
        assert lines[1] == "of many"
        assert lines[2].endswith(r"WARNING a model said \x1b[31mred\x07")
        assert len(lines) == 3
        assert logging.getLogger("groupwise").level == level


def _closed(runs: Path) -> Path:
    with create(runs) as run:
        return run.path


def test_runs_that_others_begin_at_the_same_time_are_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the jobs of a sweep do: one has no lock yet, and another gets its name while it is looked at."""
    just_begun, building = (tmp_path / f"{atomic_files.BUILDING}{name}-1-1" for name in "ab")
    just_begun.mkdir()
    building.mkdir()
    (building / lock.LOCK).touch()
    right_after(
        monkeypatch, Path, "stat", lambda: building.rename(tmp_path / "b"),
        lambda path: path == building / lock.LOCK,
    )  # fmt: skip
    with create(tmp_path) as run:
        assert run.path == tmp_path / "sort"
    assert (just_begun.is_dir(), (tmp_path / "b").is_dir()) == (True, True)
