"""`groupwise runs`: look at what runs recorded.

Answers go to standard output, as text for people or as JSON (`--json`) for programs; everything else to standard error. What a
model wrote is shown as harmless plain text.
"""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer

from groupwise.cli.options import AsJson, command, flag, option
from groupwise.cli.output import has_colours, write_json
from groupwise.cli.printing import (
    RUNS,
    RunArgument,
    RunsDir,
    command_to_resume,
    command_to_show,
    commands_after_run,
    commands_after_sft,
    dir_option,
    indent,
    moment,
    print_advice,
    print_next,
    print_pairs,
    print_section,
    print_settings,
    print_table,
    print_text,
    print_warnings,
    round_number,
)
from groupwise.cli.runs.compare import compare
from groupwise.cli.runs.export import export, import_, push
from groupwise.cli.runs.rescore import replay, rescore
from groupwise.core import atomic_files
from groupwise.core.errors import RunNotFoundError, UsageError
from groupwise.core.terminal.plot import Point, sparkline, svg_curve, terminal_curve, with_mean
from groupwise.core.terminal.quantities import counted
from groupwise.core.terminal.text import one_line, shorten
from groupwise.runs import checkpoints
from groupwise.runs.advice import advice_on
from groupwise.runs.curves import warm_up_curve
from groupwise.runs.encoding import label
from groupwise.runs.find import (
    RunInfo,
    final_step,
    list_runs,
    resolve,
    run_info,
    saved_by_name,
)
from groupwise.runs.folder import CHECKPOINTS, FINAL, RECORD, read_config, read_summary
from groupwise.runs.records import Order, RolloutFilter, RolloutView
from groupwise.runs.store import Store

LIMITS = {"turns": "max_turns", "tokens": "the length limit"}
"""What cuts a rollout off, by its `ended_by`. Tokens have several limits: of a rollout, and of a call of a training server's client."""
MAX_NAMED = 100
"""Largest number of a run's tasks for which a name is checked before the search; with more, only the search shows if it exists."""

WIDE = 100
"""Columns from which the list of runs shows years."""

app = typer.Typer(rich_markup_mode=None)


@command(app, "list")
def list_command(dir: RunsDir = RUNS, as_json: AsJson = False) -> None:
    """List all runs with their state, steps and rewards."""
    if not dir.is_dir():
        raise RunNotFoundError(
            f"there is no folder {dir}. Your first run makes it (`groupwise` shows how to begin). If runs are elsewhere (run.dir in their "
            "configs), give --dir."
        )
    infos = list_runs(dir)
    if as_json:
        write_json([_info_json(info) for info in infos])
        return
    if not infos:
        typer.echo(f"no runs in {dir}", err=True)
        return
    head = ("name", "state", "steps", "reward", "started", "model", "task")
    narrow = sys.stdout.isatty() and shutil.get_terminal_size().columns < WIDE
    rows = [head, *(_info_row(info, narrow=narrow) for info in infos)]
    least = {"task": 6, "model": 8, "started": 16}  # the next command needs the whole name
    print_table(rows, {head.index(name): width for name, width in least.items()})
    broken = [info for info in infos if info.broken]
    if broken:  # one line for all of them
        other_count = (
            f" (and {len(broken) - 1} more, for which --json has the reasons)" if broken[1:] else ""
        )
        name, reason = one_line(broken[0].name), one_line(broken[0].broken or "")
        typer.echo(f"{name} cannot be read{other_count}: {reason}", err=True)
    if sys.stdout.isatty():  # a pipe gets the table alone
        readable = [info.path for info in infos if not info.broken]
        if readable:  # the newest is the last one
            print_next(command_to_show(readable[-1]))


@command(app, "show")
def show(run: RunArgument, dir: RunsDir = RUNS, as_json: AsJson = False) -> None:
    """Show one run: state, configuration, last metrics, checkpoints, evaluations."""
    path = resolve(run, dir).path
    facts = _run_facts(path)
    if as_json:
        write_json(facts)
        return
    _print_run_facts(facts)
    commands: list[tuple[str, str]] = []
    if facts["state"] in ("crashed", "interrupted") and (resume := command_to_resume(path)):
        commands.append(resume)
    if facts["rewards"]:
        commands += commands_after_run(path)[1:]
    elif facts["losses"]:
        commands += commands_after_sft(path, None)
    if commands:
        print_next(*commands)


