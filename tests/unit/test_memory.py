"""What tests keep in memory does not stay there."""

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
    other = tmp_path / "of-somebody-else"
    other.mkdir()
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
    assert list(tmp_path.iterdir()) == [other]


def test_without_room_there_is_none(tmp_path: Path) -> None:
    assert memory.session_folder(tmp_path, enough=1 << 60) is None
    assert memory.session_folder(tmp_path / "nowhere") is None
    assert list(tmp_path.iterdir()) == []
