"""`groupwise check` looks at a task and its rewards before training, `groupwise doctor` at model, template and engine on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from groupwise.cli.options import AsJson, flag, option
from groupwise.cli.output import collect_garbage_rarely, write_json
from groupwise.cli.rl import Overrides, TaskOption

OptionalConfig = Annotated[
    Path | None,
    option(
        "C.yaml",
        "The config of the training, a YAML file; without one the model `tiny` is used.",
        "--config",
        "-c",
    ),
]


def check(
    task_module: TaskOption = None,
    overrides: Overrides = None,
    config: OptionalConfig = None,
    completions: Annotated[
        str | None,
        option(
            "FILE|RUN",
            "Also score these: a JSONL file with prompt (or example) and completion, or the rollouts of a run.",
        ),
    ] = None,
    rows: Annotated[int, option("NUM", "Examples to try the rewards on.", min=1)] = 16,
    as_json: AsJson = False,
) -> None:
    """Check a task and its rewards before any training. No model is loaded."""
    collect_garbage_rarely()
    from groupwise.cli import findings
    from groupwise.cli.printing import command_line, command_to_configure, print_next
    from groupwise.training.checks.check import check as run

    report = run(
        task_module,
        config,
        overrides=tuple(overrides or ()),
        completions=completions,
        rows=rows,
        on_finding=None if as_json else findings.show_finding,
    )
    if as_json:
        write_json(report.summary)
        raise typer.Exit(report.exit_code)
    if report.details.get("table"):
        findings.show_title("what completions earn, on average")
        findings.show_table(findings.reward_rows(report.details["table"]))
    seen_by = "model sees" if report.details["prompts_rendered_by"] else "task gives"
    for number, prompt in enumerate(report.details["prompts"]):
        findings.show_title(f"prompt {number}, as the {seen_by} it")
        findings.show_text(prompt)
    findings.show_verdict(report)
    if not report.exit_code and config is None and task_module is not None:
        print_next(command_to_configure(task_module))
    elif not report.exit_code:
        line = command_line("rl", config, task_module, *(overrides or ()))
        print_next((line, "the training"))
    raise typer.Exit(report.exit_code)


def doctor(
    overrides: Overrides = None,
    config: OptionalConfig = None,
    task_module: Annotated[
        str | None,
        option(
            "TASK", "Use the prompts of this task, not the built-in ones.", "--task-module", "-t"
        ),
    ] = None,
    clear_cache: Annotated[
        bool,
        flag(
            "Check nothing; delete the weights that earlier runs have cached on disk.",
            "--clear-cache",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check model and machine, and estimate memory and time of a run."""
    if clear_cache:
        _clear_weight_cache(as_json=as_json)
        return
    from groupwise.cli import findings
    from groupwise.cli.output import collect_garbage_rarely, write_json
    from groupwise.cli.printing import command_line, command_to_configure, print_next

    collect_garbage_rarely()
    from groupwise.training.checks.doctor import doctor as run

    report = run(
        config,
        task_module,
        overrides=tuple(overrides or ()),
        on_finding=None if as_json else findings.show_finding,
    )
    if as_json:
        write_json(report.summary)
    else:
        findings.show_verdict(report)
        if not report.exit_code:
            if task_module is None and config is None:
                line = command_line("check", None, "TASK.py")
                print_next((line, "whether the rewards of your task can teach anything"))
            elif task_module is not None and config is None and not overrides:
                print_next(command_to_configure(task_module))
            elif task_module is not None:
                line = command_line("rl", config, task_module, *(overrides or ()))
                print_next((line, "the training"))
    raise typer.Exit(report.exit_code)


def _clear_weight_cache(*, as_json: bool) -> None:
    from groupwise.engine.models.native import weight_cache

    folder, size = weight_cache.weights_folder(), weight_cache.clear()
    if as_json:
        write_json({"folder": str(folder), "deleted_bytes": size})
    else:
        typer.echo(f"{size / 2**20:,.0f} MiB deleted in {folder}")
