"""`groupwise fleet key`: makes, lists and revokes the keys of the fleet's HTTP API."""

from __future__ import annotations

from typing import Annotated

import typer

from groupwise.cli.fleet.access import FleetOption, fleet
from groupwise.cli.fleet.printing import clock_time
from groupwise.cli.options import AsJson, WrappingGroup, command, option
from groupwise.cli.output import say, write_json
from groupwise.cli.parsing import seconds
from groupwise.cli.printing import print_table
from groupwise.core.errors import UsageError

ROLES = ("read", "act", "admin")
"""Names of the roles of a key."""

keys = typer.Typer(
    cls=WrappingGroup,
    help="Keys of the HTTP API: make, list, revoke.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@command(keys, "new")
def new(
    role: Annotated[str, typer.Argument(metavar="ROLE", help="read, act or admin.")],
    fleet_at: FleetOption = None,
    project: Annotated[
        list[str] | None,
        option("P", "Let the key reach only jobs of this project. May be repeated."),
    ] = None,
    lasts: Annotated[
        float | None,
        option(
            "TIME",
            "How long the key is valid, such as 90d or 12h; default: until it is revoked.",
            parser=seconds("--lasts"),
        ),
    ] = None,
    note: Annotated[str | None, option("TEXT", "Who or what the key is for.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make a key for the HTTP API, and print it. It cannot be shown again.

        groupwise fleet key new act --project team-a --lasts 90d

    A key of the role `read` may look. `act` may also submit, stop, hold and resume jobs. `admin` may also change machines, projects and
    keys.
    """
    if role not in ROLES:
        raise UsageError(f"{role!r} is not a role; there are {', '.join(ROLES)}.")
    with fleet(fleet_at, make=True) as access:
        new_key = access.make_key(role, projects=project or None, seconds=lasts, note=note)
    if as_json:
        write_json(new_key)
        return
    typer.echo(new_key["key"])
    say("The key is not shown again. Its owner puts it into GROUPWISE_API_KEY.")
    for note in new_key["notes"]:
        say(f"Note: {note}.")


@command(keys, "list")
def listing(fleet_at: FleetOption = None, as_json: AsJson = False) -> None:
    """List the keys: role, projects, dates; never the keys themselves."""
    with fleet(fleet_at) as access:
        rows = access.keys()
    if as_json:
        write_json(rows)
        return
    print_table(
        [
            ("key", "role", "projects", "made", "until", "note"),
            *(
                (
                    key["key_id"],
                    key["role"],
                    "all" if key["projects"] is None else ", ".join(key["projects"]),
                    clock_time(key["created_at"]),
                    "revoked" if key["revoked_at"] else clock_time(key["expires_at"]),
                    key["note"] or "",
                )
                for key in rows
            ),
        ]
    )


@command(keys, "revoke")
def revoke(
    key: Annotated[
        str, typer.Argument(metavar="KEY", help="Id of the key, as `key list` shows it.")
    ],
    fleet_at: FleetOption = None,
) -> None:
    """Refuse a key from the next request on."""
    with fleet(fleet_at) as access:
        access.revoke_key(key)
    typer.echo(f"{key} is revoked.")
