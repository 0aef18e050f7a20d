"""`groupwise runs rescore`: recorded rollouts judged by other rewards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from groupwise.cli.options import AsJson, option
from groupwise.cli.output import write_json
from groupwise.cli.printing import (
    RUNS,
    RunArgument,
    RunsDir,
    indent,
    print_pairs,
    print_table,
    print_text,
    round_number,
)
from groupwise.cli.rl import Overrides
from groupwise.core.terminal.text import one_line, shorten

if TYPE_CHECKING:
    from groupwise.training.review.rescore import Agreement, Rescored

LONGEST_REASON = 600
"""Largest number of characters shown of a reason, which may quote a completion. The file with the rollouts has the complete text."""


def rescore(
    run: RunArgument,
    overrides: Overrides = None,
    task_module: Annotated[
        str | None, option("TASK", "Task whose get_reward_funcs score.", "--task-module", "-t")
    ] = None,
    rewards: Annotated[
        str | None,
        option("REWARD[,…]", "Built-in rewards by name, or MODULE:FUNCTION, instead of a task's."),
    ] = None,
    dir: RunsDir = RUNS,
    step: Annotated[
        int | None, option(None, "Only this step, an index from 0; default: all steps.")
    ] = None,
    limit: Annotated[
        int | None, option("N", "Maximum number of groups to score, the newest ones.", min=1)
    ] = None,
    rows: Annotated[
        int, option("N", "Number of rollouts to show, those that moved farthest.", min=0)
    ] = 10,
    as_json: AsJson = False,
) -> None:
    """Score recorded rollouts with other rewards, and compare with what was recorded. The record stays as it is.

    Exit code 1 if a reward function failed on every rollout, or none could be scored.
    """
    from groupwise.training.review.rescore import rescore as run_again

    result = run_again(
        run,
        task=task_module,
        rewards=tuple(rewards.split(",")) if rewards else (),
        runs_dir=dir,
        overrides=tuple(overrides or ()),
        step=step,
        limit=limit,
    )
    if as_json:
        write_json(result.summary(rows))
    else:
        weighted = [
            name if weight == 1 else f"{weight:g} × {name}"
            for name, weight in result.rewards.items()
        ]
        print_text(f"{result.run} by {', '.join(weighted)}\n")
        head = ("step", "rollouts", "old", "new", "correlation", "same order", "moved", "failed")
        steps = [_agreement_row(f"{step}", agreement) for step, agreement in result.steps.items()]
        print_table(
            [head, *steps, *([_agreement_row("all", result.overall)] if len(steps) > 1 else [])]
        )
        # The most frequent failures, and the functions that failed on every rollout.
        if result.overall.reasons:
            print_text("\nwhat failed, and why")
        for reason, count in result.overall.reasons.items():
            print_text(indent(shorten(f"{count} × {reason}", LONGEST_REASON), "  "))
        for reward in result.failed_rewards:
            print_text(f"\n`{reward}` FAILED on every rollout.")
        farthest = result.farthest(rows)
        if farthest:
            print_text(f"\nmoved farthest in their group, of {result.overall.moved}")
            head = ("step", "draw", "member", "place", "reward", "completion")
            print_table([head, *(_moved_row(row) for row in farthest)])
        print_text("")
        print_pairs([("results", result.path), ("rollouts", result.rows_path)])
    raise typer.Exit(result.exit_code)


def _agreement_row(name: str, agreement: Agreement) -> tuple[str, ...]:
    values = (agreement.old, agreement.new, agreement.correlation, agreement.agreement)
    texts = ["–" if value is None else f"{value:.3f}" for value in values]
    return (
        name,
        str(agreement.rollouts),
        *texts,
        str(agreement.moved),
        str(agreement.failed or ""),
    )


def _moved_row(row: Rescored) -> tuple[str, ...]:
    return (
        str(row.step),
        str(row.draw),
        str(row.member),
        f"{round_number(row.old_rank)} → {round_number(row.new_rank)}",
        f"{round_number(row.old)} → {round_number(row.new)}",
        shorten(one_line(row.completion), 60),
    )
