"""`groupwise rl`: train."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigOption = Annotated[
    Path, typer.Option("--config", "-c", metavar="C.yaml", help="The YAML file that configures it.")
]
TaskOption = Annotated[
    str | None,
    typer.Option(
        "--task-module",
        "-t",
        metavar="T",
        help="The task: a Python file, package.module, module:attribute, or the name of a "
        "built-in or installed one. Without it, the config names data and rewards.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="key=value",
        help="Config keys set here, typed as in the file: training.learning_rate=1e-5",
        show_default=False,
    ),
]
ResumeOption = Annotated[
    bool, typer.Option("--resume", help="Go on with the newest unfinished run of this name.")
]
ResumeFromOption = Annotated[
    str | None, typer.Option(metavar="RUN@STEP", help="Go on from this checkpoint.")
]
InitFromOption = Annotated[
    str | None, typer.Option(metavar="RUN@STEP", help="Start a new run from these weights.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Write the result as one JSON object.")]


def rl(
    config: ConfigOption,
    task_module: TaskOption = None,
    overrides: Overrides = None,
    resume: ResumeOption = False,
    resume_from: ResumeFromOption = None,
    init_from: InitFromOption = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Show the resolved config and the plan; train nothing."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Train a model on a task with reinforcement learning."""
    from groupwise.cli.output import write_json, write_result
    from groupwise.loops.rl_start import rl as train

    result = train(
        config,
        task_module,
        overrides=tuple(overrides or ()),
        resume=resume,
        resume_from=resume_from,
        init_from=init_from,
        dry_run=dry_run,
    )
    if dry_run:
        write_json(result.summary)
    else:
        write_result(result.summary, as_json=as_json)
    raise typer.Exit(result.exit_code)
