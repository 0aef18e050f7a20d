"""What the commands of `groupwise fleet` have in common: which fleet is meant, who asks, and how its database is reached.

An embedded fleet needs no server to be asked: every command opens its database, does one short transaction, and rings the doorbell.
"""

from __future__ import annotations

import getpass
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, ParamSpec, TypeVar

import typer

from groupwise.errors import UsageError

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from groupwise.fleet.settings import FleetPlace
    from groupwise.fleet.store.database import Database
    from groupwise.fleet.verbs.actor import Actor

P = ParamSpec("P")
T = TypeVar("T")

FleetOption = Annotated[
    str | None,
    typer.Option(
        "--fleet",
        metavar="F",
        help="Folder of the fleet. Without it: GROUPWISE_FLEET, else ~/.groupwise/fleet.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="Id of a job.")]
MachineArgument = Annotated[str, typer.Argument(metavar="VM", help="Name of a machine.")]


class Access:
    """A fleet that commands can ask."""

    def __init__(self, place: FleetPlace, database: Database, actor: Actor) -> None:
        self.place = place
        self.database = database
        self.actor = actor

    def read(
        self, verb: Callable[Concatenate[Session, Actor, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """What a verb says that changes nothing."""
        return self.database.read(lambda session: verb(session, self.actor, *args, **kwargs))

    def change(
        self, verb: Callable[Concatenate[Session, Actor, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """What a verb says that changes something: it is committed."""
        return self.database.run(lambda session: verb(session, self.actor, *args, **kwargs))

    def ring(self, *job_ids: str) -> None:
        """Wake a dispatcher for these jobs. Nothing depends on it: it looks every few seconds anyway."""
        from groupwise.fleet.doorbells.chosen import doorbell_of, ring_and_leave

        # NATS is for programs: to connect to it would take longer than what is told by the others.
        ring_and_leave(doorbell_of(self.place.folder, self.database, None, os.environ), job_ids)


def place_of(told: str | None, options: dict[str, Any] | None = None) -> FleetPlace:
    """The fleet that is meant, which has to be one whose database this machine can reach."""
    require_installed()
    from groupwise.fleet.settings import FleetAddress, find

    found = find(told, os.environ, options)
    if isinstance(found, FleetAddress):
        raise UsageError(
            f"{found.url} is the address of a fleet's API, and this command works on the fleet itself: run it where the fleet runs, "
            "or use `groupwise.fleet.client` from Python. Without --fleet and GROUPWISE_FLEET, the fleet in ~/.groupwise/fleet is meant."
        )
    return found


@contextmanager
def fleet(told: str | None, *, make: bool = False) -> Generator[Access, None, None]:
    """The fleet that is meant, opened. `make`: an embedded one that is not there yet is made."""
    place = place_of(told)
    from groupwise.fleet.settings import DATABASE_FILE
    from groupwise.fleet.store import database as databases

    if place.is_embedded and not make and place.settings.database is None:
        _expect_file(place, place.folder / DATABASE_FILE)
    database = databases.connect(place.database_url)
    try:
        databases.check_schema(database)
        yield Access(place, database, whoever_types())
    finally:
        database.close()


def _expect_file(place: FleetPlace, file: Any) -> None:
    if not file.exists():
        raise UsageError(
            f"there is no fleet in {place.folder}. `groupwise fleet up` makes one; --fleet or GROUPWISE_FLEET name another folder."
        )


def whoever_types() -> Actor:
    """The person at this terminal, as events will have them."""
    from groupwise.fleet.verbs.actor import Actor

    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a user id that no file of this machine names
        name = str(os.getuid())
    return Actor(f"user:{name}")


def require_installed() -> None:
    """Raise UsageError unless what a fleet needs is there."""
    from importlib.util import find_spec

    missing = [name for name in ("sqlalchemy", "alembic", "asyncssh") if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"A fleet needs {', '.join(missing)}: pip install 'groupwise[fleet]'. The machines that it runs jobs on need only Python."
        )


def require_server() -> None:
    """Raise UsageError unless what its API needs is there."""
    from importlib.util import find_spec

    missing = [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]
    if missing:
        raise UsageError(f"The API needs {' and '.join(missing)}: pip install 'groupwise[fleet]'.")
