"""`groupwise fleet`: jobs on many machines. Each group of its commands has a file; this one only puts them together."""

from __future__ import annotations

import typer

from groupwise.cli import fleet_jobs, fleet_keys, fleet_machines, fleet_prepare, fleet_roles
from groupwise.cli.fleet_exec import exec_command
from groupwise.cli.fleet_fetch import fetch
from groupwise.cli.fleet_submit import submit

app = typer.Typer(
    name="fleet",
    help="Jobs on many machines: up, submit, jobs, logs, vm.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

COMMAND_FIRST = {"allow_interspersed_args": False}
"""What stands behind the first word of a job's command belongs to it, with or without `--` before."""

app.command("up")(fleet_roles.up)
app.command("submit", context_settings=COMMAND_FIRST)(submit)
app.command("jobs")(fleet_jobs.jobs)
app.command("show")(fleet_jobs.show)
app.command("logs")(fleet_jobs.logs)
app.command("fetch")(fetch)
app.command("exec", context_settings=COMMAND_FIRST)(exec_command)
app.command("cancel")(fleet_jobs.cancel)
app.command("retry")(fleet_jobs.retry)
app.command("hold")(fleet_jobs.hold)
app.command("release")(fleet_jobs.release)
app.command("prune")(fleet_jobs.prune)
app.command("status")(fleet_roles.status)
app.command("doctor")(fleet_roles.doctor)
app.command("migrate")(fleet_roles.migrate)
app.command("poller")(fleet_roles.poller)
app.command("dispatcher")(fleet_roles.dispatcher)
app.command("requeue")(fleet_roles.requeue)
app.command("tracker")(fleet_roles.tracker)
app.command("api")(fleet_roles.api)
fleet_machines.machines.command("prepare")(fleet_prepare.prepare)
app.add_typer(fleet_machines.machines, name="vm")
app.add_typer(fleet_machines.projects, name="project")
app.add_typer(fleet_keys.keys, name="key")
