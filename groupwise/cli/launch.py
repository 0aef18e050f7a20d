"""`groupwise launch`: a command of groupwise, or a script of the project, on another machine; and what came of it."""

from __future__ import annotations

import typer

from groupwise.cli import launch_jobs
from groupwise.cli.launch_aws import aws
from groupwise.cli.launch_local import local
from groupwise.cli.launch_modal import modal
from groupwise.cli.launch_ray import ray
from groupwise.cli.launch_render import render
from groupwise.cli.launch_slurm import slurm
from groupwise.cli.launch_ssh import ssh
from groupwise.cli.launch_sweep import sweep
from groupwise.cli.launch_words import LaunchCommand

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

app.command("local", cls=LaunchCommand)(local)
app.command("ssh", cls=LaunchCommand)(ssh)
app.command("slurm", cls=LaunchCommand)(slurm)
app.command("ray", cls=LaunchCommand)(ray)
app.command("aws", cls=LaunchCommand)(aws)
app.command("modal", cls=LaunchCommand)(modal)
app.command("render", cls=LaunchCommand)(render)

app.command("list")(launch_jobs.list_jobs)
app.command("logs")(launch_jobs.logs)
app.command("fetch")(launch_jobs.fetch)
app.command("stop")(launch_jobs.stop)
app.command("resume")(launch_jobs.resume)
app.command("remove")(launch_jobs.remove)
app.command("sweep")(sweep)
