"""Where weights are published: with enough space, by one process only, and removed in time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from groupwise.runs import publications


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in the place of /dev/shm, and another in that of /tmp."""
    for name in ("memory", "disk"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(publications, "MEMORY", tmp_path / "memory")
    monkeypatch.setattr(publications.tempfile, "tempdir", str(tmp_path / "disk"))
    yield tmp_path / "memory"
    for folder in list(publications._claims):
        if folder.is_relative_to(tmp_path):
            publications.release(folder)


def test_one_folder_for_each_run_that_only_the_user_may_write_to(
    memory: Path, tmp_path: Path
) -> None:
    one, other = (publications.claim(tmp_path / name, 10) for name in ("a", "b"))
    assert one != other
    assert one.parent == other.parent == memory / f"groupwise-{os.getuid()}"
    assert one.parent.stat().st_mode & 0o777 == 0o700


def test_three_times_the_size_must_be_free_and_what_training_needs_is_not_taken(
    memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert publications.free_memory() > 0
    free = publications.shutil.disk_usage(memory).free
    for available, fits, too_large in ((1 << 60, free // 4, free // 2), (1200, 100, 101)):
        monkeypatch.setattr(publications, "free_memory", lambda available=available: available)
        assert publications.claim(tmp_path / f"a{fits}", fits).is_relative_to(memory)
        assert publications.claim(tmp_path / "b", too_large).is_relative_to(tmp_path / "disk")


def test_release_leaves_nothing(memory: Path, tmp_path: Path) -> None:
    folder = publications.claim(tmp_path / "a", 10)
    (folder / "v1").mkdir(parents=True)
    publications.release(folder)
    publications.release(folder)
    assert [path.name for path in folder.parent.iterdir()] == ["lock"]


CHILD = """
import sys
from pathlib import Path
from groupwise.runs import publications
publications.MEMORY = Path(sys.argv[1])
folder = publications.claim(Path(sys.argv[2]), 10)
(folder / "v1").mkdir(parents=True)
print(folder, flush=True)
sys.stdin.read()
"""


def test_publications_of_killed_processes_are_deleted_and_of_live_ones_kept(
    memory: Path, tmp_path: Path
) -> None:
    def started(run: str) -> tuple[subprocess.Popen[str], Path]:
        command = [sys.executable, "-c", CHILD, str(memory), str(tmp_path / run)]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        return child, Path(child.stdout.readline().strip())

    (dead, left), (live, used) = started("a"), started("b")
    with dead, live:
        dead.kill()
        dead.wait()
        assert left.exists()
        mine = publications.claim(tmp_path / "c", 10)
        assert not left.exists()
        assert not left.with_name(f"{left.name}.lock").exists()
        assert (used / "v1").exists()
        assert publications.claim(tmp_path / "a", 10) == left, "its run may go on"
        assert publications.claim(tmp_path / "b", 10) != used, "never a folder that is in use"
        assert mine not in (left, used)
        live.kill()


def test_a_folder_of_another_user_is_not_used(memory: Path, tmp_path: Path) -> None:
    (memory / f"groupwise-{os.getuid()}").mkdir()
    (memory / f"groupwise-{os.getuid()}").chmod(0o777)
    assert publications.claim(tmp_path / "a", 10).is_relative_to(tmp_path / "disk")
