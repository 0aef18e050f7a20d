"""`groupwise fleet up`, the roles of the control plane one by one, and the commands status, doctor and migrate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from groupwise.cli.fleet.access import AsJson, FleetOption, fleet, place_of, require_server
from groupwise.cli.fleet.words import number, whole
from groupwise.cli.output import say
from groupwise.cli.printing import print_json
from groupwise.core.errors import UsageError

if TYPE_CHECKING:
    from groupwise.jobs.fleet.api.serve import Address

NO_NATS = "off: none. Unless said, nats://localhost:4222, and none with SQLite"
NatsOption = Annotated[
    str | None,
    typer.Option("--nats-url", metavar="URL", help=f"NATS, which wakes dispatchers; {NO_NATS}."),
]
ToldNatsOption = Annotated[
    str | None,
    typer.Option("--nats-url", metavar="URL", help=f"NATS, which is told; {NO_NATS}."),
]
DatabaseOption = Annotated[
    str | None,
    typer.Option(metavar="URL", help="PostgreSQL; without it: SQLite in the fleet's folder."),
]
PollOption = Annotated[
    float | None,
    typer.Option(
        "--poll-seconds",
        metavar="S",
        help="Between two looks at a machine; 15.",
        parser=number("--poll-seconds", "5"),
    ),
]
ConcurrencyOption = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Machines that are spoken to at once; 64.",
        parser=whole("--concurrency", 64, most=10_000),
    ),
]


PORT = whole("--port", 8010, least=0, most=65535)
HostOption = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help="Where the API listens; without it: 127.0.0.1."),
]
CertificateOption = Annotated[
    str | None, typer.Option("--tls-certificate", metavar="FILE", help="PEM, for the API.")
]
TlsKeyOption = Annotated[
    str | None, typer.Option("--tls-key", metavar="FILE", help="Its private key, PEM.")
]


def up(
    fleet_at: FleetOption = None,
    database: DatabaseOption = None,
    nats_url: NatsOption = None,
    poll_seconds: PollOption = None,
    port: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Answer the HTTP API here as well; 0: any free port.", parser=PORT
        ),
    ] = None,
    host: HostOption = None,
    tls_certificate: CertificateOption = None,
    tls_key: TlsKeyOption = None,
) -> None:
    """Start a fleet in this process.

    This machine is its first one; `vm add` takes in others. Ctrl-C ends it; jobs that run go on, and are picked up by the next `up`.
    """
    address = _address(port, host, tls_certificate, tls_key)
    _run(
        fleet_at,
        None,
        address,
        database=database,
        nats_url=nats_url,
        poll_seconds=poll_seconds,
    )


def poller(
    fleet_at: FleetOption = None,
    database: DatabaseOption = None,
    poll_seconds: PollOption = None,
    concurrency: ConcurrencyOption = None,
) -> None:
    """Look at all machines and their GPUs, for ever."""
    _run(fleet_at, "poller", database=database, poll_seconds=poll_seconds, concurrency=concurrency)


def dispatcher(
    fleet_at: FleetOption = None,
    database: DatabaseOption = None,
    nats_url: NatsOption = None,
    concurrency: ConcurrencyOption = None,
) -> None:
    """Start jobs on machines and see them to their end.

    With PostgreSQL there may be several at once.
    """
    _run(fleet_at, "dispatcher", database=database, nats_url=nats_url, concurrency=concurrency)


def requeue(
    fleet_at: FleetOption = None, database: DatabaseOption = None, nats_url: NatsOption = None
) -> None:
    """Look once a minute for what should not be, and mend it."""
    _run(fleet_at, "requeue", database=database, nats_url=nats_url)


def tracker(
    fleet_at: FleetOption = None, database: DatabaseOption = None, nats_url: ToldNatsOption = None
) -> None:
    """Tell NATS and webhooks of jobs that have ended.

    It also sends lines of logs on, where the setting `ship_logs` says so.
    """
    _run(fleet_at, "tracker", database=database, nats_url=nats_url)


def api(
    fleet_at: FleetOption = None,
    database: DatabaseOption = None,
    nats_url: NatsOption = None,
    port: Annotated[
        int | None,
        typer.Option(metavar="N", help="Without it: 8010. 0: any free port.", parser=PORT),
    ] = None,
    host: HostOption = None,
    tls_certificate: CertificateOption = None,
    tls_key: TlsKeyOption = None,
) -> None:
    """Answer the HTTP API, and nothing else.

    It needs the database and the fleet's folder; there may be several at once. `up --port` answers by itself.
    """
    address = _address(8010 if port is None else port, host, tls_certificate, tls_key)
    _run(fleet_at, "api", address, database=database, nats_url=nats_url)


def _address(
    port: int | None, host: str | None, certificate: str | None, key: str | None
) -> Address | None:
    """The address where the API listens; None: no API."""
    beside = {"--host": host, "--tls-certificate": certificate, "--tls-key": key}
    given = [name for name, value in beside.items() if value is not None]
    if port is None:
        if given:
            raise UsageError(f"{given[0]} is of the API, which answers only with --port.")
        return None
    require_server()
    from groupwise.jobs.fleet.api.serve import Address

    return Address(host or "127.0.0.1", port, certificate, key)


def _run(
    fleet_at: str | None, role: str | None, address: Address | None = None, **options: Any
) -> None:
    given = {name: value for name, value in options.items() if value is not None}
    place = place_of(fleet_at, given)
    from groupwise.jobs.fleet.processes import ROLES
    from groupwise.jobs.fleet.up import run

    raise typer.Exit(run(place, ROLES if role is None else (role,), say=_say, address=address))


def _say(text: str) -> None:
    say(text)


def migrate(fleet_at: FleetOption = None, database: DatabaseOption = None) -> None:
    """Make the tables of the database, or update them."""
    place = place_of(fleet_at, {} if database is None else {"database": database})
    from groupwise.jobs.fleet.processes import who_plays
    from groupwise.jobs.fleet.store import database as databases

    opened = databases.connect(place.database_url)
    try:
        databases.migrate(opened, lambda: who_plays(place.folder) if place.is_embedded else None)
        _say(f"{opened.name} is up to date")
    finally:
        opened.close()


def status(fleet_at: FleetOption = None, as_json: AsJson = False) -> None:
    """Say how the fleet is doing, and what needs a look."""
    with fleet(fleet_at) as access:
        found = access.status()
    if as_json:
        print_json(found)
        return
    from groupwise.cli.fleet.printing import print_status

    print_status(found)


def doctor(
    fleet_at: FleetOption = None,
    vm: Annotated[
        list[str] | None, typer.Option(metavar="VM", help="Only this machine; several times.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Examine database, control plane and machines."""
    from groupwise.cli import findings

    place = place_of(fleet_at)
    from groupwise.jobs.fleet.doctor import examine

    report = examine(place, vm, None if as_json else findings.show_finding)
    if as_json:
        print_json(report.summary)
    else:
        findings.show_verdict(report)
    raise typer.Exit(report.exit_code)
