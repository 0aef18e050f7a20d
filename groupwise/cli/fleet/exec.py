"""`groupwise fleet exec`: a command as a short job that is pinned to a machine, its output, and its exit code."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from groupwise.cli.fleet.access import FleetOption, fleet
from groupwise.cli.output import say
from groupwise.core.errors import GroupwiseError, UsageError

if TYPE_CHECKING:
    from groupwise.cli.fleet.access import Fleet

EXEC_PRIORITY = 1000
"""Before everything that waits."""
_OWN_EXIT_CODE = re.compile(r"(crashed|user_error): exit code \d")
"""Reasons that say no more than exit code and output."""


def exec_command(
    target: Annotated[str, typer.Argument(metavar="JOB|VM", help="Where: a machine, or a job's.")],
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="[--] ARGUMENTS...", help="A program and its arguments."),
    ],
    told: FleetOption = None,
    gpus: Annotated[str, typer.Option(metavar="N", help="GPUs that it needs.")] = "0",
    time_limit: Annotated[
        str, typer.Option("--time-limit", metavar="TIME", help="After which it is ended.")
    ] = "10min",
    project: Annotated[str | None, typer.Option(metavar="P", help="Who it counts for.")] = None,
) -> None:
    """Run a command on a machine, and print its output.

    Exits with its exit code; Ctrl-C cancels it. It is a short job that is pinned to the machine and stands first in the queue: it waits
    for a free CPU slot there (`vm add --cpu-slots`), or for GPUs with --gpus, and has an empty working folder of its own.
    """
    with fleet(told) as access:
        command = arguments[1:] if arguments[0] == "--" else arguments
        code = _run_on(access, target, command, gpus=gpus, time_limit=time_limit, project=project)
    raise typer.Exit(code)


def _run_on(
    access: Fleet,
    target: str,
    arguments: Sequence[str],
    *,
    gpus: str,
    time_limit: str,
    project: str | None,
) -> int:
    """A command as a job that is pinned to a machine; its output, and its exit code. Interrupted, it does not go on."""
    from groupwise.cli.fleet.follow import exit_code_of
    from groupwise.cli.fleet.words import seconds_of
    from groupwise.core.interruption import sigterm_interrupts
    from groupwise.jobs.fleet.queue import resources

    vm = _machine_of(access, target)
    request = {
        "arguments": list(arguments),
        "name": f"exec {shlex.join(arguments)}"[:256],
        "resources": resources.parse(gpus=gpus, vm=vm).as_json(),
        "limits": {"time_seconds": seconds_of("--time-limit", time_limit)},
        "retry": {"once": True},
        "priority": EXEC_PRIORITY,
        "artefacts": [],
        "checkpoints": [],
    }
    with sigterm_interrupts():
        ended = _followed(access, request, project)
    reason = ended["failure_reason"]
    if reason and not _OWN_EXIT_CODE.match(reason):
        say(reason)
    return exit_code_of([ended])


def _followed(access: Fleet, request: Mapping[str, Any], project: str | None) -> dict[str, Any]:
    """What it was at its end. Where that is not waited for, it is called off."""
    from groupwise.cli.fleet.follow import follow_log

    job_id = None
    try:
        job_id = access.submit(request, project=project)["job_id"]
        return follow_log(access, job_id)
    except (KeyboardInterrupt, BrokenPipeError):  # or nobody reads any more (`| head`)
        _call_off(access, job_id)
        raise
    except GroupwiseError:
        if job_id is not None:
            say(_goes_on(job_id))
        raise


def _call_off(access: Fleet, job_id: str | None) -> None:
    """Whoever wanted it is no longer there."""
    from groupwise.api.schemas.problems import Refusal

    if job_id is None:
        say("whether the command was submitted is not known: `groupwise fleet jobs` says so")
        return
    try:
        now = access.cancel(job_id, "exec was interrupted")["status"]
    except Refusal as refusal:
        if refusal.code != "job_state":
            say(f"{_goes_on(job_id)}: {refusal.message}")
    except (GroupwiseError, KeyboardInterrupt) as error:
        say(f"{_goes_on(job_id)}: {error or 'interrupted again'}")
    else:
        say(f"{job_id} {'is being ended' if now == 'running' else 'is cancelled'}")


def _goes_on(job_id: str) -> str:
    return f"{job_id} goes on; `groupwise fleet cancel {job_id}` ends it"


def _machine_of(access: Fleet, target: str) -> str:
    """A machine by its name, or the one that a job was given last."""
    from groupwise.api.schemas.problems import Refusal

    try:
        return access.machine(target)["vm_id"]
    except Refusal as no_machine:
        if no_machine.code != "unknown_vm":
            raise
        try:
            job = access.show(target)
        except Refusal:
            raise no_machine from None
    if job["assigned_vm"] is None:
        raise UsageError(f"{target} is {job['status']} and has no machine yet; name one instead.")
    return job["assigned_vm"]