@command(app, "rollouts")
def rollouts(
    run: RunArgument,
    dir: RunsDir = RUNS,
    step: Annotated[int | None, option("N", "Only this step; default: the last one.")] = None,
    all_steps: Annotated[bool, flag("All steps, not only the last.", "--all")] = False,
    failed: Annotated[bool, flag("Only failed and timed-out ones.", "--failed")] = False,
    part: Annotated[
        str | None, option("PART", "Only with this reward part; --best and --worst sort by it.")
    ] = None,
    task: Annotated[
        str | None,
        option("TASK", "Only this task of a mixture, by its label or the name of its data set."),
    ] = None,
    text: Annotated[
        str | None,
        option(
            "TEXT",
            "Only with all these words in the prompt, or in the completion; quotes hold a phrase.",
        ),
    ] = None,
    limit: Annotated[int, option("N", "Maximum number of rollouts to show.", min=1)] = 16,
    best: Annotated[bool, flag("Highest rewards first.", "--best")] = False,
    worst: Annotated[bool, flag("Lowest rewards first.", "--worst")] = False,
    as_json: AsJson = False,
) -> None:
    """Read rollouts: each prompt once, then the answers of its group and their rewards.

    Without --step, the last step is shown; with --failed, --part, --task, --text, --best or --worst all steps are searched.
    """
    if best and worst:
        raise UsageError("--best and --worst contradict each other: choose one.")
    if step is not None and all_steps:
        raise UsageError("--step and --all contradict each other: choose one.")
    path = resolve(run, dir).path
    order: Order = "best" if best else "worst" if worst else "draw"
    has_filter = (part, task, text) != (None, None, None)
    searching = all_steps or failed or best or worst or has_filter
    with Store.open(path / RECORD, readonly=True) as store:
        _expect_present(store, part, task, step)
        rollout_filter = RolloutFilter(
            step=step if step is not None or searching else store.step_count() or None,
            outcome=("failed", "timed_out") if failed else None,
            part=part,
            task=task,
            text=text,
            order=order,
            limit=limit,
        )
        views = store.rollouts(rollout_filter)
        if worst and views:
            views = _newest_of_equals(store, rollout_filter, views)
    if as_json:
        write_json([asdict(view) for view in views])
    elif not views:
        typer.echo("no rollouts like that", err=True)
    else:
        _print_rollouts(views)
        if sys.stdout.isatty():
            print_next(
                (f"groupwise web{dir_option(path.parent)}", "them token by token, in a browser")
            )


@command(app, "plot")
def plot(
    run: RunArgument,
    dir: RunsDir = RUNS,
    metric: Annotated[
        str | None,
        option("METRIC", "Name of the metric; default: reward, or loss if there is no reward."),
    ] = None,
    svg: Annotated[Path | None, option("FILE", "Write an SVG file as well.")] = None,
    as_json: AsJson = False,
) -> None:
    """Draw the curve of a metric in the terminal, and to a file with --svg; the curve of a warm-up is drawn before it."""
    path = resolve(run, dir).path
    with Store.open(path / RECORD, readonly=True) as store:
        names = store.metric_names()
        metric = metric or ("reward" if "reward" in names or "loss" not in names else "loss")
        _expect_name(f"metric '{metric}'", metric, names)
        points: list[Point] = [(step, value) for step, value in store.metrics([metric])[metric]]
    warm_up = warm_up_curve(path, metric)
    series = with_mean(metric, points, warm_up=warm_up)
    title = f"{path.name} · {metric}"
    if svg is not None:
        atomic_files.check_can_write(svg)
        svg.parent.mkdir(parents=True, exist_ok=True)
        atomic_files.write_file(svg, svg_curve(series, title=title).encode())
        typer.echo(f"wrote {svg}", err=True)
    if as_json:
        extra = {"warm_up": warm_up} if warm_up else {}
        write_json({"run": path.name, "metric": metric, "points": points, **extra})
        return
    width = min(shutil.get_terminal_size().columns, 100)
    print_text(terminal_curve(series, width, title=title, colour=has_colours(sys.stdout)))
    print_next(command_to_show(path))


command(app, "compare")(compare)
command(app, "rescore")(rescore)
command(app, "replay")(replay)
command(app, "export")(export)
command(app, "push")(push)
command(app, "import")(import_)


# The list


def _info_json(info: RunInfo) -> dict[str, Any]:
    return {**asdict(info), "path": str(info.path)}


