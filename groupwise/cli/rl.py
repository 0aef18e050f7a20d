"""`groupwise rl`: train."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from groupwise.cli.options import AsJson

RESUME_VARIABLE = "RESUME_FROM"
"""The environment variable by which a fleet says from which checkpoint an attempt goes on."""

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        metavar="C.yaml",
        help="The YAML file that configures it. Without one, every key is given as key=value.",
    ),
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
    str | None,
    typer.Option(
        metavar="RUN@STEP|PATH",
        help="Go on from this checkpoint; the environment's RESUME_FROM, where it is set, says which one in place of "
        "what is given here.",
    ),
]
InitFromOption = Annotated[
    str | None, typer.Option(metavar="RUN@STEP", help="Start a new run from these weights.")
]


def config_of(config: Path | None, overrides: list[str] | None) -> Path | dict[str, Any]:
    """The file, or nothing but the defaults, to which the overrides add."""
    if config is None and not overrides:
        from groupwise.core.errors import UsageError

        raise UsageError(
            "Missing option '--config'. Give a YAML file, or every key that you need as key=value: model.name=tiny …"
        )
    return {} if config is None else config


def ways_to_start(
    resume: bool, resume_from: str | None, init_from: str | None = None
) -> dict[str, Any]:
    """The given ways to start, unless the environment names a checkpoint.

    A job is the same command at each of its attempts; if an earlier attempt got to a checkpoint, the next one goes on from it.
    """
    checkpoint = os.environ.get(RESUME_VARIABLE)
    if not checkpoint:
        return {"resume": resume, "resume_from": resume_from, "init_from": init_from}
    typer.echo(f"going on from {checkpoint}, as {RESUME_VARIABLE} says", err=True)
    return {"resume": False, "resume_from": checkpoint, "init_from": None}


def rl(
    config: ConfigOption = None,
    task_module: TaskOption = None,
    overrides: Overrides = None,
    resume: ResumeOption = False,
    resume_from: ResumeFromOption = None,
    init_from: InitFromOption = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Show the resolved config and the plan; train nothing."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train a model on a task with reinforcement learning."""
    from groupwise.cli.output import collect_seldom, write_json, write_result

    if dry_run:
        collect_seldom()
    from groupwise.cli.printing import next_commands, print_advice, print_section
    from groupwise.training.loops.rl_start import rl as train

    result = train(
        config_of(config, overrides),
        task_module,
        overrides=tuple(overrides or ()),
        dry_run=dry_run,
        **ways_to_start(resume, resume_from, init_from),
    )
    if dry_run:
        write_json(result.summary)
    else:
        told = (
            result.summary
            if as_json
            else {k: v for k, v in result.summary.items() if k != "advice"}
        )
        write_result(told, as_json=as_json)
        if not as_json:
            print_advice(result.summary.get("advice", ()))
        if not as_json and "run" in result.summary:
            print_section("next", next_commands(result.summary["run"]))
    raise typer.Exit(result.exit_code)
