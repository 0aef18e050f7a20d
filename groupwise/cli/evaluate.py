"""`groupwise eval`: answer the held-out prompts of a task, or the questions of suites, and measure the answers."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from groupwise.cli.options import AsJson, flag, option
from groupwise.cli.rl import Overrides, TaskOption

if TYPE_CHECKING:
    from groupwise.training.evaluation.evaluate import EvalResult
    from groupwise.training.evaluation.suite_evaluation import SuiteRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteOptions:
    """How suites are run; the names of the fields are those of `SuiteRequest`."""

    endpoint: Annotated[
        str | None,
        option("URL", "URL of the service that answers the suites.", "--endpoint", "--base-url"),
    ] = None
    endpoint_model: Annotated[
        str | None,
        option("NAME", "Name of the model there. With --serve: only needed if several are served."),
    ] = None
    api_key_env: Annotated[
        str | None, option("NAME", "Environment variable with the key; default: OPENAI_API_KEY.")
    ] = None
    serve: Annotated[
        str | None,
        option(
            "COMMAND",
            "In place of an endpoint: a command that serves the policy. It must contain {policy} or {merged}, and {port}; it "
            "may contain {base} and {gpus}.",
        ),
    ] = None
    temperature: Annotated[float | None, option("NUM", "Temperature for a suite; default: 0.")] = (
        None
    )
    top_p: Annotated[
        float | None,
        option("NUM", "top_p for a suite; default: that of the service.", min=0, max=1),
    ] = None
    max_new_tokens: Annotated[
        int | None, option("NUM", "Maximum tokens per answer of a suite; default: 32768.", min=1)
    ] = None
    concurrency: Annotated[
        int | None, option("NUM", "Requests of a suite at the same time; default: 16.", min=1)
    ] = None
    timeout: Annotated[
        float | None, option("SECONDS", "Time for one request of a suite; default: 900.", min=1)
    ] = None
    max_prompts: Annotated[
        int | None, option("NUM", "Maximum questions per suite, for a trial.", min=1)
    ] = None
    time_limit: Annotated[
        float | None,
        option("SECONDS", "Time for each suite, and for the start of a server; default: 14400."),
    ] = None
    program: Annotated[
        str | None,
        option(
            "COMMAND", "Command that runs lighteval; default: GROUPWISE_LIGHTEVAL, else lighteval."
        ),
    ] = None
    runs_dir: Annotated[
        Path | None, option("DIR", "With a suite: the folder that holds the runs.", "--dir")
    ] = None

    def given(self) -> dict[str, Any]:
        """The options that were given."""
        options = {name: value for name, value in asdict(self).items() if value is not None}
        for name in ("serve", "program"):
            if name in options:
                options[name] = tuple(shlex.split(options[name]))
        return options


def evaluate(
    context: typer.Context,
    *,
    config: Annotated[
        Path | None, option("C.yaml", "The config, a YAML file.", "--config", "-c")
    ] = None,
    task_module: TaskOption = None,
    overrides: Overrides = None,
    policy: Annotated[
        list[str] | None,
        option(
            "base|PATH|RUN[@STEP]|HUB_ID[@REV]",
            "The weights that answer: the model itself (the default), those in a folder, of a run, or from the hub. "
            "If repeated, the first is compared with each of the others.",
        ),
    ] = None,
    samples_per_prompt: Annotated[
        int | None, option("NUM", "Completions per prompt.", min=1)
    ] = None,
    output: Annotated[
        Path | None,
        option(
            "FILE",
            "File for the results, with every answer; default: in results/ of the run, for base in results/ next to the runs.",
        ),
    ] = None,
    suite: Annotated[
        list[str] | None,
        option(
            "NAME",
            "In place of a config: math_500, aime24, aime25, gpqa_diamond, lcb, lcb_v4 or all, run by lighteval. May be repeated.",
        ),
    ] = None,
    suites: SuiteOptions,
    dry_run: Annotated[
        bool, flag("Show what would be evaluated; load no model, send no request.", "--dry-run")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate a model on held-out prompts of a task, or on suites."""
    suite_options = suites.given()
    common = {"samples_per_prompt": samples_per_prompt, "output": output}
    if suite:
        _refuse_options(
            {"config": config, "task_module": task_module, "overrides": overrides}, "with"
        )
        suite_options |= {name: value for name, value in common.items() if value is not None}
        request = _suite_request(tuple(suite), policy, suite_options)
        if dry_run:
            from groupwise.training.evaluation.suite_evaluation import plan

            _show_plan(context, plan(request), as_json=as_json)
        else:
            _evaluate_suites(request, as_json=as_json)
        return
    _refuse_options(suite_options, "without")
    if config is None and not overrides:
        raise typer.BadParameter(
            "say what is evaluated: --config C.yaml, its keys as key=value, or --suite NAME with an --endpoint."
        )
    source: Path | dict[str, Any] = {} if config is None else config
    options: dict[str, Any] = {**common, "overrides": tuple(overrides or ())}
    task = (source, task_module, policy or ["base"])
    if dry_run:
        from groupwise.cli.output import collect_garbage_rarely

        collect_garbage_rarely()
        from groupwise.training.evaluation.evaluate import plan_policies

        _show_plan(context, plan_policies(*task, **options), as_json=as_json)
    else:
        _evaluate_task(task, options, as_json=as_json)


def _show_plan(context: typer.Context, summary: dict[str, Any], *, as_json: bool) -> None:
    """Show what a dry run found, and the command that does it."""
    from groupwise.cli.output import write_json
    from groupwise.cli.printing import command_to_do_it, print_next, print_plan

    if as_json:
        write_json(summary)
    else:
        print_plan(summary)
        print_next((command_to_do_it(context), "the evaluation"))