def _info_row(info: RunInfo, *, narrow: bool) -> tuple[str, ...]:
    if info.broken:
        return (info.name, "broken", "", "", "", "", "")
    total = f"/{info.max_steps}" if info.max_steps is not None else ""
    ends, name = (info.reward_first, info.reward_last), ""
    if info.reward_first is None:
        ends, name = (info.loss_first, info.loss_last), "loss "
    values = [f"{value:.3f}" for value in ends if value is not None]
    return (
        info.name,
        info.state or "",
        f"{info.steps}{total}",
        name + " → ".join(values) if values else "",
        moment(info.started)[len("2026-") if narrow else 0 :],  # leaves room for names
        shorten(info.model or "", 32),
        shorten(info.task or "", 32),
    )


# One run


def _run_facts(path: Path) -> dict[str, Any]:
    with Store.open(path / RECORD, readonly=True) as store:
        last_step = store.last_step()
        curves = store.metrics(["reward", "loss"])
        evaluations = [
            {
                "step": evaluation.step,
                "name": evaluation.name,
                "policy": evaluation.policy,
                "metrics": evaluation.metrics,
            }
            for evaluation in store.evaluations(rows=False)
        ]
        complete = checkpoints.complete(path / CHECKPOINTS)
        meta = store.get_meta()
        return {
            **_info_json(run_info(path)),
            "error": meta.get("error"),
            "init_from": meta.get("init_from"),
            "rows_left_out": meta.get("rows_left_out") or {},
            "last_metrics": {} if last_step is None else store.step_metrics(last_step),
            "rewards": [value for _, value in curves.get("reward", [])],
            "losses": [value for _, value in curves.get("loss", [])],
            "evaluations": evaluations,
            "warnings": [asdict(warning) for warning in store.warnings()],
            "resumes": [asdict(resume) for resume in store.resumes()],
            "advice": advice_on(store),
            "checkpoints": [checkpoint.step for checkpoint in complete],
            "saved_by_name": saved_by_name(path),
            "final_step": final_step(path) if (path / FINAL).is_dir() else None,
            "damaged_checkpoints": [str(skipped) for skipped in complete.skipped],
            "summary": read_summary(path),
            "config": read_config(path),
        }


def _print_run_facts(facts: Mapping[str, Any]) -> None:
    total = f" of {facts['max_steps']}" if facts["max_steps"] is not None else ""
    error, name = facts["error"], facts["name"]
    # The result's URL on the hub, or the error; None if it was not to be uploaded, or the run has not ended.
    summary: dict[str, Any] = facts["summary"] or {}
    hub: Mapping[str, str] = summary.get("hub", {})
    uploaded = f"{hub['url']} (commit {hub['commit']})" if "commit" in hub else hub.get("url")
    if "error" in hub:
        uploaded = f"not uploaded: {hub['error']}"
    print_pairs(
        [
            ("run", name),
            ("folder", facts["path"]),
            ("state", facts["state"]),
            ("error", f"{error['code']}: {error['message']}" if error else None),
            ("model", facts["model"]),
            ("task", facts["task"]),
            ("init-from", facts["init_from"]),
            ("started", moment(facts["started"])),
            ("steps", f"{facts['steps']}{total}"),
            ("reward", sparkline(facts["rewards"], 40)),
            ("loss", "" if facts["rewards"] else sparkline(facts["losses"], 40)),
            ("checkpoints", ", ".join(f"{name}@{step}" for step in facts["checkpoints"]) or "none"),
            ("saved by name", "; ".join(facts["saved_by_name"])),
            ("final", None if facts["final_step"] is None else f"{name}@{facts['final_step']}"),
            ("damaged", "; ".join(facts["damaged_checkpoints"])),
            ("resumed", counted(len(facts["resumes"]), "time") if facts["resumes"] else None),
            ("hub", uploaded),
        ]
    )
    print_warnings((w["step"], w["name"], w["kind"], w["message"]) for w in facts["warnings"])
    print_advice(facts["advice"])
    for hook, reasons in facts["rows_left_out"].items():
        print_section(
            f"rows of {hook} left out", [(str(n), reason) for reason, n in reasons.items()]
        )
    print_section("last step", [(k, round_number(v)) for k, v in facts["last_metrics"].items()])
    for evaluation in facts["evaluations"]:
        print_section(
            _evaluation_title(evaluation),
            [(k, round_number(v)) for k, v in evaluation["metrics"].items()],
        )
    print_settings(facts["config"])


