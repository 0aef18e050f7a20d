"""`groupwise fleet up`, the roles of the control plane one by one, and the commands status, doctor and migrate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from groupwise.cli.fleet.access import FleetOption, fleet, place_of
from groupwise.cli.options import AsJson, option
from groupwise.cli.output import say, write_json
from groupwise.core.errors import UsageError
from groupwise.core.extras import require_packages

if TYPE_CHECKING:
    from groupwise.jobs.fleet.api.serve import Address

NatsOption = Annotated[
    str | None,
    option(
        "URL",
        "NATS, which wakes dispatchers and receives events; off: none. Default: nats://localhost:4222, and none with SQLite.",
        "--nats-url",
    ),
]
DatabaseOption = Annotated[
    str | None, option("URL", "PostgreSQL; default: SQLite in the fleet's folder.")
]
PollOption = Annotated[
    float | None,
    option("S", "Seconds between two looks at a machine; default: 15.", "--poll-seconds"),
]
ConcurrencyOption = Annotated[
    int | None,
    option("N", "Machines that are contacted at the same time; default: 64.", min=1, max=10_000),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenOptions:
    """Where and how the API listens."""

    port: Annotated[
        int | None,
        option(
            "N",
            "Port of the HTTP API; 0: any free port. Default: 8010 for `run api`; without it `up` starts no API.",
            min=0,
            max=65535,
        ),
    ] = None
    host: Annotated[
        str | None, option("ADDRESS", "Address where the API listens; default: 127.0.0.1.")
    ] = None
    tls_certificate: Annotated[str | None, option("FILE", "Certificate of the API, PEM.")] = None
    tls_key: Annotated[str | None, option("FILE", "Private key of the certificate, PEM.")] = None

    def address(self, default_port: int | None = None) -> Address | None:
        """The address where the API listens; None: there is no API. Raises UsageError."""
        port = default_port if self.port is None else self.port
        if port is None:
            for name in ("host", "tls_certificate", "tls_key"):
                if getattr(self, name) is not None:
                    option = f"--{name.replace('_', '-')}"
                    raise UsageError(f"{option} is for the API, which needs --port.")
            return None
        require_packages("The API", "fleet", "fastapi", "uvicorn")
        from groupwise.jobs.fleet.api.serve import Address

        return Address(self.host or "127.0.0.1", port, self.tls_certificate, self.tls_key)


def up(
    *,
    fleet_at: FleetOption = None,
    database: DatabaseOption = None,
    nats_url: NatsOption = None,
    poll_seconds: PollOption = None,
    listen: ListenOptions,
) -> None:
    """Start a fleet, which runs until this command ends.

    This machine is its first one; `vm add` adds others. Ctrl-C ends it; jobs that run are not ended, and the next `up` continues them.
    """
    options = {"database": database, "nats_url": nats_url, "poll_seconds": poll_seconds}
    _run_roles(fleet_at, None, listen.address(), **options)


def poller(
    fleet_at: FleetOption = None,
    database: DatabaseOption = None,
    poll_seconds: PollOption = None,
    concurrency: ConcurrencyOption = None,
) -> None:
    """Watch all machines and their GPUs."""
    _run_roles(
        fleet_at, "poller", database=database, poll_seconds=poll_seconds, concurrency=concurrency
    )


def dispatcher(
    fleet_at: FleetOption = None,
    database: DatabaseOption = None,
    nats_url: NatsOption = None,
    concurrency: ConcurrencyOption = None,
) -> None:
    """Start jobs on machines and follow them to their end.

    With PostgreSQL there may be several at once.
    """
    _run_roles(
        fleet_at, "dispatcher", database=database, nats_url=nats_url, concurrency=concurrency
    )


def requeue(
    fleet_at: FleetOption = None, database: DatabaseOption = None, nats_url: NatsOption = None
) -> None:
    """Find rows of the database that contradict each other, once a minute, and repair them."""
    _run_roles(fleet_at, "requeue", database=database, nats_url=nats_url)


def tracker(
    fleet_at: FleetOption = None, database: DatabaseOption = None, nats_url: NatsOption = None
) -> None:
    """Notify NATS and webhooks of jobs that have ended.

    It also forwards lines of logs if the setting `ship_logs` says so.
    """
    _run_roles(fleet_at, "tracker", database=database, nats_url=nats_url)


def api(
    *,
    fleet_at: FleetOption = None,
    database: DatabaseOption = None,
    nats_url: NatsOption = None,
    listen: ListenOptions,
) -> None:
    """Serve the HTTP API, and nothing else.

    It needs the database and the fleet's folder; there may be several at once. `up --port` includes it.
    """
    _run_roles(fleet_at, "api", listen.address(8010), database=database, nats_url=nats_url)


def _run_roles(
    fleet_at: str | None, role: str | None, address: Address | None = None, **options: Any
) -> None:
    settings = {name: value for name, value in options.items() if value is not None}
    place = place_of(fleet_at, settings)
    from groupwise.jobs.fleet.processes import ROLES
    from groupwise.jobs.fleet.up import run

    raise typer.Exit(run(place, ROLES if role is None else (role,), say=say, address=address))


def migrate(fleet_at: FleetOption = None, database: DatabaseOption = None) -> None:
    """Create the tables of the database, or update them."""
    place = place_of(fleet_at, {} if database is None else {"database": database})
    from groupwise.jobs.fleet.processes import role_holder
    from groupwise.jobs.fleet.store import database as databases

    connection = databases.connect(place.database_url)
    try:
        databases.migrate(
            connection, lambda: role_holder(place.folder) if place.is_embedded else None
        )
        say(f"{connection.name} is up to date")
    finally:
        connection.close()


def status(fleet_at: FleetOption = None, as_json: AsJson = False) -> None:
    """Show how the fleet is doing, and what needs attention."""
    with fleet(fleet_at) as access:
        fleet_status = access.status()
    if as_json:
        write_json(fleet_status)
        return
    from groupwise.cli.fleet.printing import print_status

    print_status(fleet_status)


def doctor(
    fleet_at: FleetOption = None,
    vm: Annotated[list[str] | None, option("VM", "Only this machine. May be repeated.")] = None,
    as_json: AsJson = False,
) -> None:
    """Examine database, control plane and machines."""
    from groupwise.cli import findings

    place = place_of(fleet_at)
    from groupwise.jobs.fleet.doctor import examine

    report = examine(place, vm, None if as_json else findings.show_finding)
    if as_json:
        write_json(report.summary)
    else:
        findings.show_verdict(report)
    raise typer.Exit(report.exit_code)
