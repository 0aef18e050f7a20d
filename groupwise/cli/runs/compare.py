"""`groupwise runs compare`: two policies, prompt by prompt."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from groupwise.cli.options import AsJson, option
from groupwise.cli.output import write_json
from groupwise.cli.printing import (
    RUNS,
    RunsDir,
    command_to_compare,
    dir_option,
    indent,
    print_next,
    print_pairs,
    print_section,
    print_table,
    print_text,
    round_number,
)
from groupwise.core.terminal.quantities import counted
from groupwise.core.terminal.text import one_line

if TYPE_CHECKING:
    from groupwise.training.evaluation.statistics import Interval
    from groupwise.training.review.compare import Comparison, CurveChange

FORMS = "RUN, RUN@STEP, RUN@STEP:NAME, or a file."


def compare(
    a: Annotated[str, typer.Argument(metavar="A", help=f"The first policy: {FORMS}")],
    b: Annotated[str, typer.Argument(metavar="B", help=f"The second one: {FORMS}")],
    dir: RunsDir = RUNS,
    rows: Annotated[
        int, option("N", "Number of prompts to show, those that changed most.", min=0)
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Compare two runs or policies: on the held-out prompts that both answered, and by their rewards or losses in training.

    RUN means its evaluation after training, RUN@STEP the one after that step. `:NAME` chooses one of several. A file is a result of
    `groupwise eval`.
    """
    from groupwise.training.review.compare import compare_references

    comparison = compare_references(a, b, dir)
    if as_json:
        write_json(comparison.summary(rows))
    else:
        print_comparison(comparison, rows)
        if comparison.changed and not rows:
            line, purpose = command_to_compare(a, b)
            print_next((f"{line}{dir_option(dir)}", purpose))
        else:
            print_next((f"groupwise web{dir_option(dir)}", "both curves in a browser"))


def print_comparison(comparison: Comparison, rows: int = 0) -> None:
    """Print a comparison."""
    from groupwise.runs.tables import prompt_text

    print_pairs([("A", comparison.a.label), ("B", comparison.b.label)])
    for note in comparison.notes:
        print_text(f"note: {one_line(note)}")
    if comparison.metrics:
        if comparison.a.supervised:
            pairs = [f"held-out examples: the same {comparison.prompts} for both"]
        else:
            only_counts = (("A", comparison.only_a), ("B", comparison.only_b))
            pairs = [f"held-out prompts: {comparison.prompts} answered by both"]
            pairs += [f"{count} only in {name} left out" for name, count in only_counts if count]
        print_text(f"\n{', '.join(pairs)}")
        head = ("metric", "A", "B", "B − A [95 %]", "better", "worse", "equal")
        table: list[tuple[str, ...]] = [head]
        for metric in comparison.metrics:
            counts = [
                "" if n is None else str(n) for n in (metric.better, metric.worse, metric.equal)
            ]
            difference = (
                f"{metric.b - metric.a:+.3f}"
                if metric.change is None
                else _signed_interval(metric.change)
            )
            table.append(
                (metric.name, round_number(metric.a), round_number(metric.b), difference, *counts)
            )
        print_table(table)
    if comparison.curve:
        _print_curve(comparison.curve)
    as_json = partial(json.dumps, ensure_ascii=False)
    differences = [(key, " → ".join(map(as_json, pair))) for key, pair in comparison.config.items()]
    print_section("configuration", differences)
    for change in comparison.changed[:rows]:
        print_text(f"\n━━ reward {change.a:.3f} → {change.b:.3f} ━━")
        print_text(indent(prompt_text(change.prompt), "  │ "))
        for name, completion in (("A", change.completion_a), ("B", change.completion_b)):
            print_text(f"\n  {name}")
            print_text(indent(completion, "     "))


def _signed_interval(interval: Interval) -> str:
    return f"{interval.value:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}]"


def _print_curve(curve: CurveChange) -> None:
    print_text(f"\n{curve.metric} in training, {counted(curve.steps, 'step')} that both have")
    head = ("", "first steps", "last steps", "B − A, last steps [95 %]")
    change = _signed_interval(curve.change) if curve.change else "no draws with the same prompt"
    rows = [
        head,
        ("A", *map(round_number, curve.a), ""),
        ("B", *map(round_number, curve.b), change),
    ]
    print_table(rows if curve.metric == "reward" else [row[:3] for row in rows])
