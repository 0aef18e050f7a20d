"""Which processes of a role have certainly ended, judged on real processes.

1. One that was killed is gone, whether its parent has asked for it or not; so is one whose pid another has now.
2. One that hangs is not, nor one of another system, of other pids, or of which nothing is known.
3. Whoever begins takes away the rows of those who are gone, and all of its role where nobody else can be playing it.
4. Of an embedded fleet a lock says who plays a role, as long as it is played.
"""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from groupwise.core.errors import UsageError
from groupwise.jobs.fleet.operations import status
from groupwise.jobs.fleet.processes import (
    FOLDER_IDENTITY,
    delete_ended_processes,
    folder_identity,
    hold_role,
    identity,
    is_gone,
    role_holder,
)
from groupwise.jobs.fleet.store.database import Database, database_time
from groupwise.jobs.fleet.store.tables import ControlProcess


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def facts(pid: int, **changed: Any) -> dict[str, Any]:
    known = identity(pid)
    assert known is not None
    return {"process": known | changed}


def test_a_process_that_hangs_is_there(other: subprocess.Popen[bytes]) -> None:
    known = facts(other.pid)
    assert not is_gone(other.pid, known)
    other.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, other.pid, os.WSTOPPED | os.WNOWAIT)
    assert not is_gone(other.pid, known)


def test_a_killed_process_no_longer_holds_its_role(other: subprocess.Popen[bytes]) -> None:
    known = facts(other.pid)
    other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    assert is_gone(other.pid, known), "its parent has not asked for it yet"
    other.wait()
    assert is_gone(other.pid, known)


def test_a_pid_that_another_has_now() -> None:
    assert is_gone(os.getpid(), facts(os.getpid(), ticks=1))


@pytest.mark.parametrize("changed", [{"boot_id": "another"}, {"pids": "pid:[1]"}])
def test_a_process_on_another_machine_is_never_taken_for_gone(
    other: subprocess.Popen[bytes], changed: dict[str, Any]
) -> None:
    known = facts(other.pid, **changed)
    other.kill()
    other.wait()
    assert not is_gone(other.pid, known)
    assert not is_gone(other.pid, {})
    assert not is_gone(other.pid, {"process": None})


@pytest.mark.parametrize(
    ("alone", "left"), [(False, ["hangs", "unknown", "watches"]), (True, ["watches"])]
)
def test_a_starting_process_removes_rows_of_processes_that_ended(
    database: Database, alone: bool, left: list[str]
) -> None:
    here = facts(os.getpid())
    rows = {
        "gone": ("dispatcher", facts(os.getpid(), ticks=1)),
        "hangs": ("dispatcher", here),
        "unknown": ("dispatcher", {}),
        "watches": ("poller", facts(os.getpid(), ticks=1)),
    }

    def write(session: Session) -> None:
        for owner, (role, known) in rows.items():
            about = {"host": "h", "pid": os.getpid(), "started_at": 0.0, "seen_at": 0.0}
            session.add(ControlProcess(owner=owner, role=role, facts=known, **about))

    database.run(write)
    database.run(lambda s: delete_ended_processes(s, "dispatcher", alone=alone))
    found = database.read(lambda s: list(s.scalars(select(ControlProcess.owner))))
    assert sorted(found) == left


@pytest.mark.parametrize("is_there", [True, False])
def test_a_process_that_was_killed_here_counts_as_dead_at_once(
    database: Database, is_there: bool
) -> None:
    def write(session: Session) -> None:
        now = database_time(session)
        known = facts(os.getpid()) if is_there else facts(os.getpid(), ticks=1)
        about = {"host": "h", "pid": os.getpid(), "started_at": now, "seen_at": now}
        session.add(ControlProcess(owner="o", role="dispatcher", facts=known, **about))

    database.run(write)
    assert ("dispatcher" in database.read(status.missing_roles)) is not is_there


def test_the_lock_of_a_role_names_its_process_and_refuses_a_second(tmp_path: Path) -> None:
    assert role_holder(tmp_path) is None
    with hold_role(tmp_path, "poller"):
        assert role_holder(tmp_path) == f"its poller (process {os.getpid()})"
        assert role_holder(tmp_path, but=["poller"]) is None
        with (
            pytest.raises(UsageError, match=f"has its poller already: process {os.getpid()}"),
            hold_role(tmp_path, "poller"),
        ):
            pytest.fail("two play one role")
        with hold_role(tmp_path, "tracker"):
            assert "tracker" in str(role_holder(tmp_path, but=["poller"]))
    assert role_holder(tmp_path) is None


def test_a_folder_is_known_again_and_another_is_another(tmp_path: Path) -> None:
    first, other = tmp_path / "first", tmp_path / "other"
    first.mkdir()
    other.mkdir()
    known = folder_identity(first)
    assert (len(known), folder_identity(first)) == (16, known)
    assert folder_identity(other) != known
    assert [path.name for path in first.iterdir()] == [FOLDER_IDENTITY]


def test_a_folder_gets_one_identity_from_concurrent_first_calls(tmp_path: Path) -> None:
    many = Barrier(8)

    def look(_: int) -> str:
        many.wait()
        return folder_identity(tmp_path)

    with ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(look, range(8)))) == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_a_disk_without_second_names_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> None:
        raise PermissionError(errno.EPERM, "no links")

    monkeypatch.setattr(os, "link", refuses)
    assert folder_identity(tmp_path) == folder_identity(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
