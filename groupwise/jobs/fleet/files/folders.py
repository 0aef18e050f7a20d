"""Names of jobs' folders within those of logs and artefacts; and the identity of the fleet's own folder."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from groupwise.jobs.hosts.spec import JOB_ID

IDENTITY = "folder.id"
"""A file in the fleet's folder: on a machine that has not mounted the shared folder, its content differs, or it is missing."""
NOBODYS = ".none"
"""The folder name for invalid job ids: no job has it, and nothing is ever written there."""


def folder_name(job: str) -> str:
    """The folder of a job: its id. A row written by hand may have an id that leads out of the folder: such a job never runs, and has left
    no files."""
    return job if JOB_ID.fullmatch(job) else NOBODYS


def identity_of(folder: Path) -> str:
    """The identity of a fleet's folder, the same on every machine that mounts it. The first caller creates it."""
    path = folder / IDENTITY
    with contextlib.suppress(FileNotFoundError):
        return path.read_text(encoding="ascii").strip()
    temporary = folder / f"{IDENTITY}.{secrets.token_hex(8)}"
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
