"""What the folders of jobs are called, below those of logs and of artefacts; and by what the fleet's folder is known to be the same one."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from groupwise.jobs.hosts.spec import JOB_ID

IDENTITY = "folder.id"
"""In the fleet's folder: where a machine has not mounted what the others share, it says something else, or is not there."""
NOBODYS = ".none"
"""No job has it, and nothing is ever written there."""


def folder_name(job: str) -> str:
    """The job's id, which becomes part of a path. A row by hand may have one that leads elsewhere: such a job never runs, and has left
    nothing."""
    return job if JOB_ID.fullmatch(job) else NOBODYS


def identity_of(folder: Path) -> str:
    """What a fleet's folder is known by, from wherever it is looked at. Whoever comes first gives it."""
    path = folder / IDENTITY
    with contextlib.suppress(FileNotFoundError):
        return path.read_text(encoding="ascii").strip()
    new = folder / f"{IDENTITY}.{secrets.token_hex(8)}"
    new.write_text(f"{secrets.token_hex(8)}\n", encoding="ascii")
    try:
        os.link(new, path)
    except FileExistsError:  # somebody was faster
        pass
    except OSError:  # a disk without second names
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
    return path.read_text(encoding="ascii").strip()
