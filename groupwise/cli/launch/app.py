"""`groupwise launch`: runs a command of groupwise, or a script of the project, on another machine, and fetches its results."""

from __future__ import annotations

import typer

from groupwise.cli.launch import jobs
from groupwise.cli.launch.aws import aws
from groupwise.cli.launch.job_command import LaunchCommand
from groupwise.cli.launch.modal import modal
from groupwise.cli.launch.options import LaunchOptions
from groupwise.cli.launch.placing import launch
from groupwise.cli.launch.ray import ray
from groupwise.cli.launch.render import render
from groupwise.cli.launch.slurm import slurm
from groupwise.cli.launch.ssh import ssh
from groupwise.cli.launch.sweep import sweep
from groupwise.cli.options import command

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@command(app, "local", cls=LaunchCommand)
def local(job: LaunchOptions) -> None:
    """Run a job on this machine, as a process that needs no terminal.

        groupwise launch local --detach -- rl --config C.yaml --task-module task.py

    It runs in a copy of the project, with the packages that this command runs with, and the variables of --env and --env-file.
    """
    from groupwise.jobs.launch.places import LOCAL, JobBackend

    launch(JobBackend(LOCAL), job)


command(app, "ssh", cls=LaunchCommand)(ssh)
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
