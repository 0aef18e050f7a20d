"""`groupwise launch local`."""

from __future__ import annotations

from groupwise.cli.launch.options import place_command
from groupwise.cli.launch.placing import CommonOptions, asked, launch


@place_command(job=asked)
def local(*, job: CommonOptions) -> None:
    """On this machine, as a process that needs no terminal.

        groupwise launch local --detach -- rl --config C.yaml --task-module task.py

    It runs in a copy of the project, with the packages that this command runs with, and the variables of --env-file.
    """
    from groupwise.jobs.launch.places import LOCAL, JobBackend

    launch(JobBackend(LOCAL), job)
