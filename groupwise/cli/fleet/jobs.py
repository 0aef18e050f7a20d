"""The commands of `groupwise fleet` on jobs: list, show, logs, fetch, stop, resume, hold, release, remove."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from groupwise.cli.fleet.access import FleetOption, JobArgument, fleet, progress
from groupwise.cli.options import AsJson, DryRun, Follow, flag, option
from groupwise.cli.output import report_error, say, write_json
from groupwise.cli.parsing import pairs, seconds, statuses
from groupwise.core.errors import GroupwiseError, UsageError
from groupwise.core.terminal.quantities import byte_size, counted

if TYPE_CHECKING:
    from groupwise.jobs.fleet.client import FleetClient

JobIds = Annotated[
    list[str] | None,
    typer.Argument(metavar="[JOB...]", help="Ids of jobs; or choose jobs by options."),
]
EpochOption = Annotated[
    int | None,
    option("N", "Number of an attempt (`fleet show`); default: the newest.", "--attempt", min=1),
]
RankOption = Annotated[
    int, option("N", "Rank of the machine, for a job on several machines.", min=0)
]
PAGE = 1000
"""Largest number of jobs in one listing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFilter:
    """Chooses jobs."""

    status: Annotated[
        list[str],
        option(
            "S",
            "Only jobs of this status: queued, pending, held, running, completed, failed or cancelled. May be repeated.",
        ),
    ] = field(default_factory=list[str])
    project: Annotated[str | None, option("P", "Only jobs of this project.")] = None
    name: Annotated[str | None, option("N", "Only jobs of this name.")] = None
    label: Annotated[list[str], option("K=V", "Only jobs with this label. May be repeated.")] = (
        field(default_factory=list[str])
    )

    def given(self) -> list[str]:
        """The options that were given."""
        return [f"--{option.name}" for option in fields(self) if getattr(self, option.name)]

    def query(self, default: frozenset[str] | None = None) -> dict[str, Any]:
        """The arguments of `FleetClient.jobs`. `default`: the statuses to use if none is given. Raises UsageError."""
        chosen_statuses = statuses(self.status) or default
        pairs("--label", self.label)
        return {
            "status": None if chosen_statuses is None else sorted(chosen_statuses),
            "project": self.project,
            "name": self.name,
            "label": self.label or None,
        }

    def ids(self, access: FleetClient, default: frozenset[str]) -> list[str]:
        """The ids of all selected jobs, newest first."""
        query, job_ids = self.query(default), list[str]()
        while True:
            page = access.jobs(**query, older_than=job_ids[-1] if job_ids else None, limit=PAGE)
            job_ids += [job["job_id"] for job in page]
            if len(page) < PAGE:
                return job_ids


