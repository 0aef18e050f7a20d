"""Shared by the commands of `groupwise fleet`: finds the fleet, opens a client for it, names the acting user, and shows progress.

A fleet is given as its folder on this machine, or as the address of its API. Commands use the same client for both, so they need not know
which it is. A folder needs no server (`groupwise.jobs.fleet.local`). An API at an address requires the key in GROUPWISE_API_KEY.
"""

from __future__ import annotations

import getpass
import os
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from groupwise.cli.options import option
from groupwise.cli.output import say
from groupwise.core.errors import UsageError
from groupwise.core.extras import require_packages
from groupwise.core.terminal.quantities import byte_size
from groupwise.core.terminal.text import one_line, shorten

if TYPE_CHECKING:
    from groupwise.jobs.fleet.client import FleetClient
    from groupwise.jobs.fleet.download import OnProgress
    from groupwise.jobs.fleet.local import LocalFleet
    from groupwise.jobs.fleet.settings import FleetPlace

PACKAGES = ("sqlalchemy", "alembic", "asyncssh")
"""Packages that a fleet needs."""
SHOW_SECONDS = 0.2
"""Seconds before the first line of progress, and between two lines; a quick transfer shows none."""
WIDEST = 78
TIMEOUT = 60.0
"""Timeout in seconds for one response of an API."""

FleetOption = Annotated[
    str | None,
    option(
        "F",
        "Folder of the fleet, or address of its API; default: GROUPWISE_FLEET, else ~/.groupwise/fleet.",
        "--fleet",
    ),
]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="Id of a job.")]
MachineArgument = Annotated[str, typer.Argument(metavar="VM", help="Name of a machine.")]


@contextmanager
def fleet(
    fleet_at: str | None, *, make: bool = False, timeout: float = TIMEOUT
) -> Generator[FleetClient, None, None]:
    """Open the fleet by its folder or its API.

    `make`: create an embedded fleet if it does not exist. `timeout`: seconds to wait for one response of an API.
    """
    from groupwise.jobs.fleet.settings import FleetAddress, find

    location = find(fleet_at, os.environ)
    if isinstance(location, FleetAddress):
        from groupwise.jobs.fleet.client import FleetClient

        with FleetClient(location.url, warn=say, timeout=timeout) as client:
            yield client
    else:
        with fleet_here(fleet_at, make=make) as local:
            yield local


@contextmanager
def fleet_here(fleet_at: str | None, *, make: bool = False) -> Generator[LocalFleet, None, None]:
    """Open the fleet by its folder; this machine must be able to reach its database."""
    from groupwise.jobs.fleet.settings import DATABASE_FILE

    place = place_of(fleet_at)
    file = place.folder / DATABASE_FILE
    embedded = place.is_embedded and place.settings.database is None
    if embedded and not make and not file.exists():
        raise UsageError(
            f"there is no fleet in {place.folder}. `groupwise fleet up` makes one; --fleet or GROUPWISE_FLEET name another folder, or the "
            "address of a fleet elsewhere."
        )
    from groupwise.jobs.fleet.local import LocalFleet  # only now: it takes half of the start

    with LocalFleet(place, terminal_user(), warn=say) as local:
        yield local


def place_of(fleet_at: str | None, options: dict[str, Any] | None = None) -> FleetPlace:
    """The folder and settings of the fleet. Raises UsageError for the address of an API."""
    advice = " The machines that it runs jobs on need only Python."
    require_packages("A fleet", "fleet", *PACKAGES, advice=advice)
    from groupwise.jobs.fleet.settings import FleetAddress, find

    location = find(fleet_at, os.environ, options)
    if isinstance(location, FleetAddress):
        raise UsageError(
            f"{location.url} is the address of a fleet's API, and this command works on the fleet itself, its database and folder: type it "
            "on the machine where the fleet runs. From here, `groupwise fleet status` says how it is doing. Without --fleet and "
            "GROUPWISE_FLEET, the fleet in ~/.groupwise/fleet is meant."
        )
    return location


def terminal_user() -> str:
    """The user of this terminal, in the form used in events: `user:NAME`."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # this machine has no name for the user id
        name = str(os.getuid())
    return f"user:{name}"


@contextmanager
def progress() -> Generator[OnProgress, None, None]:
    """Show progress in a line that is overwritten, and removed at the end. Shows nothing if standard error is not a terminal."""
    from groupwise.jobs.fleet.download import no_progress

    if not sys.stderr.isatty():
        yield no_progress
        return
    last_printed, has_printed = time.monotonic(), False

    def tell(received: int, total: int, label: str) -> None:
        nonlocal last_printed, has_printed
        if time.monotonic() - last_printed < SHOW_SECONDS:
            return
        last_printed, has_printed = time.monotonic(), True
        line = f"{byte_size(received)} of {byte_size(total)}, {one_line(label)}"
        typer.echo(f"\r\x1b[K{shorten(line, WIDEST)}", err=True, nl=False)

    try:
        yield tell
    finally:
        if has_printed:
            typer.echo("\r\x1b[K", err=True, nl=False)