def _evaluation_title(evaluation: Mapping[str, Any]) -> str:
    """Such as `evaluation after 40 steps (sums@40)`. Names that only say when it was are left out."""
    name, step = evaluation["name"], evaluation["step"]
    when = f"after {counted(step, 'step')}" if step else "before the first step"
    label = "" if name in ("before", "after", f"step-{step}") else f"{name} "
    return f"evaluation {label}{when} ({evaluation['policy']})"


# Rollouts


def _expect_name(description: str, name: str, names: Sequence[str]) -> None:
    if names and name not in names:
        raise RunNotFoundError(f"this run has no {description}. There are: {', '.join(names)}.")
    if not names:
        raise RunNotFoundError(f"this run has no {description}: it has recorded no step yet.")


def _expect_present(store: Store, part: str | None, task: str | None, step: int | None) -> None:
    """Raise RunNotFoundError if the run has no such part, task or step. None is not checked."""
    if part is not None:
        _expect_name(f"reward part '{part}'", part, store.part_names())
    if task is not None:
        tasks = store.tasks(MAX_NAMED)
        if not tasks:
            raise RunNotFoundError(
                f"this run has no task '{task}': its examples name none. Those of a mixture do, see docs/how-to/data.md."
            )
        if len(tasks) < MAX_NAMED:  # otherwise, the search shows whether there are any
            _expect_name(f"task '{task}'", task, tasks)
    if step is not None:
        steps = store.step_count()
        if not steps:
            raise RunNotFoundError(f"this run has no step {step}: it has recorded none yet.")
        if not 1 <= step <= steps:
            raise RunNotFoundError(f"this run has no step {step}; it has the steps 1 to {steps}.")


def _newest_of_equals(
    store: Store, filters: RolloutFilter, views: Sequence[RolloutView]
) -> list[RolloutView]:
    """The worst rollouts with the newest of equal ones first, as `--best` has them: the record's index has the oldest first."""

    def value(view: RolloutView) -> float:
        if filters.part is None:
            assert view.reward is not None
            return view.reward
        of_part = [part.value for part in view.parts if label(part.name) == label(filters.part)]
        return min(each for each in of_part if each is not None and not math.isnan(each))

    last = value(views[-1])  # more rollouts may have this value than are shown
    lower = [view for view in views if value(view) < last]
    equal = replace(filters, order="newest", min_reward=last, max_reward=last)
    newest = [view for view in store.rollouts(equal) if value(view) == last]
    ordered = sorted(lower, key=lambda view: (value(view), -view.id))
    return [*ordered, *newest][: filters.limit]


def _print_rollouts(views: Sequence[RolloutView]) -> None:
    for number, (_, rollouts) in enumerate(groupby(views, key=lambda view: view.group)):
        group = list(rollouts)
        first = group[0]
        heading = "sampled, not trained on yet" if first.step is None else f"step {first.step}"
        if number:
            print_text("")
        print_text(f"━━ {heading} · group {first.group} · example {first.example} ━━")
        print_text(indent(first.prompt, "  │ "))
        for view in group:
            if view.outcome == "scored":
                verdict = "given" if view.reward is None else f"reward {view.reward:.3f}"
            else:
                verdict = view.outcome.replace("_", " ").upper()
                verdict += f": {one_line(view.reason)}" if view.reason else ""
            facts = [f"rollout {view.rollout}", verdict]
            if view.advantage is not None:
                facts.append(f"advantage {view.advantage:+.3f}")
            if view.completion_tokens or not view.completion:  # logs of others have only texts
                facts.append(f"{counted(view.completion_tokens, 'token')}{_cut_off_text(view)}")
            if view.attempt:
                facts.append(f"attempt {view.attempt}")
            print_text("\n  " + " · ".join(facts))
            if view.parts:
                parts = (
                    f"{one_line(part.name)}{'' if part.turn is None else f' (turn {part.turn})'} {round_number(part.value) or '–'}"
                    for part in view.parts
                )
                print_text("     " + "   ".join(parts))
            print_text(indent(view.completion, "     "))


def _cut_off_text(view: RolloutView) -> str:
    """Whether a limit cut the rollout off and, if there are several limits, which one, as text."""
    limit = LIMITS.get(view.ended_by or "")
    return f", cut off{f' by {limit}' if limit else ''}" if view.truncated else ""
