"""`groupwise sft`: warm up, or train, with given answers."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from groupwise.cli.options import AsJson, flag
from groupwise.cli.rl import ConfigOption, Overrides, StartOptions, TaskOption, config_of


def sft(
    *,
    config: ConfigOption = None,
    task_module: TaskOption = None,
    overrides: Overrides = None,
    start: StartOptions,
    dry_run: Annotated[
        bool,
        flag(
            "Print the resolved config, the plan, and the first rows with ⟦trained parts⟧ as JSON.",
            "--dry-run",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train a model on given answers (supervised fine-tuning)."""
    from groupwise.cli.output import collect_seldom, write_json, write_result

    if dry_run:
        collect_seldom()
    from groupwise.cli.printing import command_line, print_next
    from groupwise.training.loops.sft_start import sft as train

    result = train(
        config_of(config, overrides),
        task_module,
        overrides=tuple(overrides or ()),
        dry_run=dry_run,
        **start.keywords(),
    )
    if dry_run:
        write_json(result.summary)
    else:
        write_result(result.summary, as_json=as_json)
        if not as_json and "run" in result.summary:
            run = str(result.summary["run"])
            print_next(
                (f"groupwise runs plot {shlex.quote(run)}", "the curve of its loss"),
                (
                    command_line("rl", None, task_module, "--config", "C.yaml", "--init-from", run),
                    "reinforcement learning from these weights, with a config of rl",
                ),
            )
    raise typer.Exit(result.exit_code)
