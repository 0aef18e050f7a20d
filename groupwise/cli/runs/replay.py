"""`groupwise runs replay`: what a step learned, computed again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from groupwise.cli.options import AsJson, option
from groupwise.cli.output import write_json
from groupwise.cli.printing import RUNS, RunArgument, RunsDir, print_table, print_text

if TYPE_CHECKING:
    from groupwise.training.review.replay import Replay, ReplayedStep, StepValues


def replay(
    run: RunArgument,
    dir: RunsDir = RUNS,
    step: Annotated[
        int | None, option(None, "This step, an index from 0; default: the last one.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compute a step again from its recorded rollouts, and see whether loss, gradient and weights are those of the record.

    Begins at the newest checkpoint before it. Exit code 1 if they are not.
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
    raise typer.Exit(result.exit_code)


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
