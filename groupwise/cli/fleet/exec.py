"""`groupwise fleet exec`: runs a command as a short job that is pinned to a machine, with its output and exit code."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from groupwise.cli.fleet.access import FleetOption, fleet
from groupwise.cli.fleet.submit import ResourceOptions
from groupwise.cli.options import option
from groupwise.cli.output import say
from groupwise.cli.parsing import seconds
from groupwise.core.errors import GroupwiseError, UsageError

if TYPE_CHECKING:
    from groupwise.jobs.fleet.client import FleetClient

EXEC_PRIORITY = 1000
"""A priority higher than that of all waiting jobs."""
_OWN_EXIT_CODE = re.compile(r"(crashed|user_error): exit code \d")
"""Failure reasons that add nothing to exit code and output."""


def exec_command(
    target: Annotated[
        str, typer.Argument(metavar="JOB|VM", help="A machine, or a job on that machine.")
    ],
    arguments: Annotated[
        list[str], typer.Argument(metavar="[--] ARGUMENTS...", help="A program and its arguments.")
    ],
    fleet_at: FleetOption = None,
    gpus: Annotated[str, option("N", "GPUs that the command needs.")] = "0",
    time_limit: Annotated[
        float,
        option(
            "TIME",
            "End the command after this time; default: 10min.",
            parser=seconds("--time-limit"),
            show_default=False,
        ),
    ] = 600.0,
    project: Annotated[str | None, option("P", "Project that the command is charged to.")] = None,
) -> None:
    """Run a command on a machine, and print its output.

    Exits with its exit code; Ctrl-C cancels it. It is a short job, pinned to the machine and first in the queue. It needs no
    free CPU slot, so it runs on a full or drained machine too; with --gpus it waits for GPUs. It has an empty working folder of its own.
    """
    from groupwise.cli.fleet.follow import exit_code_of
    from groupwise.core.interruption import sigterm_interrupts

    command = arguments[1:] if arguments[0] == "--" else arguments
    if command is arguments and command[0].startswith("-"):
        options, dashes, program = shlex.join(command).partition(" -- ")
        right = f"{options if dashes else command[0]} {target} -- {program or '…'}"
        raise UsageError(
            f"{command[0]} comes after {target}, where the command begins: put options before it, `groupwise fleet exec {right}`"
        )
    with fleet(fleet_at) as access:
        vm = _machine_of(access, target)
        wanted = ResourceOptions(gpus=gpus, vm=vm).resources(access)
        request = {
            "arguments": command,
            "name": f"exec {shlex.join(command)}"[:256],
            "resources": wanted.model_copy(update={"oversubscribe": wanted.gpus == 0}).as_json(),
            "limits": {"time_seconds": time_limit},
            "retry": {"once": True},
            "priority": EXEC_PRIORITY,
            "artefacts": [],
            "checkpoints": [],
        }
        with sigterm_interrupts():
            final_job = _run_and_follow(access, request, project)
    reason = final_job["failure_reason"]
    if reason and not _OWN_EXIT_CODE.match(reason):
        say(reason)
    raise typer.Exit(exit_code_of([final_job]))


def _run_and_follow(
    access: FleetClient, request: Mapping[str, Any], project: str | None
) -> dict[str, Any]:
    """Submit the job and print its log. Returns its final state. If the user interrupts, the job is cancelled."""
    from groupwise.cli.fleet.follow import follow_log

    job_id = None
    try:
        job_id = access.submit(request, project=project)["job_id"]
        return follow_log(access, job_id)
    except (KeyboardInterrupt, BrokenPipeError):
        # A broken pipe means that the reader of our output has ended (`| head`).
        _cancel_job(access, job_id)
        raise
    except GroupwiseError:
        if job_id is not None:
            say(_continues_message(job_id))
        raise


def _cancel_job(access: FleetClient, job_id: str | None) -> None:
    """Cancel the job of a user who has interrupted the command."""
    from groupwise.api.schemas.problems import Refusal

    if job_id is None:
        say("whether the command was submitted is not known: `groupwise fleet list` shows it")
        return
    try:
        now = access.cancel(job_id, "exec was interrupted")["status"]
    except Refusal as refusal:
        if refusal.code != "job_state":
            say(f"{_continues_message(job_id)}: {refusal.message}")
    except (GroupwiseError, KeyboardInterrupt) as error:
        say(f"{_continues_message(job_id)}: {error or 'interrupted again'}")
    else:
        say(f"{job_id} {'is being ended' if now == 'running' else 'is cancelled'}")


def _continues_message(job_id: str) -> str:
    return f"{job_id} continues; `groupwise fleet stop {job_id}` ends it"


def _machine_of(access: FleetClient, target: str) -> str:
    """The machine of this name, or the machine on which the job of this name runs or last ran."""
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