def _evaluate_task(
    task: tuple[Path | dict[str, Any], str | None, list[str]],
    options: dict[str, Any],
    *,
    as_json: bool,
) -> None:
    """Evaluate the policies on a task."""
    from groupwise.cli.output import write_json
    from groupwise.engine.distributed.prefork import early_zygote

    with early_zygote(options["overrides"]):
        from groupwise.cli.printing import command_line, command_to_compare, print_next
        from groupwise.training.evaluation.evaluate import evaluate_policies

        results = evaluate_policies(*task, **options)
    if len(results) == 1:
        if as_json:
            write_json(results[0].summary)
        else:
            _print_evaluation(results[0])
            config, module, (policy, *_) = task
            path, words = (config if isinstance(config, Path) else None), options["overrides"]
            if policy == "base":
                if (count := options["samples_per_prompt"]) is not None:
                    words = [*words, f"eval.samples_per_prompt={count}"]
                line = command_line("rl", path, module, *words)
                print_next((line, "train it, with such an evaluation before and after"))
            else:
                policies = ("--policy", "base", "--policy", policy)
                line = command_line("eval", path, module, *words, *policies)
                print_next((line, "how far it is from the untrained model, with intervals"))
        return
    from groupwise.cli.runs.compare import print_comparison
    from groupwise.training.review.compare import compare_sides, side_of_file

    sides = [side_of_file(result.path) for result in results if result.path]
    comparisons = [compare_sides(sides[0], other) for other in sides[1:]]
    if as_json:
        summaries = [result.summary for result in results]
        write_json(
            {
                "evaluations": summaries,
                "comparisons": [comparison.summary() for comparison in comparisons],
            }
        )
        return
    for number, comparison in enumerate(comparisons):
        typer.echo("\n" if number else "", nl=False)
        print_comparison(comparison)
    first, *_, last = (str(result.path) for result in results if result.path)
    print_next(command_to_compare(first, last))


def _print_evaluation(result: EvalResult) -> None:
    """Print an evaluation: what was asked, then each metric, with its interval if it has one. Advice is followed by some answers."""
    from groupwise.cli.output import measured_value, write_result
    from groupwise.cli.printing import indent, print_advice, print_section, print_text
    from groupwise.runs.tables import prompt_text

    summary = result.summary
    apart = ("metrics", "intervals_95", "advice")
    write_result({k: v for k, v in summary.items() if k not in apart}, as_json=False)
    measured = {name: {"value": value} for name, value in summary["metrics"].items()}
    for name, (low, high) in summary["intervals_95"].items():
        measured[name] |= {"low": low, "high": high}
    pairs = [(name, measured_value(each)) for name, each in measured.items()]
    print_section("metrics, with 95 % intervals", pairs)
    if advice := summary.get("advice"):
        print_advice(advice)
        print_text(f"\nsome of the answers; all are in `rows` of {result.path}")
        shown = sorted({0, len(result.rows) // 2, len(result.rows) - 1})
        for row in (result.rows[index] for index in shown):
            reward = "no reward" if row["reward"] is None else f"reward {row['reward']:.3f}"
            print_text(f"\n━━ {reward} ━━\n{indent(prompt_text(row['prompt']), '  │ ')}\n")
            print_text(indent(row["completion"], "     "))


def _suite_request(
    suites: tuple[str, ...], policies: list[str] | None, suite_options: dict[str, Any]
) -> SuiteRequest:
    from groupwise.training.evaluation.suite_evaluation import SuiteRequest

    if policies and len(policies) > 1:
        raise typer.BadParameter("suites evaluate one policy at a time; give one --policy.")
    return SuiteRequest(suites, policy=policies[0] if policies else None, **suite_options)


def _evaluate_suites(request: SuiteRequest, *, as_json: bool) -> None:
    from groupwise.cli.output import write_json
    from groupwise.cli.printing import print_table, print_text
    from groupwise.training.evaluation.suite_evaluation import (
        METRIC,
        evaluate_suites,
        interval_of,
    )

    result = evaluate_suites(request, lambda text: typer.echo(text, err=True))
    if as_json:
        write_json(result.summary)
        raise typer.Exit(result.exit_code)
    if result.results:
        rows = [
            (
                name,
                str(interval_of(suite_result)),
                str(suite_result["prompts"]),
                str(suite_result["samples"]),
                f"{suite_result['seconds']:.0f} s",
                str(suite_result.get("results", result.path)),
            )
            for name, suite_result in result.results.items()
        ]
        print_table([("suite", f"{METRIC} [95 %]", "prompts", "samples", "time", "results"), *rows])
    for name, reason in result.failed.items():
        print_text(f"{name} failed: {reason}")
    raise typer.Exit(result.exit_code)


KEYS_FOR_TASKS = {
    "max_prompts": "eval.max_prompts",
    "temperature": "eval.temperature",
    "top_p": "eval.top_p",
    "max_new_tokens": "eval.max_completion_length",
    "runs_dir": "run.dir",
}
"""Options for `--suite`, with the config key that does the same in an evaluation of a task."""


def _refuse_options(options: dict[str, Any], preposition: Literal["with", "without"]) -> None:
    """Raise BadParameter for options that would have no effect, with the key that has this effect for a task."""
    for name, value in options.items():
        if value:
            option = {"runs_dir": "--dir", "overrides": "key=value"}.get(
                name, f"--{name.replace('_', '-')}"
            )
            key = KEYS_FOR_TASKS.get(name) if preposition == "without" else None
            remedy = f" For a task, give {key}={value}." if key else ""
            raise typer.BadParameter(f"{option} has no effect {preposition} --suite.{remedy}")
