"""`groupwise fleet`: jobs on many machines. Each group of commands has a file; this one only puts them together."""

from __future__ import annotations

import typer

from groupwise.cli.fleet import jobs, keys, machines, prepare, roles
from groupwise.cli.fleet.exec import exec_command
from groupwise.cli.fleet.fetch import fetch
from groupwise.cli.fleet.submit import submit

app = typer.Typer(
    name="fleet",
    help="Jobs on many machines: up, submit, jobs, logs, vm.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

COMMAND_FIRST = {"allow_interspersed_args": False}
"""All words after the first one of a job's command belong to it, with or without `--` before."""

app.command("up")(roles.up)
app.command("submit", context_settings=COMMAND_FIRST)(submit)
app.command("jobs")(jobs.jobs)
app.command("show")(jobs.show)
app.command("logs")(jobs.logs)
app.command("fetch")(fetch)
app.command("exec", context_settings=COMMAND_FIRST)(exec_command)
app.command("cancel")(jobs.cancel)
app.command("retry")(jobs.retry)
app.command("hold")(jobs.hold)
app.command("release")(jobs.release)
app.command("prune")(jobs.prune)
app.command("status")(roles.status)
app.command("doctor")(roles.doctor)
app.command("migrate")(roles.migrate)
run = typer.Typer(
    help="A role of the control plane in a process of its own; `fleet up` runs all of them.",
    no_args_is_help=True,
)
run.command("poller")(roles.poller)
run.command("dispatcher")(roles.dispatcher)
run.command("requeue")(roles.requeue)
run.command("tracker")(roles.tracker)
run.command("api")(roles.api)
# One unit of systemd begins any of them by its name, `up` too.
run.command("up", hidden=True)(roles.up)
app.add_typer(run, name="run")
machines.machines.command("prepare")(prepare.prepare)
app.add_typer(machines.machines, name="vm")
app.add_typer(machines.projects, name="project")
app.add_typer(keys.keys, name="key")
