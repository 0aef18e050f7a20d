"""`groupwise eval`: answer the held-out prompts of a task, or the questions of suites, and measure the answers."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from groupwise.cli.options import AsJson
from groupwise.cli.rl import Overrides, TaskOption


def evaluate(
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", metavar="C.yaml", help="The YAML file that configures it."),
    ] = None,
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
    suite: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="In place of a config: math_500, aime24, aime25, gpqa_diamond, lcb, lcb_v4 or all, run by lighteval. "
            "May be given several times.",
        ),
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(
            "--endpoint", "--base-url", metavar="URL", help="The service that a suite asks."
        ),
    ] = None,
    endpoint_model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The model's name there. With --serve: needed if several are served.",
        ),
    ] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The environment variable with the key. Without it: OPENAI_API_KEY.",
        ),
    ] = None,
    serve: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="In place of an endpoint: what serves the policy meanwhile, with {policy} or {merged}, and {port}; also "
            "{base} and {gpus}.",
        ),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(metavar="X", help="Of a suite. Without it: 0.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(metavar="P", min=0, max=1, help="Of a suite. Without it: the service's own."),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Longest answer in a suite. Without it: 32768."),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Requests of a suite under way at once. Without it: 16."
        ),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=1, help="For one request of a suite. Without it: 900."),
    ] = None,
    max_prompts: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Only so many questions of each suite, for a try."),
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="For each suite, and for the start of a server. Without it: 14400.",
        ),
    ] = None,
    program: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="How lighteval is run. Without it: as GROUPWISE_LIGHTEVAL says, or lighteval.",
        ),
    ] = None,
    runs_dir: Annotated[
        Path | None,
        typer.Option("--dir", help="With a suite: the folder that holds the runs."),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Show what would be asked; load no model, ask nothing."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate a model on held-out prompts of a task, or on suites."""
    of_suites: dict[str, Any] = {
        "endpoint": endpoint,
        "endpoint_model": endpoint_model,
        "api_key_env": api_key_env,
        "serve": None if serve is None else tuple(shlex.split(serve)),
        "temperature": temperature,
        "top_p": top_p,
        "max_new_tokens": max_new_tokens,
        "concurrency": concurrency,
        "timeout": timeout,
        "max_prompts": max_prompts,
        "time_limit": time_limit,
        "program": None if program is None else tuple(shlex.split(program)),
        "runs_dir": runs_dir,
    }
    given = {name: value for name, value in of_suites.items() if value is not None}
    if suite:
        _refuse({"config": config, "task_module": task_module, "overrides": overrides}, "with")
        common = {"samples_per_prompt": samples_per_prompt, "output": output}
        given |= {name: value for name, value in common.items() if value is not None}
        _evaluate_suites(tuple(suite), policy, given, dry_run=dry_run, as_json=as_json)
        return
    _refuse(given, "without")
    if config is None and not overrides:
        raise typer.BadParameter(
            "say what is evaluated: --config C.yaml, its keys as key=value, or --suite NAME with an --endpoint."
        )
    _evaluate_task(
        {} if config is None else config,
        task_module,
        overrides,
        policy,
        samples_per_prompt,
        output,
        dry_run=dry_run,
        as_json=as_json,
    )


def _evaluate_task(
    config: Path | dict[str, Any],
    task_module: str | None,
    overrides: list[str] | None,
    policy: list[str] | None,
    samples_per_prompt: int | None,
    output: Path | None,
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    from groupwise.cli.output import collect_seldom, write_json, write_result

    given: dict[str, Any] = {
        "overrides": tuple(overrides or ()),
        "samples_per_prompt": samples_per_prompt,
        "output": output,
    }
    if dry_run:
        collect_seldom()
        from groupwise.training.evaluation.evaluate import plan_each

        write_json(plan_each(config, task_module, policy or ["base"], **given))
        return
    from groupwise.training.evaluation.evaluate import evaluate_each

    results = evaluate_each(config, task_module, policy or ["base"], **given)
    if len(results) == 1:
        write_result(results[0].summary, as_json=as_json)
        return
    from groupwise.cli.runs.compare import print_comparison
    from groupwise.training.review.compare import compare_sides, side_of_file

    sides = [side_of_file(result.path) for result in results if result.path]
    comparisons = [compare_sides(sides[0], other) for other in sides[1:]]
    if as_json:
        found = [result.summary for result in results]
        write_json({"evaluations": found, "comparisons": [each.summary() for each in comparisons]})
        return
    for number, comparison in enumerate(comparisons):
        typer.echo("\n" if number else "", nl=False)
        print_comparison(comparison)


def _evaluate_suites(
    suites: tuple[str, ...],
    policies: list[str] | None,
    given: dict[str, Any],
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    from groupwise.cli.output import write_json
    from groupwise.cli.printing import print_table, print_text
    from groupwise.training.evaluation.suite_evaluation import (
        METRIC,
        SuitesAsked,
        evaluate_suites,
        interval_of,
        plan,
    )

    if policies and len(policies) > 1:
        raise typer.BadParameter("suites are asked of one policy at a time; give one --policy.")
    asked = SuitesAsked(suites, policy=policies[0] if policies else None, **given)
    if dry_run:
        write_json(plan(asked))
        return
    found = evaluate_suites(asked, lambda text: typer.echo(text, err=True))
    if as_json:
        write_json(found.summary)
        raise typer.Exit(found.exit_code)
    if found.results:
        rows = [
            (
                name,
                str(interval_of(each)),
                str(each["prompts"]),
                str(each["samples"]),
                f"{each['seconds']:.0f} s",
                str(each.get("results", found.path)),
            )
            for name, each in found.results.items()
        ]
        print_table([("suite", f"{METRIC} [95 %]", "prompts", "samples", "time", "results"), *rows])
    for name, reason in found.failed.items():
        print_text(f"{name} failed: {reason}")
    raise typer.Exit(found.exit_code)


def _refuse(given: dict[str, Any], how: str) -> None:
    """Options that would have no effect."""
    for name, value in given.items():
        if value:
            option = {"runs_dir": "--dir", "overrides": "key=value"}.get(
                name, f"--{name.replace('_', '-')}"
            )
            raise typer.BadParameter(f"{option} has no effect {how} --suite.")
