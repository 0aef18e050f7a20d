"""The processes of the control plane, from the database: which are alive, and which are certainly gone.

Each process has a row for each of its roles, and renews it every few seconds. A process that ends normally removes its rows. One that was
killed leaves them, and silence alone does not distinguish it from one that hangs. So a row also identifies the process: the system on which
it ran knows whether it is still alive. A process that starts a role removes the rows of processes that are certainly gone; a process on
another system is only known to be silent. In an embedded fleet a lock on a file of its folder is more reliable: it is released when its
process ends in any way.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Collection, Generator, Mapping
from pathlib import Path
from typing import IO, Any

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from groupwise.core.errors import UsageError
from groupwise.jobs.fleet.disk_full import NO_ROOM
from groupwise.jobs.fleet.store.tables import ControlProcess

ROLES = ("dispatcher", "poller", "requeue", "tracker")
API = "api"
"""A process that only serves the API."""
PROCESS = "process"
"""Key in `facts`: identifies the process among all that have had its pid."""
NATS = "nats"
"""Key in `facts` of a process that uses NATS: its display address, and whether that is enough to connect; None: none is used."""
PUBLISHING = "publishing"
"""Key in `facts` of a tracker that reports ends of jobs to NATS: `trouble`, the known obstacle, or None."""
NATS_CURSOR = "tracker.nats"
"""The reader of events that announces ends of jobs to NATS: the name of its position in `cursors`."""
FOLDER = "folder"
"""Key in `facts` of a process that uses the fleet's folder: identifies the folder, see `folder_identity`."""
RELEASE = "release"
"""Key in `facts`: the release of Groupwise."""
FOLDER_IDENTITY = "folder.id"
"""A file in the fleet's folder: on a machine that has not mounted the shared folder, its content differs, or it is missing."""
UNOBSERVED = "unobserved_machines"
"""Key in `facts` of a dispatcher: machines it must have asked before it starts anything; absent: there are none."""
ENDED_STATES = ("Z", "X")
"""States of processes that have ended, but stay in the system's table until their parent has waited for them."""


@contextlib.contextmanager
def hold_role(folder: Path, role: str) -> Generator[None, None, None]:
    """Ensure that no other process of this machine plays the role for this folder within the block."""
    with (folder / f"{role}.lock").open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = _read_holder(file)
            raise UsageError(
                f"the fleet in {folder} has its {role} already: {f'process {pid}' if pid else 'another process'}. An embedded fleet has "
                f"one of each. `groupwise fleet status` looks at it, {f'`kill {pid}` ends it, ' if pid else ''}and --fleet names another "
                "folder for another fleet."
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def _read_holder(file: IO[str]) -> str | None:
    """The pid in a lock file, if there is one."""
    file.seek(0)
    pid = file.read(32).strip()
    return pid if pid.isdecimal() else None


def role_holder(folder: Path, but: Collection[str] = ()) -> str | None:
    """A description of a process that plays a role for this folder, ignoring the roles `but`; None: there is none."""
    for role in (*ROLES, API):
        with (
            contextlib.suppress(FileNotFoundError),
            (folder / f"{role}.lock").open(encoding="utf-8") as file,
        ):
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                if role not in but:
                    return f"its {role} (process {_read_holder(file) or 'unknown'})"
    return None


def identity(pid: int) -> dict[str, Any] | None:
    """Identifies a process seen from here: boot id, pid namespace, start time. None: there is none, or this is not Linux."""
    about = _process_state(pid)
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        among = os.readlink("/proc/self/ns/pid")
    except OSError:
        return None
    return None if about is None else {"boot_id": boot, "pids": among, "ticks": about[1]}


def _process_state(pid: int) -> tuple[str, int] | None:
    """Its state, and the clock ticks from the start of the system to the start of the process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        fields = text[text.rindex(")") + 2 :].split()
        return fields[0], int(fields[19])
    except (OSError, ValueError, IndexError):  # it may just have ended
        return None


def is_gone(pid: int, facts: Mapping[str, Any]) -> bool:
    """True if a row's process has certainly ended: it ran on this system, and its pid is now unused or another process's."""
    recorded: dict[str, Any] = facts.get(PROCESS) or {}
    own_identity = identity(os.getpid())
    if own_identity is None:
        return False
    if any(recorded.get(name) != own_identity[name] for name in ("boot_id", "pids")):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # another user's process, which is alive
        pass
    process_state = _process_state(pid)
    return process_state is not None and (
        process_state[0] in ENDED_STATES or process_state[1] != recorded.get("ticks")
    )


def delete_ended_processes(session: Session, role: str, *, alone: bool) -> None:
    """Delete the rows of processes that played the role and are gone. `alone`: only the caller can be playing it."""
    rows = session.scalars(select(ControlProcess).where(ControlProcess.role == role))
    ended_owners = [row.owner for row in rows if alone or is_gone(row.pid, row.facts)]
    session.execute(delete(ControlProcess).where(ControlProcess.owner.in_(ended_owners)))


def folder_identity(folder: Path) -> str:
    """The identity of a fleet's folder, the same on every machine that mounts it. The first caller creates it."""
    path = folder / FOLDER_IDENTITY
    try:
        with contextlib.suppress(FileNotFoundError):
            return path.read_text(encoding="ascii").strip()
        temporary = folder / f"{FOLDER_IDENTITY}.{secrets.token_hex(8)}"
        temporary.write_text(f"{secrets.token_hex(8)}\n", encoding="ascii")
        try:
            os.link(temporary, path)
        except FileExistsError:  # another process was faster
            pass
        except OSError:  # a file system without hard links
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        return path.read_text(encoding="ascii").strip()
    except OSError as error:
        if error.errno in NO_ROOM:
            raise
        raise UsageError(
            f"{folder}, the fleet's folder, cannot be used: {error.strerror}. Every role reads and writes there: fix its "
            "permissions, or begin this as its owner."
        ) from None
