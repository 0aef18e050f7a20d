"""`groupwise init`: write a config for this machine."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from groupwise.cli.options import AsJson, flag, option
from groupwise.cli.rl import Overrides


class Command(StrEnum):
    """The commands that a config can be for."""

    rl = "rl"
    sft = "sft"


def init(
    task: Annotated[
        str | None,
        option(
            "TASK",
            "The task: a Python file, package.module, module:attribute, or the name of a "
            "built-in or installed one.",
            "--task-module",
            "--task",
            "-t",
        ),
    ] = None,
    model: Annotated[
        str | None,
        option("MODEL", "A hub id, a folder, a .gguf file, or an alias.", "--model", "-m"),
    ] = None,
    foreign: Annotated[
        Path | None,
        option(
            "FILE",
            "In place of a task and a model: the GRPO config of TRL, open-r1 or Unsloth: YAML, JSON, a shell script, "
            "a Python file or a notebook.",
            "--from",
        ),
    ] = None,
    processes: Annotated[
        int | None,
        option(
            "NUM",
            "With --from: number of devices that the config was written for; default: 1.",
            min=1,
        ),
    ] = None,
    overrides: Overrides = None,
    command: Annotated[
        Command | None,
        option(
            None, "Command that the config is for; default: rl, if the task allows it.", "--for"
        ),
    ] = None,
    out: Annotated[
        Path | None,
        option(
            "FILE",
            "File to write; default: TASK.yaml, TASK-sft.yaml, or with --from FILE-groupwise.yaml.",
            "--out",
            "-o",
        ),
    ] = None,
    force: Annotated[bool, flag("Overwrite the file if it exists.", "--force")] = False,
    no_measure: Annotated[
        bool, flag("Load no weights; the time of a step stays unknown.", "--no-measure")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write a config: for a task and a model on this machine, or from one of TRL, open-r1 or Unsloth."""
    from groupwise.cli import findings
    from groupwise.cli.output import collect_garbage_rarely, write_json
    from groupwise.cli.printing import print_next
    from groupwise.core.errors import UsageError

    collect_garbage_rarely()
    from groupwise.training.init.init import init as run
    from groupwise.training.init.init_from import init_from

    on_finding = None if as_json else findings.show_finding
    if foreign is not None:
        other_options = {
            "--task-module": task,
            "--model": model,
            "--for": command,
            "--no-measure": no_measure or None,
        }
        if ignored := [name for name, value in other_options.items() if value is not None]:
            raise UsageError(
                f"With --from, the file says everything: leave out {', '.join(ignored)}, or set single keys by key=value."
            )
        report = init_from(
            foreign,
            processes=processes,
            overrides=tuple(overrides or ()),
            out=out,
            force=force,
            on_finding=on_finding,
        )
    elif task is None or model is None:
        raise UsageError(
            "Give --task-module and --model, or --from with a config of TRL, open-r1 or Unsloth."
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
    written = [report.details["file"], *report.details.get("files_beside", ())]
    findings.show_title(f"wrote {' and '.join(written)}")
    print_next(*((line, _purpose(line)) for line in report.details["next"]))
    raise typer.Exit(report.exit_code)


def _purpose(line: str) -> str:
    """What one of the commands is for that `init` writes into the config and prints."""
    if line.endswith("--dry-run"):
        return "the plan: memory, and the first prompt as the model sees it"
    purposes = {
        "eval": "how often the model is right before any training",
        "check": "whether the rewards can teach anything, before any training",
        "doctor": "whether model and machine work together, and what a run costs",
    }
    return purposes.get(line.split()[1], "the training")