def list_jobs(
    *,
    fleet_at: FleetOption = None,
    chosen: JobFilter,
    kind: Annotated[
        str | None, option("K", "Only jobs of this kind: GRPO, SFT, EVAL, COMMAND …")
    ] = None,
    vm: Annotated[str | None, option("VM", "Only jobs on this machine.")] = None,
    limit: Annotated[int, option("N", "Maximum number of jobs to list.", min=1, max=PAGE)] = 50,
    older_than: Annotated[
        str | None, option("JOB", "Only jobs before this one: the next page of a long list.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List jobs, the newest first."""
    query = chosen.query()
    with fleet(fleet_at) as access:
        jobs = access.jobs(**query, kind=kind, vm=vm, older_than=older_than, limit=limit)
    if as_json:
        write_json(jobs)
        return
    if not jobs:
        say("no jobs like that")
        return
    from groupwise.cli.fleet.printing import print_jobs

    print_jobs(jobs, time.time())
    if len(jobs) == limit:
        say(f"there may be more: --older-than {jobs[-1]['job_id']}")


def show(job: JobArgument, fleet_at: FleetOption = None, as_json: AsJson = False) -> None:
    """Show one job: status and why, attempts, evidence, events."""
    with fleet(fleet_at) as access:
        details = access.show(job)
    if as_json:
        write_json(details)
        return
    from groupwise.cli.fleet.printing import print_job

    print_job(details, time.time())


@dataclass(frozen=True, slots=True)
class _Change:
    """A change that a command makes to jobs."""

    name: str
    statuses: frozenset[str]
    """Statuses of the jobs that the command applies to; options select only among those."""
    operation: Literal["cancel", "hold", "release", "retry"]
    """The change as the fleet's API calls it."""
    result: Callable[[dict[str, Any]], str]
    """The result for one job as text."""
    reason: str | None = None
    """The reason of a cancellation."""


def _apply_change(
    change: _Change,
    fleet_at: str | None,
    ids: Sequence[str] | None,
    job_filter: JobFilter,
    as_json: bool,
) -> None:
    """Change one named job, or raise; if there are several jobs, change each, even if others are refused."""
    filter_options = job_filter.given()
    if not ids and not filter_options:
        raise UsageError(
            f"name the jobs, or choose them: `groupwise fleet {change.name} JOB`, or --label, --name, --status or --project."
        )
    if ids and filter_options:
        raise UsageError(
            f"jobs are chosen by their ids and by {filter_options[0]}: leave one of the two out."
        )
    from groupwise.api.schemas.problems import Refusal

    with fleet(fleet_at) as access:
        if ids and len(ids) == 1:
            (result,) = access.change_all(change.operation, ids, change.reason)
            if "error" in result:
                raise Refusal(result["error"]["code"], result["error"]["message"])
            write_json(result) if as_json else say(change.result(result))
            return
        results = _change_in_portions(
            access, ids or job_filter.ids(access, change.statuses), change, as_json
        )
    refused_count = sum("error" in result for result in results)
    if as_json:
        write_json(results)
    elif filter_options:
        jobs = counted(len(results), "job") if results else "no jobs like that"
        summary = (
            f"{len(results) - refused_count} of {jobs}, {refused_count} refused"
            if refused_count
            else jobs
        )
        say(f"{change.name}: {summary}")
    if refused_count:
        raise typer.Exit(UsageError.exit_code)


def _change_in_portions(
    access: FleetClient, ids: Sequence[str], change: _Change, as_json: bool
) -> list[dict[str, Any]]:
    """Change jobs in portions, and print each result at once. If a portion fails, --json prints the finished changes with the error."""
    from groupwise.api.schemas.fleet import portions

    results: list[dict[str, Any]] = []
    for portion in portions(ids):
        try:
            portion_results = access.change_all(change.operation, portion, change.reason)
        except GroupwiseError as error:
            if not as_json:
                raise
            write_json({"error": {"code": error.code, "message": error.message}, "done": results})
            raise typer.Exit(report_error(error, as_json=False)) from error
        results += portion_results
        for result in portion_results:
            if "error" in result:
                job_id, message = result["job_id"], result["error"]["message"]
                text = message if job_id in message else f"{job_id}: {message}"
                say(f"not done: {text}")
            elif not as_json:
                say(change.result(result))
    return results


def stop(
    *,
    job: JobIds = None,
    fleet_at: FleetOption = None,
    reason: Annotated[str | None, option("TEXT", "Why; stored in the job's events.")] = None,
    chosen: JobFilter,
    as_json: AsJson = False,
) -> None:
    """Stop jobs, whether they run or wait.

    A running job gets SIGTERM, then SIGKILL; its status is `cancelled` once none of its processes is left. Options choose among all jobs
    that have not ended.
    """
    from groupwise.jobs.fleet.states import FINAL, JobStatus

    change = _Change(
        "stop",
        frozenset(JobStatus) - FINAL,
        "cancel",
        lambda job: (
            f"{job['job_id']} is being ended on {job['assigned_vm']}"
            if job["status"] == "running"
            else _status_sentence(job)
        ),
        reason,
    )
    _apply_change(change, fleet_at, job, chosen, as_json)


def _status_sentence(job: dict[str, Any]) -> str:
    return f"{job['job_id']} is {job['status']}"


def _resumed_sentence(job: dict[str, Any]) -> str:
    from groupwise.cli.fleet.printing import clock_time, stamp

    sentence = f"{_status_sentence(job)} again"
    if not job["request"].get("files"):
        return sentence
    sent_at = clock_time(stamp(job["created_at"]))
    return f"{sentence}, with its files as they were sent on {sent_at}; for changed ones submit a new job"


def resume(
    *, job: JobIds = None, fleet_at: FleetOption = None, chosen: JobFilter, as_json: AsJson = False
) -> None:
    """Run failed or cancelled jobs again, with their files as they were sent at first.

    They continue from their last checkpoint, if they have one. If you have changed a file, submit a new job. Options choose among all jobs
    that have failed or were cancelled.
    """
    from groupwise.jobs.fleet.states import RETRIED_FROM

    change = _Change(
        "resume",
        frozenset(RETRIED_FROM),
        "retry",
        _resumed_sentence,
    )
    _apply_change(change, fleet_at, job, chosen, as_json)


def hold(
    *, job: JobIds = None, fleet_at: FleetOption = None, chosen: JobFilter, as_json: AsJson = False
) -> None:
    """Hold jobs: they wait until they are released.

    Options choose among all jobs that wait.
    """
    change = _Change(
        "hold",
        frozenset(("queued", "pending")),
        "hold",
        _status_sentence,
    )
    _apply_change(change, fleet_at, job, chosen, as_json)


def release(
    *, job: JobIds = None, fleet_at: FleetOption = None, chosen: JobFilter, as_json: AsJson = False
) -> None:
    """Let held jobs run.

    Options choose among all jobs that are held.
    """
    change = _Change(
        "release",
        frozenset(("held",)),
        "release",
        _status_sentence,
    )
    _apply_change(change, fleet_at, job, chosen, as_json)


def logs(
    job: JobArgument,
    fleet_at: FleetOption = None,
    follow: Follow = False,
    epoch: EpochOption = None,
    rank: RankOption = 0,
    tail: Annotated[int | None, option("N", "Only the last N lines.", min=0, max=100_000)] = None,
) -> None:
    """Print what a job has written.

    The log is mirrored to the control machine while the job runs; if there are several attempts, the log of the newest one is shown.
    """
    from groupwise.cli.fleet.follow import follow_log, print_log

    with fleet(fleet_at) as access:
        if follow:
            follow_log(access, job, tail=tail, epoch=epoch, rank=rank)
        else:
            print_log(access, job, tail=tail, epoch=epoch, rank=rank)


def remove(
    older_than: Annotated[
        float,
        option(
            "AGE",
            "Only jobs that ended this long ago: 30d, 12h, 0s for all.",
            parser=seconds("--older-than"),
        ),
    ],
    fleet_at: FleetOption = None,
    project: Annotated[str | None, option("P", "Only jobs of this project.")] = None,
    status: Annotated[
        list[str] | None, option("S", "Only completed, failed or cancelled jobs.")
    ] = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Remove old jobs, their logs, outputs and files.

    Files that another job names stay, and so do the events. Jobs that may still have processes, and jobs that others wait for, are
    not removed.
    """
    from groupwise.jobs.fleet.states import FINAL

    chosen_statuses = statuses(status)
    if chosen_statuses is not None and (invalid_statuses := sorted(chosen_statuses - FINAL)):
        raise UsageError(
            f"--status {', '.join(invalid_statuses)}: only jobs that have ended are removed: completed, failed, cancelled."
        )
    with fleet(fleet_at) as access:
        result = access.prune(
            older_than,
            project=project,
            status=None if chosen_statuses is None else sorted(chosen_statuses),
            dry_run=dry_run,
        )
    if as_json:
        write_json(result)
        return
    verb, description = (
        ("would remove", "logs and outputs") if dry_run else ("removed", "logs, outputs and files")
    )
    say(
        f"{verb} {counted(len(result['jobs']), 'job')}, {byte_size(result['bytes'])} of {description}"
    )


def _nothing_fetched(job: dict[str, Any], epoch: int | None, rank: int) -> str:
    """Says that an attempt left nothing in its outputs, and where its other files are."""
    outputs = job["request"].get("artefacts") or [job["output_dir"]]
    names = ", ".join(f"`{path}`" for path in outputs)
    chosen = [attempt for attempt in job["attempts"] if epoch in (None, attempt["epoch"])]
    members = (
        [member for member in chosen[-1]["members"] if member["rank"] == rank] if chosen else []
    )
    folder = "".join(
        f" The machine {member['vm_id']} keeps its working folder for some hours: attempts/{job['job_id']}.{chosen[-1]['epoch']}/work in "
        f"the work folder that `groupwise fleet vm show {member['vm_id']}` names."
        for member in members
    )
    return f"{job['job_id']} left nothing in {names}. What it writes elsewhere is fetched only if `submit --output PATH` names it.{folder}"


def fetch(
    job: JobArgument,
    path: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PATH...]", help="Files and folders to fetch; default: all."),
    ] = None,
    fleet_at: FleetOption = None,
    to: Annotated[Path | None, option("DIR", "Folder for the files; default: ./JOB.")] = None,
    checkpoints: Annotated[
        bool,
        flag(
            "Fetch its mirrored checkpoints instead of its outputs, also while it runs.",
            "--checkpoints",
        ),
    ] = False,
    epoch: EpochOption = None,
    rank: RankOption = 0,
    force: Annotated[bool, flag("Replace existing files that differ.", "--force")] = False,
    as_json: AsJson = False,
) -> None:
    """Fetch a job's outputs; prints the folder.

    Each file appears whole, once its hash has been verified. Files that exist already are kept, and interrupted transfers continue.
    """
    folder = Path(job) if to is None else to.expanduser()
    with fleet(fleet_at) as access, progress() as on_progress:
        result = access.fetch(
            job,
            folder,
            paths=path or (),
            checkpoints=checkpoints,
            epoch=epoch,
            rank=rank,
            force=force,
            on_progress=on_progress,
        )
        details = None if result["files"] or as_json else access.show(job)
    if as_json:
        write_json(result)
        return
    files = result["files"]
    kept_count = sum(file["kept"] for file in files)
    size = byte_size(sum(file["bytes"] for file in files))
    kept_note = f", {kept_count} of them here already" if kept_count else ""
    say(
        f"{result['job_id']}: {counted(len(files), 'file')}, {size}{kept_note}"
        if details is None
        else _nothing_fetched(details, epoch, rank)
    )
    for path_left_out, reason in result["left_out"]:
        say(f"the fleet left out {path_left_out}: {reason.replace('_', ' ')}")
    if files:
        typer.echo(folder)
