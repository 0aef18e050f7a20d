import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from groupwise.jobs.fleet.notify import local
from groupwise.jobs.fleet.notify.local import FOLDER, LocalNotifier

RINGS = """
import sys
from pathlib import Path
from groupwise.jobs.fleet.notify.local import LocalNotifier
LocalNotifier(Path(sys.argv[1])).notify(sys.argv[2:])
"""


@pytest.fixture(params=["fleet", "a folder whose name is long " * 4 + "x" * 100])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return tmp_path / request.param


async def listening(folder: Path) -> LocalNotifier:
    notifier = LocalNotifier(folder)
    assert await notifier.wait(0) == frozenset()
    return notifier


def sockets(folder: Path) -> list[Path]:
    return sorted((folder / FOLDER).iterdir())


async def test_a_notification_of_another_process_arrives(folder: Path):
    notifier = await listening(folder)
    waiting = asyncio.create_task(notifier.wait(60))
    ran = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", RINGS, folder, "job-1", "job-2"],
        check=True,
        capture_output=True,
    )
    assert await waiting == {"job-1", "job-2"}
    assert not ran.stderr
    await notifier.close()
    assert sockets(folder) == []


def dead(folder: Path, name: str) -> None:
    """A socket whose process is gone, or on another machine."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        descriptor = os.open(folder / FOLDER, os.O_RDONLY)
        ear.bind(f"/proc/self/fd/{descriptor}/{name}")
        os.close(descriptor)


async def test_the_dead_are_cleared_away_and_change_nothing(folder: Path):
    alive = await listening(folder)
    system = sockets(folder)[0].name.partition("-")[0]
    for name in (f"{system}-0-dead.sock", f"{system}-999-dead.sock"):
        dead(folder, name)
    assert len(sockets(folder)) == 3
    LocalNotifier(folder).notify(["a"])
    assert await alive.wait(60) == {"a"}
    assert len(sockets(folder)) == 1
    await alive.close()


async def test_the_sockets_of_other_machines_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """They refuse here, where nobody could hear through them, whether or not their processes live."""
    here = await listening(tmp_path)
    monkeypatch.setattr(local, "BOOT_ID", tmp_path / "boot_id")
    (tmp_path / "boot_id").write_text("of another machine")
    there = await listening(tmp_path)
    assert len(sockets(tmp_path)) == 2
    name = there._name
    await there.close()
    dead(tmp_path, name)
    here.notify(["a"])
    assert {path.name for path in sockets(tmp_path)} == {here._name, name}
    LocalNotifier(tmp_path).notify(["b"])  # on the other one, where that process is gone
    assert [path.name for path in sockets(tmp_path)] == [here._name]
    assert await here.wait(60) == {"a"}
    await here.close()
