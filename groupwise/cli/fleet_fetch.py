"""`groupwise fleet fetch`: what a job left, in a folder of this machine."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from groupwise.cli.fleet_access import AsJson, FleetOption, JobArgument, fleet
from groupwise.cli.fleet_words import whole
from groupwise.cli.output import say
from groupwise.cli.printing import print_json
from groupwise.display.quantities import byte_size
from groupwise.display.text import one_line, shorten

SHOW_SECONDS = 0.2
"""Between two lines of progress."""
WIDEST = 78


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
    with fleet(told) as access:
        from groupwise.fleet.download import tell_nobody

        found = access.fetch(
            job,
            folder,
            paths=path or (),
            checkpoints=checkpoints,
            epoch=epoch,
            rank=rank,
            force=force,
            tell=_progress() if sys.stderr.isatty() else tell_nobody,
        )
    if as_json:
        print_json(found)
        return
    _sum_up(found)
    typer.echo(folder)


def _progress() -> Callable[[int, int, str], None]:
    """A line of the terminal that is written over."""
    last = 0.0

    def tell(here: int, of: int, path: str) -> None:
        nonlocal last
        if time.monotonic() - last < SHOW_SECONDS and here < of:
            return
        last = time.monotonic()
        line = f"{byte_size(here)} of {byte_size(of)}, {one_line(path)}"
        end = "\r" if here < of else "\r\x1b[K"
        typer.echo(f"\r\x1b[K{shorten(line, WIDEST)}" if here < of else end, err=True, nl=False)

    return tell


def _sum_up(found: dict[str, Any]) -> None:
    files = found["files"]
    kept = sum(each["kept"] for each in files)
    size = byte_size(sum(each["bytes"] for each in files))
    already = f", {kept} of them here already" if kept else ""
    say(f"{found['job_id']}: {len(files)} file{'' if len(files) == 1 else 's'}, {size}{already}")
    for path, why in found["left_out"]:
        say(f"the fleet left out {path}: {why.replace('_', ' ')}")
