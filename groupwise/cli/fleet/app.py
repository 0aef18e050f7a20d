"""`groupwise fleet`: jobs on many machines. Each group of commands has a file; this one only puts them together."""

from __future__ import annotations

import typer

from groupwise.cli.fleet import jobs, keys, machines, roles
from groupwise.cli.fleet.exec import exec_command
from groupwise.cli.fleet.jobs import fetch
from groupwise.cli.fleet.submit import submit
from groupwise.cli.options import WrappingGroup, command

app = typer.Typer(rich_markup_mode=None)

COMMAND_FIRST = {"allow_interspersed_args": False}
"""All words after the first word of a job's command belong to the command, even without `--` before it."""

command(app, "up")(roles.up)
command(app, "submit", context_settings=COMMAND_FIRST)(submit)
command(app, "list", "jobs")(jobs.list_jobs)
command(app, "show")(jobs.show)
command(app, "logs")(jobs.logs)
command(app, "fetch")(fetch)
command(app, "exec", context_settings=COMMAND_FIRST)(exec_command)
command(app, "stop", "cancel")(jobs.stop)
command(app, "resume", "retry")(jobs.resume)
command(app, "hold")(jobs.hold)
command(app, "release")(jobs.release)
command(app, "remove", "prune")(jobs.remove)
command(app, "status")(roles.status)
command(app, "doctor")(roles.doctor)
command(app, "migrate")(roles.migrate)
run = typer.Typer(
    cls=WrappingGroup,
    help="Run one role of the fleet in a process of its own.",
    no_args_is_help=True,
)
command(run, "poller")(roles.poller)
command(run, "dispatcher")(roles.dispatcher)
command(run, "requeue")(roles.requeue)
command(run, "tracker")(roles.tracker)
command(run, "api")(roles.api)
# A single systemd unit template starts each of them by name, including `up`.
command(run, "up", hidden=True)(roles.up)
app.add_typer(run, name="run")
app.add_typer(machines.machines, name="vm")
app.add_typer(machines.projects, name="project")
app.add_typer(keys.keys, name="key")
