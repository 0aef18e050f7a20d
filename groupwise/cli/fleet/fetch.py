"""`groupwise fleet fetch`: downloads the outputs of a job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from groupwise.cli.fleet.access import FleetOption, JobArgument, fleet, progress
from groupwise.cli.fleet.jobs import EpochOption, RankOption
from groupwise.cli.options import AsJson, flag, option
from groupwise.cli.output import say, write_json
from groupwise.core.terminal.quantities import byte_size, counted


def fetch(
    job: JobArgument,
    path: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PATH...]", help="Files and folders to fetch; default: all."),
    ] = None,
    fleet_at: FleetOption = None,
    to: Annotated[Path | None, option("DIR", "Folder for the files; default: ./JOB.")] = None,
    checkpoints: Annotated[
        bool,
        flag(
            "Fetch its mirrored checkpoints instead of its outputs, also while it runs.",
            "--checkpoints",
        ),
    ] = False,
    epoch: EpochOption = None,
    rank: RankOption = 0,
    force: Annotated[bool, flag("Replace files that are there and differ.", "--force")] = False,
    as_json: AsJson = False,
) -> None:
    """Fetch a job's outputs; prints the folder.

    Each file appears whole, once its hash has been verified. Files that are there already stay, and interrupted ones are continued.
    """
    folder = Path(job) if to is None else to.expanduser()
    with fleet(fleet_at) as access, progress() as on_progress:
        result = access.fetch(
            job,
            folder,
            paths=path or (),
            checkpoints=checkpoints,
            epoch=epoch,
            rank=rank,
            force=force,
            on_progress=on_progress,
        )
    if as_json:
        write_json(result)
        return
    files = result["files"]
    kept_count = sum(file["kept"] for file in files)
    size = byte_size(sum(file["bytes"] for file in files))
    kept_note = f", {kept_count} of them here already" if kept_count else ""
    found = f": {counted(len(files), 'file')}, {size}{kept_note}" if files else " left no outputs"
    say(f"{result['job_id']}{found}")
    for path_left_out, reason in result["left_out"]:
        say(f"the fleet left out {path_left_out}: {reason.replace('_', ' ')}")
    if files:
        typer.echo(folder)
