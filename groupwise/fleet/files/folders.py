"""What the folders of jobs are called, below those of logs and of artefacts."""

from __future__ import annotations

from groupwise.hosts.spec import JOB_ID

NOBODYS = ".none"
"""No job has it, and nothing is ever written there."""


def folder_name(job: str) -> str:
    """The job's id, which becomes part of a path. A row by hand may have one that leads elsewhere: such a job never runs, and has left
    nothing."""
    return job if JOB_ID.fullmatch(job) else NOBODYS
