"""`groupwise environments`: install, list and remove environments of other libraries, each in a virtual environment of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from groupwise.cli.options import AsJson, command, flag, option

app = typer.Typer(rich_markup_mode=None)


def install(
    package: Annotated[
        str,
        typer.Argument(
            metavar="PACKAGE", help="A package on PyPI, a local folder, or git+https://…"
        ),
    ],
    kind: Annotated[str, option("KIND", "The library that it is written for.")] = "verifiers",
    name: Annotated[
        str | None, option("NAME", "Name of the environment; default: that of the package.")
    ] = None,
    also: Annotated[
        list[str] | None,
        option("PACKAGE", "Another package to install with it. May be repeated.", "--with"),
    ] = None,
    locked: Annotated[
        Path | None, option("FILE", "Install the versions of this lock.txt.", exists=True)
    ] = None,
    again: Annotated[bool, flag("Reinstall it if it exists.", "--again")] = False,
    as_json: AsJson = False,
) -> None:
    """Install an environment into a virtual environment of its own. Prints how to use it."""
    from groupwise.cli.output import say, write_json
    from groupwise.core.errors import UsageError
    from groupwise.tasks.external import installed
    from groupwise.tasks.external.kinds import KINDS

    if kind not in KINDS:
        raise UsageError(f"--kind is {kind!r}; it is one of {', '.join(sorted(KINDS))}.")
    made = installed.install(
        package,
        kind=kind,
        name=name,
        extras=also or (),
        locked=locked,
        again=again,
        say=not as_json,
    )
    if as_json:
        write_json(_as_dict(made))
    else:
        library = KINDS[kind].library
        version = made.version_of(library)
        typer.echo(f"{made.name}: {library} {version}, {made.python}")
        usual = KINDS[kind].environment  # not null: it has many environments in it
        own = installed.name_of(package)
        module = "NAME" if usual else made.name if own == library else own
        where = "" if made.name == (usual or module) else f" task.environment={made.name}"
        say(f"next: groupwise check --task-module {kind}:{module}{where}")


def list_environments(as_json: AsJson = False) -> None:
    """List the installed environments."""
    from groupwise.cli.output import write_json
    from groupwise.cli.printing import print_table
    from groupwise.tasks.external import installed
    from groupwise.tasks.external.kinds import KINDS

    found = installed.list_installed()
    if as_json:
        write_json([_as_dict(made) for made in found])
        return
    if not found:
        typer.echo(
            "No environment is installed. `groupwise environments install PACKAGE` installs one."
        )
        return
    rows = [
        [
            made.name,
            f"{made.kind} {made.version_of(KINDS[made.kind].library)}",
            made.requirements[0],
        ]
        for made in found
    ]
    print_table([["name", "library", "package"], *rows])


def remove(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the environment.")],
    as_json: AsJson = False,
) -> None:
    """Remove an environment."""
    from groupwise.cli.output import write_json
    from groupwise.tasks.external import installed

    installed.remove(name)
    if as_json:
        write_json({"removed": name})
    else:
        typer.echo(f"{name} is removed.")


def _as_dict(made: object) -> dict[str, object]:
    from groupwise.tasks.external.installed import Installed

    assert isinstance(made, Installed), "what `installed` returns"
    return {
        "name": made.name,
        "kind": made.kind,
        "requirements": list(made.requirements),
        "python": str(made.python),
        "lock": str(made.lock),
    }


command(app, "install")(install)
command(app, "list")(list_environments)
command(app, "remove")(remove)
