"""`groupwise doctor`: examine model, template and engine on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from groupwise.cli.check import OptionalConfig
from groupwise.cli.options import AsJson, option
from groupwise.cli.rl import Overrides


def doctor(
    overrides: Overrides = None,
    config: OptionalConfig = None,
    task_module: Annotated[
        str | None,
        option(
            "TASK", "Use the prompts of this task, not the built-in ones.", "--task-module", "-t"
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Examine model and engine on this machine, and estimate costs."""
    from groupwise.cli import findings
    from groupwise.cli.output import collect_seldom, write_json
    from groupwise.cli.printing import command_line, print_next

    collect_seldom()
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
        if not report.exit_code and task_module is not None:
            line = command_line("rl", config, task_module, *(overrides or ()))
            print_next((line, "the training"))
    raise typer.Exit(report.exit_code)
