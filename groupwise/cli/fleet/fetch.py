"""`groupwise fleet fetch`: what a job left, in a folder of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from groupwise.cli.fleet.access import AsJson, FleetOption, JobArgument, fleet
from groupwise.cli.fleet.progress import progress
from groupwise.cli.fleet.words import whole
from groupwise.cli.output import say
from groupwise.cli.printing import print_json
from groupwise.core.terminal.quantities import byte_size


def fetch(
    job: JobArgument,
    path: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PATH...]", help="Files and folders of it; without: all."),
    ] = None,
    told: FleetOption = None,
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="DIR", help="Where to; without it: a folder JOB here."),
    ] = None,
    checkpoints: Annotated[
        bool,
        typer.Option(
            "--checkpoints",
            help="Its mirrored checkpoints in place of its artefacts, as it runs too.",
        ),
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
            metavar="N", help="Of this member of a gang.", parser=whole("--rank", 1, least=0)
        ),
    ] = 0,
    force: Annotated[
        bool, typer.Option("--force", help="Replace files there that are others.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Bring here what a job left; prints the folder.

    Each file appears whole, once its hash was found right. What is there already is kept, and what was interrupted goes on.
    """
    folder = Path(job) if to is None else to.expanduser()
    with fleet(told) as access, progress() as tell:
        found = access.fetch(
            job,
            folder,
            paths=path or (),
            checkpoints=checkpoints,
            epoch=epoch,
            rank=rank,
            force=force,
            tell=tell,
        )
    if as_json:
        print_json(found)
        return
    files = found["files"]
    kept = sum(each["kept"] for each in files)
    size = byte_size(sum(each["bytes"] for each in files))
    already = f", {kept} of them here already" if kept else ""
    say(f"{found['job_id']}: {len(files)} file{'' if len(files) == 1 else 's'}, {size}{already}")
    for left, why in found["left_out"]:
        say(f"the fleet left out {left}: {why.replace('_', ' ')}")
    typer.echo(folder)
