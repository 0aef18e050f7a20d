"""`groupwise runs replay`: what a step learned, computed again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from groupwise.cli.options import AsJson
from groupwise.cli.output import write_json
from groupwise.cli.printing import (
    RUNS,
    RunArgument,
    RunsDir,
    print_table,
    print_text,
)

if TYPE_CHECKING:
    from groupwise.training.review.replay import Replay, ReplayedStep, StepValues


def replay(
    run: RunArgument,
    dir: RunsDir = RUNS,
    step: Annotated[
        int | None, typer.Option(help="This step, an index from 0; default: the last one.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compute a step again from its recorded rollouts, and see whether loss, gradient and weights are those of the record.

    Begins at the newest checkpoint before it. Exit code 1 if they are not.
    """
    from groupwise.training.review.replay import replay as run_again

    found = run_again(run, step=step, runs_dir=dir)
    if as_json:
        write_json(found.summary())
    else:
        head = ("step", "", "loss", "grad_norm", "version", "fingerprint", "")
        rows = [row for step in found.steps for row in _rows(step)]
        print_text(f"{found.run} from {found.start}\n")
        print_table([head, *rows])
        for reason in found.rounding:
            print_text(f"\nother last bits are expected: {reason}")
        print_text(f"\n{verdict(found)}")
    raise typer.Exit(found.exit_code)


def _rows(step: ReplayedStep) -> tuple[tuple[str, ...], tuple[str, ...]]:
    agrees = "equal" if step.exact else "agrees"
    result = f"DIFFERS: {', '.join(step.differences)}" if step.differences else agrees
    return (
        (str(step.step), "recorded", *_cells(step.recorded), ""),
        ("", "replayed", *_cells(step.replayed), result),
    )


def _cells(learnt: StepValues) -> tuple[str, ...]:
    numbers = ["–" if value is None else repr(value) for value in (learnt.loss, learnt.grad_norm)]
    return (*numbers, str(learnt.version), learnt.fingerprint)


def verdict(found: Replay) -> str:
    """The verdict, printed as the last line."""
    if found.start_differs:
        return f"DOES NOT AGREE: it began with other weights: {found.start_differs}."
    wrong = [step for step in found.steps if step.differences]
    if wrong:
        return f"DOES NOT AGREE with the record from step {wrong[0].step} on: {', '.join(wrong[0].differences)}."
    if found.exact:
        return f"step {found.step} agrees with its record, bit for bit."
    tolerance = max(step.tolerance or 0.0 for step in found.steps)
    return f"step {found.step} agrees with its record up to rounding (within {tolerance:.1%} of the gradient norm)."
