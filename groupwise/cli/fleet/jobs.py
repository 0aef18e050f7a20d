"""`groupwise fleet jobs`, and the commands on single jobs: show, logs, cancel, retry, hold, release, prune."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from groupwise.cli.fleet.access import AsJson, FleetOption, JobArgument, fleet
from groupwise.cli.fleet.words import whole
from groupwise.cli.output import report_error, say
from groupwise.cli.printing import print_json
from groupwise.core.errors import GroupwiseError, UsageError

if TYPE_CHECKING:
    from groupwise.jobs.fleet.client import FleetClient

JobsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[JOB...]", help="Ids of jobs; or choose them by options."),
]
StatusOption = Annotated[
    list[str] | None,
    typer.Option(metavar="S", help="Only of this status, as running; several times for several."),
]
ProjectOption = Annotated[str | None, typer.Option(metavar="P", help="Only of this project.")]
NameOption = Annotated[str | None, typer.Option(metavar="N", help="Only with this name.")]
LabelOption = Annotated[
    list[str] | None, typer.Option(metavar="KEY=VALUE", help="Only with this label.")
]
PAGE = 1000
"""Most jobs in one listing."""


def jobs(
    fleet_at: FleetOption = None,
    status: StatusOption = None,
    project: ProjectOption = None,
    name: NameOption = None,
    kind: Annotated[
        str | None, typer.Option(metavar="K", help="Only of this kind: GRPO, SFT, EVAL, COMMAND …")
    ] = None,
    vm: Annotated[str | None, typer.Option(metavar="VM", help="Only on this machine.")] = None,
    label: LabelOption = None,
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
    from groupwise.cli.fleet.words import pairs, statuses

    wanted = statuses(status)
    pairs("--label", label or ())
    with fleet(fleet_at) as access:
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
    from groupwise.cli.fleet.printing import print_jobs

    print_jobs(found, time.time())
    if len(found) == limit:
        say(f"there may be more: --older-than {found[-1]['job_id']}")


def show(job: JobArgument, fleet_at: FleetOption = None, as_json: AsJson = False) -> None:
    """Show one job: status and why, attempts, evidence, events."""
    with fleet(fleet_at) as access:
        found = access.show(job)
    if as_json:
        print_json(found)
        return
    from groupwise.cli.fleet.printing import print_job

    print_job(found, time.time())


@dataclass(frozen=True, slots=True)
class _Verb:
    """A change of jobs, as a command makes it."""

    name: str
    statuses: frozenset[str]
    """Statuses of the jobs that it applies to; options choose only among those."""
    one: Callable[[FleetClient, str], dict[str, Any]]
    """Changes one job, and returns it; raises if it is refused. Older APIs have only this, not `many`."""
    many: Callable[[FleetClient, Sequence[str]], list[dict[str, Any]]]
    """Changes many jobs. Returns each as it is then, or its `error`."""
    said: Callable[[dict[str, Any]], str]
    """The result for one job, in words."""


@dataclass(frozen=True, slots=True)
class _JobFilter:
    """The options that choose jobs."""

    status: list[str] | None
    project: str | None
    name: str | None
    label: list[str] | None

    def given(self) -> list[str]:
        """The options that are given."""
        return [f"--{each}" for each in self.__slots__ if getattr(self, each)]

    def ids(self, access: FleetClient, statuses: frozenset[str]) -> list[str]:
        """The ids of all chosen jobs, the newest first. `statuses`: the default."""
        from groupwise.cli.fleet import words

        given = words.statuses(self.status)
        words.pairs("--label", self.label or ())
        found: list[str] = []
        while True:
            page = access.jobs(
                status=sorted(statuses if given is None else given),
                project=self.project,
                name=self.name,
                label=self.label or None,
                older_than=found[-1] if found else None,
                limit=PAGE,
            )
            found += [each["job_id"] for each in page]
            if len(page) < PAGE:
                return found


def _do(
    fleet_at: str | None, ids: Sequence[str] | None, wanted: _JobFilter, verb: _Verb, as_json: bool
) -> None:
    """Change one named job, or raise; of several jobs, change each, even if others are refused."""
    given = wanted.given()
    if not ids and not given:
        raise UsageError(
            f"name the jobs, or choose them: `groupwise fleet {verb.name} JOB`, or --label, --name, --status or --project."
        )
    if ids and given:
        raise UsageError(
            f"jobs are chosen by their ids and by {given[0]}: leave one of the two out."
        )
    with fleet(fleet_at) as access:
        if ids and len(ids) == 1:
            found = verb.one(access, ids[0])
            print_json(found) if as_json else say(verb.said(found))
            return
        done = _each(access, ids or wanted.ids(access, verb.statuses), verb, as_json)
    refused = sum("error" in each for each in done)
    if as_json:
        print_json(done)
    elif given:
        jobs = "1 job" if len(done) == 1 else f"{len(done)} jobs" if done else "no jobs like that"
        of_them = f"{len(done) - refused} of {jobs}, {refused} refused" if refused else jobs
        say(f"{verb.name}: {of_them}")
    if refused:
        raise typer.Exit(UsageError.exit_code)


def _each(
    access: FleetClient, ids: Sequence[str], verb: _Verb, as_json: bool
) -> list[dict[str, Any]]:
    """Change jobs portion by portion, and print each result at once. If a portion fails, --json prints what is done beside the error."""
    from groupwise.api.schemas.fleet import portions

    done: list[dict[str, Any]] = []
    for some in portions(ids):
        try:
            changed = verb.many(access, some)
        except GroupwiseError as error:
            if not as_json:
                raise
            print_json({"error": {"code": error.code, "message": error.message}, "done": done})
            raise typer.Exit(report_error(error, as_json=False)) from error
        done += changed
        for each in changed:
            if "error" in each:
                job_id, message = each["job_id"], each["error"]["message"]
                about = message if job_id in message else f"{job_id}: {message}"
                say(f"not done: {about}")
            elif not as_json:
                say(verb.said(each))
    return done


def cancel(
    job: JobsArgument = None,
    fleet_at: FleetOption = None,
    reason: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The reason, which the job's events keep.")
    ] = None,
    status: StatusOption = None,
    project: ProjectOption = None,
    name: NameOption = None,
    label: LabelOption = None,
    as_json: AsJson = False,
) -> None:
    """End jobs, whatever they are doing.

    One that runs is told to end (TERM, then KILL); it is `cancelled` once nothing of it is left. Options choose among all that have not
    ended.
    """
    from groupwise.jobs.fleet.states import FINAL, JobStatus

    verb = _Verb(
        "cancel",
        frozenset(JobStatus) - FINAL,
        lambda access, job_id: access.cancel(job_id, reason),
        lambda access, ids: access.cancel_all(ids, reason),
        _cancelled,
    )
    _do(fleet_at, job, _JobFilter(status, project, name, label), verb, as_json)


def _cancelled(job: dict[str, Any]) -> str:
    if job["status"] == "running":
        return f"{job['job_id']} is being ended on {job['assigned_vm']}"
    return _is_now(job)


def _is_now(job: dict[str, Any]) -> str:
    return f"{job['job_id']} is {job['status']}"


def retry(
    job: JobsArgument = None,
    fleet_at: FleetOption = None,
    status: StatusOption = None,
    project: ProjectOption = None,
    name: NameOption = None,
    label: LabelOption = None,
    as_json: AsJson = False,
) -> None:
    """Start failed or cancelled jobs again.

    They go on from their last checkpoint, where they have one. Options choose among all that have failed or were cancelled.
    """
    from groupwise.jobs.fleet.states import RETRIED_FROM

    verb = _Verb(
        "retry",
        frozenset(RETRIED_FROM),
        lambda access, job_id: access.retry(job_id),
        lambda access, ids: access.retry_all(ids),
        lambda job: f"{_is_now(job)} again",
    )
    _do(fleet_at, job, _JobFilter(status, project, name, label), verb, as_json)


def hold(
    job: JobsArgument = None,
    fleet_at: FleetOption = None,
    status: StatusOption = None,
    project: ProjectOption = None,
    name: NameOption = None,
    label: LabelOption = None,
    as_json: AsJson = False,
) -> None:
    """Have jobs wait until they are released.

    Options choose among all that wait.
    """
    waiting = frozenset(("queued", "pending"))
    verb = _Verb(
        "hold",
        waiting,
        lambda access, job_id: access.hold(job_id),
        lambda access, ids: access.hold_all(ids),
        _is_now,
    )
    _do(fleet_at, job, _JobFilter(status, project, name, label), verb, as_json)


def release(
    job: JobsArgument = None,
    fleet_at: FleetOption = None,
    status: StatusOption = None,
    project: ProjectOption = None,
    name: NameOption = None,
    label: LabelOption = None,
    as_json: AsJson = False,
) -> None:
    """Let held jobs go on.

    Options choose among all that are held.
    """
    held = frozenset(("held",))
    verb = _Verb(
        "release",
        held,
        lambda access, job_id: access.release(job_id),
        lambda access, ids: access.release_all(ids),
        _is_now,
    )
    _do(fleet_at, job, _JobFilter(status, project, name, label), verb, as_json)


def logs(
    job: JobArgument,
    fleet_at: FleetOption = None,
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
            parser=whole("--tail", 20, least=0, most=100_000),
        ),
    ] = None,
) -> None:
    """Print what a job wrote.

    The log is mirrored to the control machine while the job runs; of several attempts the newest one's is shown.
    """
    from groupwise.cli.fleet.follow import follow_log, print_log

    with fleet(fleet_at) as access:
        if follow:
            follow_log(access, job, tail=tail, epoch=epoch, rank=rank)
        else:
            print_log(access, job, tail=tail, epoch=epoch, rank=rank)


def prune(
    older_than: Annotated[
        str, typer.Option(metavar="AGE", help="That ended so long ago: 30d, 12h, 0s for all.")
    ],
    fleet_at: FleetOption = None,
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
    """Remove old jobs, their logs, artefacts and files.

    Their files are those that no other job names. What happened to them stays in the events. Jobs of which something may still run, and
    those that others wait for, are kept.
    """
    from groupwise.cli.fleet.words import seconds_of, statuses
    from groupwise.jobs.fleet.states import FINAL

    age = seconds_of("--older-than", older_than)
    wanted = statuses(status)
    if wanted is not None and (wrong := sorted(wanted - FINAL)):
        raise UsageError(
            f"--status {', '.join(wrong)}: only jobs that have ended are removed: completed, failed, cancelled."
        )
    with fleet(fleet_at) as access:
        result = access.prune(
            age,
            project=project,
            status=None if wanted is None else sorted(wanted),
            dry_run=dry_run,
        )
    if as_json:
        print_json(result)
        return
    from groupwise.core.terminal.quantities import byte_size

    would = "would remove" if dry_run else "removed"
    freed = byte_size(result["bytes"])
    what = "logs and artefacts" if dry_run else "logs, artefacts and files"
    say(f"{would} {len(result['jobs'])} jobs, {freed} of {what}")
