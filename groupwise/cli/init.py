"""`groupwise init`: write a config for this machine."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from groupwise.cli.options import AsJson
from groupwise.cli.rl import Overrides


class Command(StrEnum):
    """The commands that a config can be for."""

    rl = "rl"
    sft = "sft"


def init(
    task: Annotated[
        str | None,
        typer.Option(
            "--task",
            "--task-module",
            "-t",
            metavar="TASK",
            help="The task: a Python file, package.module, module:attribute, or the name of a "
            "built-in or installed one.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", metavar="MODEL", help="A hub id, a folder, a .gguf file, or an alias."
        ),
    ] = None,
    foreign: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="In place of a task and a model: the GRPO config of TRL, open-r1 or Unsloth: YAML, JSON, a shell script, "
            "a Python file or a notebook.",
        ),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(
            "--processes",
            metavar="NUM",
            min=1,
            help="With --from: number of devices that the config was written for; default: 1.",
        ),
    ] = None,
    overrides: Overrides = None,
    command: Annotated[
        Command | None,
        typer.Option(
            "--for", help="Command that the config is for; default: rl, if that is possible."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="Default: TASK.yaml, TASK-sft.yaml, or with --from FILE-groupwise.yaml.",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite the file if it exists.")
    ] = False,
    no_measure: Annotated[
        bool,
        typer.Option("--no-measure", help="Load no weights; the time of a step stays unknown."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write a config: for a task and a model on this machine, or from one of TRL, open-r1 or Unsloth."""
    from groupwise.cli import findings
    from groupwise.cli.output import write_json
    from groupwise.core.errors import UsageError
    from groupwise.training.checks.init import init as run
    from groupwise.training.checks.init_from import init_from

    on_finding = None if as_json else findings.show_finding
    if foreign is not None:
        other_options = {
            "--task": task,
            "--model": model,
            "--for": command,
            "key=value words": overrides,
            "--no-measure": no_measure or None,
        }
        if ignored := [name for name, value in other_options.items() if value is not None]:
            raise UsageError(
                f"{', '.join(ignored)} has no effect with --from, whose file says everything. Leave it out, and change what it wrote."
            )
        report = init_from(
            foreign, processes=processes, out=out, force=force, on_finding=on_finding
        )
    elif task is None or model is None:
        raise UsageError(
            "Give --task and --model, or --from with a config of TRL, open-r1 or Unsloth."
        )
    elif processes is not None:
        raise UsageError("--processes has no effect without --from. Leave it out.")
    else:
        report = run(
            task,
            model,
            kind=None if command is None else command.value,
            overrides=tuple(overrides or ()),
            out=out,
            force=force,
            measure=not no_measure,
            on_finding=on_finding,
        )
    if as_json:
        write_json(report.summary)
        raise typer.Exit(report.exit_code)
    findings.show_title(f"wrote {report.details['file']}; go on with")
    for line in report.details["next"]:
        findings.show_text(line)
    raise typer.Exit(report.exit_code)
