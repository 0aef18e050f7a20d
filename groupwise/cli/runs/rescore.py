"""`groupwise runs rescore` judges recorded rollouts by other rewards, `groupwise runs replay` computes again what a step learned."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from groupwise.cli.options import AsJson, option
from groupwise.cli.output import write_json
from groupwise.cli.printing import (
    RUNS,
    RunArgument,
    RunsDir,
    indent,
    print_next,
    print_pairs,
    print_table,
    print_text,
    round_number,
)
from groupwise.cli.rl import Overrides
from groupwise.core.terminal.text import one_line, shorten

if TYPE_CHECKING:
    from groupwise.training.review.replay import Replay, ReplayedStep, StepValues
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
    step: Annotated[int | None, option("N", "Only this step; default: all steps.")] = None,
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
            head = ("step", "group", "rollout", "place", "reward", "completion")
            print_table([head, *(_moved_row(row) for row in farthest)])
        print_text("")
        print_pairs([("results", result.path), ("rollouts", result.rows_path)])
        if farthest:
            print_next(_rollouts_of(run, dir, farthest[0].step))
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
        str(row.group),
        str(row.rollout),
        f"{round_number(row.old_rank)} → {round_number(row.new_rank)}",
        f"{round_number(row.old)} → {round_number(row.new)}",
        shorten(one_line(row.completion), 60),
    )


def replay(
    run: RunArgument,
    dir: RunsDir = RUNS,
    step: Annotated[int | None, option("N", "This step; default: the last one.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compute a step again from its recorded rollouts, and see whether loss, gradient and weights are those of the record.

    It begins at the newest checkpoint before that step. Exit code 1 if something differs.
    """
    from groupwise.training.review.replay import replay as run_again

    result = run_again(run, step=step, runs_dir=dir)
    if as_json:
        write_json(result.summary())
    else:
        head = ("step", "", "loss", "grad_norm", "version", "fingerprint", "")
        rows = [row for step in result.steps for row in _step_rows(step)]
        print_text(f"{result.run} from {result.start}\n")
        print_table([head, *rows])
        for reason in result.rounding:
            print_text(f"\nother last bits are expected: {reason}")
        print_text(f"\n{verdict(result)}")
        if not result.exit_code:
            print_next(_rollouts_of(run, dir, result.step))
    raise typer.Exit(result.exit_code)


def _rollouts_of(run: str, dir: Path, step: int) -> tuple[str, str]:
    """The command that shows the rollouts of a step, and its purpose."""
    place = "" if dir == RUNS else f" --dir {shlex.quote(str(dir))}"
    line = f"groupwise runs rollouts {shlex.quote(run)} --step {step}{place}"
    return line, f"the rollouts of step {step}, with their recorded rewards"


def _step_rows(step: ReplayedStep) -> tuple[tuple[str, ...], tuple[str, ...]]:
    agrees = "equal" if step.exact else "agrees"
    result = f"DIFFERS: {', '.join(step.differences)}" if step.differences else agrees
    return (
        (str(step.step), "recorded", *_result_cells(step.recorded), ""),
        ("", "replayed", *_result_cells(step.replayed), result),
    )


def _result_cells(learnt: StepValues) -> tuple[str, ...]:
    numbers = ["–" if value is None else repr(value) for value in (learnt.loss, learnt.grad_norm)]
    return (*numbers, str(learnt.version), learnt.fingerprint)


def verdict(result: Replay) -> str:
    """The verdict, printed as the last line."""
    if result.start_differs:
        return f"DOES NOT AGREE: it began with other weights: {result.start_differs}."
    differing = [step for step in result.steps if step.differences]
    if differing:
        return f"DOES NOT AGREE with the record from step {differing[0].step} on: {', '.join(differing[0].differences)}."
    if result.exact:
        return f"step {result.step} agrees with its record, bit for bit."
    tolerance = max(step.tolerance or 0.0 for step in result.steps)
    return f"step {result.step} agrees with its record up to rounding (within {tolerance:.1%} of the gradient norm)."
