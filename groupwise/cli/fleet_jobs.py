"""`groupwise fleet jobs` and what is done with single ones: show, logs, cancel, retry, hold, release, prune."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from groupwise.cli.fleet_access import AsJson, FleetOption, JobArgument, fleet
from groupwise.cli.fleet_words import whole
from groupwise.cli.output import say
from groupwise.cli.printing import print_json
from groupwise.errors import UsageError

JobsArgument = Annotated[list[str], typer.Argument(metavar="JOB...", help="Ids of jobs.")]


def jobs(
    told: FleetOption = None,
    status: Annotated[
        list[str] | None,
        typer.Option(
            metavar="S", help="Only of this status, as running; several times for several."
        ),
    ] = None,
    project: Annotated[str | None, typer.Option(metavar="P", help="Only of this project.")] = None,
    name: Annotated[str | None, typer.Option(metavar="N", help="Only with this name.")] = None,
    kind: Annotated[
        str | None, typer.Option(metavar="K", help="Only of this kind: GRPO, SFT, EVAL, COMMAND …")
    ] = None,
    vm: Annotated[str | None, typer.Option(metavar="VM", help="Only on this machine.")] = None,
    label: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Only with this label.")
    ] = None,
    limit: Annotated[
        int,
        typer.Option(metavar="N", help="At most so many.", parser=whole("--limit", 100, most=1000)),
    ] = 50,
    older_than: Annotated[
        str | None,
        typer.Option(metavar="JOB", help="Those before this one: the next page of a long list."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List jobs, the newest first."""
    from groupwise.cli.fleet_words import pairs, statuses

    wanted = statuses(status)
    pairs("--label", label or ())
    with fleet(told) as access:
        found = access.jobs(
            status=None if wanted is None else sorted(wanted),
            project=project,
            name=name,
            kind=kind,
            vm=vm,
            label=label or None,
            older_than=older_than,
            limit=limit,
        )
    if as_json:
        print_json(found)
        return
    if not found:
        say("no jobs like that")
        return
    from groupwise.cli.fleet_printing import print_jobs

    print_jobs(found, time.time())
    if len(found) == limit:
        say(f"there may be more: --older-than {found[-1]['job_id']}")


def show(job: JobArgument, told: FleetOption = None, as_json: AsJson = False) -> None:
    """Show one job: status and why, attempts, evidence, events."""
    with fleet(told) as access:
        found = access.show(job)
    if as_json:
        print_json(found)
        return
    from groupwise.cli.fleet_printing import print_job

    print_job(found, time.time())


def cancel(
    job: JobsArgument,
    told: FleetOption = None,
    reason: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Why, for whoever wonders later.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """End jobs, whatever they are doing.

    One that runs is told to end (TERM, then KILL); it is `cancelled` once nothing of it is left.
    """
    with fleet(told) as access:
        found = [access.cancel(each, reason) for each in job]
    _tell(found, as_json, _cancelled)


def _cancelled(job: dict[str, Any]) -> str:
    if job["status"] == "running":
        return f"{job['job_id']} is being ended on {job['assigned_vm']}"
    return f"{job['job_id']} is {job['status']}"


def retry(job: JobsArgument, told: FleetOption = None, as_json: AsJson = False) -> None:
    """Begin failed or cancelled jobs anew.

    They go on from their last checkpoint, where they have one.
    """
    with fleet(told) as access:
        found = [access.retry(each) for each in job]
    _tell(found, as_json, lambda job: f"{job['job_id']} is {job['status']} again")


def hold(job: JobsArgument, told: FleetOption = None, as_json: AsJson = False) -> None:
    """Have jobs wait until they are released."""
    with fleet(told) as access:
        found = [access.hold(each) for each in job]
    _tell(found, as_json, lambda job: f"{job['job_id']} is {job['status']}")


def release(job: JobsArgument, told: FleetOption = None, as_json: AsJson = False) -> None:
    """Let held jobs go on."""
    with fleet(told) as access:
        found = [access.release(each) for each in job]
    _tell(found, as_json, lambda job: f"{job['job_id']} is {job['status']}")


def _tell(
    found: Sequence[dict[str, Any]], as_json: bool, line: Callable[[dict[str, Any]], str]
) -> None:
    if as_json:
        print_json(found[0] if len(found) == 1 else list(found))
        return
    for each in found:
        say(line(each))


def logs(
    job: JobArgument,
    told: FleetOption = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on as it grows, until the job has ended.")
    ] = False,
    epoch: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Of this attempt (`fleet show`), not of the newest one.",
            parser=whole("--epoch", 7),
        ),
    ] = None,
    rank: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Of a job on several machines: that of the machine with this rank, from 0.",
            parser=whole("--rank", 1, least=0),
        ),
    ] = 0,
    tail: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Only the last so many lines.",
            parser=whole("--tail", 20, least=0, most=1_000_000),
        ),
    ] = None,
) -> None:
    """Print what a job wrote.

    The log is mirrored to the control machine while the job runs; of several attempts the newest one's is shown.
    """
    from groupwise.cli.fleet_follow import follow_log, print_log

    with fleet(told) as access:
        if follow:
            follow_log(access, job, tail=tail, epoch=epoch, rank=rank)
        else:
            print_log(access, job, tail=tail, epoch=epoch, rank=rank)


def prune(
    older_than: Annotated[
        str, typer.Option(metavar="AGE", help="That ended so long ago: 30d, 12h, 0s for all.")
    ],
    told: FleetOption = None,
    project: Annotated[str | None, typer.Option(metavar="P", help="Only of this project.")] = None,
    status: Annotated[
        list[str] | None,
        typer.Option(metavar="S", help="Only completed, failed or cancelled ones."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be removed, and remove nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove old jobs with their logs and artefacts, and the files that no other job names.

    What happened to them stays in the events. Jobs of which something may still run, and those that others wait for, are kept.
    """
    from groupwise.cli.fleet_words import seconds_of, statuses
    from groupwise.fleet.states import FINAL

    age = seconds_of("--older-than", older_than)
    wanted = statuses(status)
    if wanted is not None and (wrong := sorted(wanted - FINAL)):
        raise UsageError(
            f"--status {', '.join(wrong)}: only jobs that have ended are removed: completed, failed, cancelled."
        )
    with fleet(told) as access:
        result = access.prune(
            age,
            project=project,
            status=None if wanted is None else sorted(wanted),
            dry_run=dry_run,
        )
    if as_json:
        print_json(result)
        return
    from groupwise.display.quantities import byte_size

    would = "would remove" if dry_run else "removed"
    freed = byte_size(result["bytes"])
    what = "logs and artefacts" if dry_run else "logs, artefacts and files"
    say(f"{would} {len(result['jobs'])} jobs, {freed} of {what}")
