"""`groupwise launch`: runs a command of groupwise, or a script of the project, on another machine, and fetches its results."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from groupwise.cli.environment import RemoteEnvironmentOptions
from groupwise.cli.launch import jobs
from groupwise.cli.launch.aws import aws
from groupwise.cli.launch.job_command import LaunchCommand
from groupwise.cli.launch.modal import modal
from groupwise.cli.launch.options import GangOptions, LaunchOptions
from groupwise.cli.launch.places import LoginOptions, machines_together
from groupwise.cli.launch.placing import launch
from groupwise.cli.launch.render import render
from groupwise.cli.launch.schedulers import ray, slurm
from groupwise.cli.launch.sweep import sweep
from groupwise.cli.options import command, option
from groupwise.core.errors import UsageError
from groupwise.core.terminal.quantities import counted

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@command(app, "local", cls=LaunchCommand)
def local(job: LaunchOptions) -> None:
    """Run a job on this machine, as a background process.

        groupwise launch local --detach -- rl -c C.yaml -t task.py

    It runs in a copy of the project, with the packages that this command runs with, and the variables of --env and --env-file.
    """
    from groupwise.jobs.launch.places import LOCAL, JobBackend

    launch(JobBackend(LOCAL), job)


@command(app, "ssh", cls=LaunchCommand)
def ssh(
    *,
    host: Annotated[
        list[str],
        option(
            "H",
            "The machine, as for `ssh H`: a name of the ssh config, or an address. May be repeated: the job then runs on all of "
            "them at once.",
        ),
    ],
    login: LoginOptions,
    master_addr: Annotated[
        str | None,
        option(
            "ADDRESS",
            "Address at which the other machines reach the first one; default: the one used from here.",
        ),
    ] = None,
    packages: RemoteEnvironmentOptions,
    gang: GangOptions,
    job: LaunchOptions,
) -> None:
    """Run a job on a machine over SSH, or on several at once.

    The machine needs Python 3.11 and nothing else.

        groupwise launch ssh --host gpu1 --gpus 1 -- rl -c C.yaml -t task.py
    """
    if gang.machines not in (None, len(host)):
        raise UsageError(
            f"--machines is {gang.machines}, and --host names {counted(len(host), 'machine')}: give each its own --host."
        )
    if master_addr is not None and len(host) == 1:
        raise UsageError("--master-addr is for several machines, each with its own --host.")
    plan = packages.plan_unless_there()
    places = [login.machine(name, packages.python) for name in host]
    gang = replace(gang, machines=len(host))
    launch(machines_together(places, master_addr), job, environment=plan, gang=gang)


command(app, "slurm", cls=LaunchCommand)(slurm)
command(app, "ray", cls=LaunchCommand)(ray)
command(app, "aws", cls=LaunchCommand)(aws)
command(app, "modal", cls=LaunchCommand)(modal)
command(app, "render", cls=LaunchCommand)(render)

command(app, "list")(jobs.list_jobs)
command(app, "show")(jobs.show)
command(app, "logs")(jobs.logs)
command(app, "fetch")(jobs.fetch)
command(app, "stop")(jobs.stop)
command(app, "resume")(jobs.resume)
command(app, "remove")(jobs.remove)
command(app, "sweep")(sweep)
