"""What tests keep in memory does not stay there."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests import memory

HOLDER = """\
import sys
from pathlib import Path
from tests.memory import session_folder
held = session_folder(Path(sys.argv[1]), enough=0)
(held.path / "data").write_bytes(b"0" * 1000)
print(held.path, flush=True)
sys.stdin.read()
held.end()
"""


def holder(folder: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


def named(process: "subprocess.Popen[str]") -> Path:
    assert process.stdout is not None
    return Path(process.stdout.readline().strip())


def test_a_session_that_lives_keeps_its_folder_and_one_that_was_killed_does_not(
    tmp_path: Path,
) -> None:
    with holder(tmp_path) as living, holder(tmp_path) as killed:
        kept, left = named(living), named(killed)
        assert memory.sweep(tmp_path) == []
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert (left / "data").exists()
        assert memory.sweep(tmp_path) == [left]
        assert not left.exists()
        assert (kept / "data").exists()
        living.communicate()
    assert list(tmp_path.iterdir()) == []


def test_a_new_session_removes_what_a_dead_one_left(tmp_path: Path) -> None:
    left = tmp_path / f"{memory.PREFIX}dead"
    left.mkdir()
    other = tmp_path / "of-somebody-else"
    other.mkdir()
    mine = memory.session_folder(tmp_path, enough=0)
    assert mine is not None
    assert sorted(tmp_path.iterdir()) == sorted([mine.path, other])
    mine.end()
    assert list(tmp_path.iterdir()) == [other]


def test_what_is_wanted_stays_until_the_next_session(tmp_path: Path) -> None:
    first = memory.session_folder(tmp_path, enough=0)
    assert first is not None
    first.wanted = True
    first.end()
    assert first.path.exists()
    assert memory.sweep(tmp_path) == [first.path]


def test_without_room_there_is_none(tmp_path: Path) -> None:
    assert memory.session_folder(tmp_path, enough=1 << 60) is None
    assert memory.session_folder(tmp_path / "nowhere") is None
    assert list(tmp_path.iterdir()) == []


def test_memory_that_is_taken_is_not_free(tmp_path: Path) -> None:
    told = tmp_path / "meminfo"
    told.write_text("MemTotal: 24683520 kB\nMemFree: 100 kB\nMemAvailable:  2048 kB\n")
    assert memory.available(told) == 2 << 20
    assert 0 < memory.available() < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
