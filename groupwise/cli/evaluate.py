"""`groupwise eval`: answer the held-out prompts of a task and measure the answers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from groupwise.cli.rl import ConfigOption, JsonOption, Overrides, TaskOption

if TYPE_CHECKING:
    from collections.abc import Sequence

    from groupwise.evaluation.evaluate import EvalResult


def evaluate(
    config: ConfigOption,
    task_module: TaskOption = None,
    overrides: Overrides = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="base|PATH|RUN[@STEP]|HUB_ID[@REV]",
            help="Which weights answer: the model itself (the default), those in a folder, a run's, or from the hub. "
            "Given several times, the first is compared with each of the others.",
        ),
    ] = None,
    samples_per_prompt: Annotated[
        int | None,
        typer.Option(metavar="K", min=1, help="Completions of each prompt."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where the per-row results are written.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Evaluate a model on the held-out prompts of a task."""
    from groupwise.cli.output import write_result
    from groupwise.evaluation.evaluate import evaluate_each

    results = evaluate_each(
        config,
        task_module,
        policy or ["base"],
        overrides=tuple(overrides or ()),
        samples_per_prompt=samples_per_prompt,
        output=output,
    )
    if len(results) == 1:
        write_result(results[0].summary, as_json=as_json)
    else:
        _write_several(results, as_json)


def _write_several(results: Sequence[EvalResult], as_json: bool) -> None:
    from groupwise.cli.output import write_json
    from groupwise.cli.runs_compare import print_comparison
    from groupwise.review.compare import compare_sides, side_of_file

    sides = [side_of_file(result.path) for result in results if result.path]
    comparisons = [compare_sides(sides[0], other) for other in sides[1:]]
    if as_json:
        found = [result.summary for result in results]
        write_json({"evaluations": found, "comparisons": [each.summary() for each in comparisons]})
        return
    for number, comparison in enumerate(comparisons):
        typer.echo("\n" if number else "", nl=False)
        print_comparison(comparison)
