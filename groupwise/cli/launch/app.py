"""`groupwise launch`: a command of groupwise, or a script of the project, on another machine; and what came of it."""

from __future__ import annotations

import typer

from groupwise.cli.launch import jobs
from groupwise.cli.launch.aws import aws
from groupwise.cli.launch.modal import modal
from groupwise.cli.launch.options import CommonOptions, common, place_command
from groupwise.cli.launch.placing import launch
from groupwise.cli.launch.ray import ray
from groupwise.cli.launch.render import render
from groupwise.cli.launch.slurm import slurm
from groupwise.cli.launch.ssh import ssh
from groupwise.cli.launch.sweep import sweep
from groupwise.cli.launch.words import LaunchCommand

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@place_command(job=common)
def local(*, job: CommonOptions) -> None:
    """On this machine, as a process that needs no terminal.

        groupwise launch local --detach -- rl --config C.yaml --task-module task.py

    It runs in a copy of the project, with the packages that this command runs with, and the variables of --env-file.
    """
    from groupwise.jobs.launch.places import LOCAL, JobBackend

    launch(JobBackend(LOCAL), job)


app.command("local", cls=LaunchCommand)(local)
app.command("ssh", cls=LaunchCommand)(ssh)
app.command("slurm", cls=LaunchCommand)(slurm)
app.command("ray", cls=LaunchCommand)(ray)
app.command("aws", cls=LaunchCommand)(aws)
app.command("modal", cls=LaunchCommand)(modal)
app.command("render", cls=LaunchCommand)(render)

app.command("list")(jobs.list_jobs)
app.command("logs")(jobs.logs)
app.command("fetch")(jobs.fetch)
app.command("stop")(jobs.stop)
app.command("resume")(jobs.resume)
app.command("remove")(jobs.remove)
app.command("sweep")(sweep)
