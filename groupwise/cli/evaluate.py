"""`groupwise eval`: answer the held-out prompts of a task and measure the answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from groupwise.cli.rl import ConfigOption, JsonOption, Overrides, TaskOption


def evaluate(
    config: ConfigOption,
    task_module: TaskOption,
    overrides: Overrides = None,
    policy: Annotated[
        str,
        typer.Option(
            metavar="base|PATH|RUN[@STEP]|HUB_ID[@REV]",
            help="Which weights answer: the model itself, those in a folder, a run's, or from the hub.",
        ),
    ] = "base",
    samples_per_prompt: Annotated[
        int | None,
        typer.Option(metavar="K", min=1, help="Completions of each prompt."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where the per-row results are written.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Evaluate a model on the held-out prompts of a task."""
    from groupwise.cli.output import write_result
    from groupwise.loops.evaluate import evaluate as run

    result = run(
        config,
        task_module,
        overrides=tuple(overrides or ()),
        policy=policy,
        samples_per_prompt=samples_per_prompt,
        output=output,
    )
    write_result(result.summary, as_json=as_json)
