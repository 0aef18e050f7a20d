"""`groupwise launch sweep`: end machines that are paid for beyond their deadlines."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from groupwise.cli.launch.watch import call_backend
from groupwise.cli.options import AsJson, DryRun, option
from groupwise.cli.output import say, write_json
from groupwise.core.errors import UsageError
from groupwise.core.extras import require_packages

if TYPE_CHECKING:
    from groupwise.jobs.clouds.backend import Backend
    from groupwise.jobs.launch.places import JobBackend
    from groupwise.jobs.launch.rentals import SweepResult


def sweep(
    at: Annotated[
        list[str] | None,
        option(
            "PLACE",
            "aws:REGION; default: all paid places of jobs that were launched from here. May be repeated.",
        ),
    ] = None,
    name: Annotated[
        str | None, option("JOB", "End the machines of this job, before their deadline too.")
    ] = None,
    profile: Annotated[
        str | None, option("P", "With --at: the profile of the credentials.")
    ] = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """End rented machines that are past their deadline, of all users of the account.

    The deadline of a machine is its job's --time-limit. --dry-run shows what would be ended.
    """
    from groupwise.jobs.clouds.backend import CloudError, Renting
    from groupwise.jobs.launch import rentals

    async def swept(backend: Backend) -> SweepResult:
        assert isinstance(backend, Renting), "that is what RENTING says"
        return await rentals.sweep(backend, name, dry_run=dry_run)

    swept_places: list[tuple[str, SweepResult]] = []
    failed: list[str] = []
    for place in _places_to_sweep(at, profile):
        try:
            swept_places.append((str(place), call_backend(place, swept)))
        except CloudError as error:  # the other places are still swept
            failed.append(f"{place}: {error.message}")
    failed += [f"{place}: {problem}" for place, result in swept_places for problem in result.failed]
    for problem in failed:
        say(f"NOT swept: {problem}")
    if as_json:
        documents = [
            {
                "place": place,
                "overdue": [asdict(machine) for machine in result.overdue],
                "left": [asdict(machine) for machine in result.kept],
            }
            for place, result in swept_places
        ]
        write_json({"swept": documents, "failed": failed})
    else:
        _print_swept(swept_places, dry_run=dry_run)
    if failed:
        raise typer.Exit(1)


def _print_swept(swept_places: list[tuple[str, SweepResult]], *, dry_run: bool) -> None:
    from groupwise.jobs.launch import rentals

    verb = "would be ended" if dry_run else "is ended"
    for place, result in swept_places:
        for machine in result.overdue:
            say(
                f"{machine.id}, of {machine.owner or 'unknown'} for {machine.job}, {verb} ({place})"
            )
        for machine in result.kept:
            say(
                f"{machine.job}, of {machine.owner or 'unknown'}: {rentals.kept_message(machine)} ({place})"
            )
        if not result.overdue and not result.kept:
            say(f"nothing is there ({place})")


def _places_to_sweep(at: list[str] | None, profile: str | None) -> list[JobBackend]:
    """The places that --at names, otherwise all paid places of jobs launched from here. Raises UsageError."""
    from groupwise.jobs.launch import local_registry
    from groupwise.jobs.launch.places import AWS, MODAL, RENTING_KINDS, JobBackend

    if at is None:
        if profile is not None:
            raise UsageError("--profile is for --at.")
        paid_places = [
            note.place for note in local_registry.list_notes() if note.place.kind in RENTING_KINDS
        ]
        if not paid_places:
            raise UsageError(
                "no job was launched on a paid place from here; name one: --at aws:us-east-1"
            )
        accounts = {(str(place), place.detail.get("profile")): place for place in paid_places}
        return [*accounts.values()]
    require_packages("AWS", "launch,aws", "boto3")
    places: list[JobBackend] = []
    for word in at:
        kind, _, region = word.partition(":")
        if kind != AWS or not region:
            reason = "Modal ends its containers with their calls, so that none is left; " * (
                kind == MODAL
            )
            raise UsageError(
                f"--at {word}: {reason}a place that rents machines is expected, aws:REGION."
            )
        places.append(JobBackend(AWS, {"region": region, "profile": profile}))
    return places
