"""`groupwise rl` trains with rewards, `groupwise sft` with given answers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

from groupwise.cli.options import AsJson, flag, option
from groupwise.cli.output import collect_garbage_rarely

RESUME_VARIABLE = "RESUME_FROM"
"""The environment variable by which a fleet passes the checkpoint from which an attempt resumes."""

ConfigOption = Annotated[
    Path | None,
    option(
        "C.yaml",
        "Config file (YAML). Optional: keys can also be set as key=value.",
        "--config",
        "-c",
    ),
]
TaskOption = Annotated[
    str | None,
    option(
        "TASK",
        "The task: a Python file, package.module, module:attribute, or the name of a "
        "built-in or installed one. Without it, data and rewards come from the config.",
        "--task-module",
        "-t",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="key=value",
        help="Override config keys, e.g. training.learning_rate=1e-5",
        show_default=False,
    ),
]


def config_of(
    config: Path | None, overrides: list[str] | None, task: str | None = None
) -> Path | dict[str, Any]:
    """The path of the config, or an empty config that consists only of defaults and overrides."""
    if config is None and not overrides:
        from groupwise.cli.printing import command_to_configure
        from groupwise.core.errors import UsageError

        line, _ = command_to_configure(task or "TASK")
        raise UsageError(
            f"Missing option '--config'. `{line}` writes such a YAML file. Or give every key that you need as key=value: "
            "model.name=tiny …"
        )
    return {} if config is None else config


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeOptions:
    """Options for resuming a run."""

    resume: Annotated[
        bool, flag("Continue the newest unfinished run of this name.", "--resume")
    ] = False
    resume_from: Annotated[
        str | None,
        option(
            "RUN@STEP|PATH",
            "Continue from this checkpoint. RESUME_FROM in the environment overrides it and --resume.",
        ),
    ] = None

    def keywords(self) -> dict[str, Any]:
        """The resume arguments of a training. A checkpoint in the environment overrides all of them.

        A fleet runs the same command for every attempt of a job; if an earlier attempt wrote a checkpoint, the next one resumes from it.
        """
        options = asdict(self)
        if checkpoint := os.environ.get(RESUME_VARIABLE):
            typer.echo(f"resuming from {checkpoint}, which {RESUME_VARIABLE} names", err=True)
            return {**dict.fromkeys(options), "resume": False, "resume_from": checkpoint}
        return options

    def words(self) -> list[str]:
        """The options as they stand in a command."""
        given = {f"--{name.replace('_', '-')}": value for name, value in asdict(self).items()}
        pairs = (
            [name] if value is True else [name, value] for name, value in given.items() if value
        )
        return [word for pair in pairs for word in pair]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions(ResumeOptions):
    """Options for the weights or checkpoint that a training starts from."""

    init_from: Annotated[
        str | None,
        option("RUN@STEP|PATH", "Start a new run from these weights, with a new optimiser."),
    ] = None


def rl(
    *,
    config: ConfigOption = None,
    task_module: TaskOption = None,
    overrides: Overrides = None,
    start: StartOptions,
    dry_run: Annotated[
        bool, flag("Print the plan, with --json also the whole config; train nothing.", "--dry-run")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train a model on a task with reinforcement learning."""
    _train("rl", config, task_module, overrides, start, dry_run=dry_run, as_json=as_json)


def write_outcome(
    summary: Mapping[str, Any],
    *,
    as_json: bool,
    commands_after: Callable[[Path], list[tuple[str, str]]] | None = None,
    after_plan: str | None = None,
) -> None:
    """Write a plan or a result: as JSON, or as text with advice and the next commands (by default, those after a run of `rl`).

    `after_plan` is the command that trains by the plan.
    """
    from groupwise.cli.output import write_json, write_result
    from groupwise.cli.printing import (
        commands_after_run,
        print_advice,
        print_held_out,
        print_next,
        print_plan,
        print_warnings,
    )

    if as_json:
        write_json(summary)
        return
    if "plan" in summary:
        print_plan(summary)
        if after_plan:
            print_next((after_plan, "the training"))
        return
    in_words = ("advice", "warnings", "held_out")
    values = {name: value for name, value in summary.items() if name not in in_words}
    write_result(values, as_json=False)
    if summary.get("held_out"):
        print_held_out(summary["held_out"])
    warnings = summary.get("warnings", ())
    print_warnings((w["step"], w["signal"], w["kind"], w["message"]) for w in warnings)
    print_advice(summary.get("advice", ()))
    if "folder" in summary:
        print_next(*(commands_after or commands_after_run)(Path(summary["folder"])))


def sft(
    *,
    config: ConfigOption = None,
    task_module: TaskOption = None,
    overrides: Overrides = None,
    start: StartOptions,
    dry_run: Annotated[
        bool,
        flag(
            "Print the plan and the first rows with ⟦trained parts⟧, with --json also the whole config; "
            "train nothing.",
            "--dry-run",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train a model on given answers (supervised fine-tuning)."""
    _train("sft", config, task_module, overrides, start, dry_run=dry_run, as_json=as_json)


def _train(
    kind: Literal["rl", "sft"],
    config: Path | None,
    task_module: str | None,
    overrides: list[str] | None,
    start: StartOptions,
    *,
    dry_run: bool,
    as_json: bool,
) -> NoReturn:
    """Run the training and write its outcome. Its processes start before the config is read; a dry run has none. Raises Exit."""
    processes: AbstractContextManager[None] = nullcontext()
    if dry_run:
        collect_garbage_rarely()
    else:
        from groupwise.engine.distributed.prefork import early_zygote

        processes = early_zygote(overrides or ())
    with processes:  # ends them if the config needs none
        if kind == "rl":
            from groupwise.training.loops.rl_start import rl as train
        else:
            from groupwise.training.loops.sft_start import sft as train
        result = train(
            config_of(config, overrides, task_module),
            task_module,
            overrides=tuple(overrides or ()),
            dry_run=dry_run,
            **start.keywords(),
        )
    from groupwise.cli.printing import (
        command_line,
        command_to_show,
        commands_after_run,
        commands_after_sft,
    )

    def commands_after(folder: Path) -> list[tuple[str, str]]:
        if result.summary.get("state") == "interrupted":
            resume = ["--resume-from", str(folder)] if start.resume_from else ["--resume"]
            line = command_line(kind, config, task_module, *resume, *(overrides or ()))
            return [(line, "the rest of the training"), command_to_show(folder)]
        return (
            commands_after_run(folder) if kind == "rl" else commands_after_sft(folder, task_module)
        )

    words = (*start.words(), *(overrides or ()))
    write_outcome(
        result.summary,
        as_json=as_json,
        commands_after=commands_after,
        after_plan=command_line(kind, config, task_module, *words),
    )
    raise typer.Exit(result.exit_code)
