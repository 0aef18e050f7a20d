"""What each built-in task teaches the bundled model on this machine: `make tour`.

Runs the short config of every task, one after the other, and writes one page, `runs/tour/tour.html`: the held-out results of the base
model, after the warm-up and after reinforcement learning, with intervals; the curve of each run, and what was answered before and after.
It takes about an hour on two CPU cores. Finished runs are used again, so that a tour that was cut off goes on.

`--seeds 2` repeats each with another seed, for the warm-up too; `--store` keeps the numbers and the curves that the documentation shows.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import groupwise
from benchmarks.learning import IMAGES, ROOT
from benchmarks.step import RESULTS, machine, slug
from groupwise.core.atomic_files import write_json
from groupwise.core.errors import GroupwiseError, UsageError
from groupwise.core.terminal.notebook import Code, Table, as_html
from groupwise.core.terminal.plot import svg_curve, with_mean
from groupwise.core.terminal.text import shorten
from groupwise.runs.curves import warm_up_curve
from groupwise.runs.folder import RECORD, read_config, read_state, read_summary
from groupwise.runs.records import EvaluationRecord
from groupwise.runs.store import Store
from groupwise.tasks.contract import load_task
from groupwise.training.config import (
    LoadedConfig,
    compare_for_resume,
    load_config,
    with_task_schema,
)

TASKS = (
    "sort_words", "math", "crossword", "wordle", "wordle_game", "rush_hour", "reasoning_gym", "rubric_answers",
)  # fmt: skip
RUNS = Path("runs") / "tour"
STAGES = {"base": "base model", "before": "after the warm-up", "after": "after RL"}
"""The evaluations of a run in order, with their titles. A run without a warm-up has no `base`: `before` is the base model there."""
SET_BY_WARM_UP = "model.adapter"
"""The config key that a run fills in itself: the weights of its warm-up."""
LONGEST = 600
"""Characters shown of an answer."""


@dataclass(frozen=True, slots=True)
class TaskResult:
    """The result of one run."""

    task: str
    seed: int
    folder: Path
    minutes: float
    """From the command to its end: warm-up, evaluations and reinforcement learning."""
    summary: Mapping[str, Any]

    @property
    def held_out(self) -> Mapping[str, Any]:
        """The metrics of each stage, and how the reward changed by RL."""
        return self.summary["held_out"]

    @property
    def gained(self) -> bool:
        """Whether RL raised the reward of the held-out prompts beyond its 95 % interval, from what the warm-up had made of it."""
        return bool(self.held_out["rises"])

    @property
    def numbers(self) -> dict[str, Any]:
        """What is stored of it."""
        return {
            "held_out": self.held_out,
            "minutes": round(self.minutes, 1),
            "warm_up_steps": self.summary.get("warm_up", {}).get("steps", 0),
            "steps": self.summary["steps"],
        }


def main() -> int:
    """Run what is missing, show it, and store it if asked. 1 where a task could not be run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", nargs="*", default=TASKS, choices=TASKS, metavar="TASK")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--runs", type=Path, default=RUNS, help="folder of the runs and the page")
    parser.add_argument("--store", action="store_true", help="keep numbers and curves")
    given = parser.parse_args()
    found: list[TaskResult] = []
    problems: list[str] = []
    for task, seed in product(given.tasks, range(given.seeds)):
        try:
            result = train_task(task, seed, given.runs)
        except GroupwiseError as error:
            problems.append(f"{task} (seed {seed}): {error}")
            continue
        found.append(result)
        (given.runs / "tour.html").write_text(html_page(found))
    print("\n" + table(rows_of(numbers_of(found))))
    for each in found:
        if not each.gained:
            print(f"\n{each.task} (seed {each.seed}): the gain by RL is within its interval.")
    if found:
        print(f"\nThe page with curves and answers: {given.runs / 'tour.html'}")
    if given.store:
        store(found)
    print(*problems, sep="\n", end="\n" if problems else "", file=sys.stderr)
    return 1 if problems else 0


def train_task(task: str, seed: int, runs: Path) -> TaskResult:
    """Train on a task with one seed. A finished run is used as it is, an unfinished one is resumed.

    Raises GroupwiseError for what a run raises, and where it was made by another config, and SystemExit if it was interrupted.
    """
    name = f"{task}-{seed}"
    folder, notes = runs / name, runs / f"{name}.json"
    there = (folder / RECORD).is_file()
    config = ROOT / "configs" / f"{task}.yaml"
    overrides = overrides_of(config, name, seed, runs)
    if there:
        _refuse_another(folder, task, load_config(config, overrides))
    if not there or read_state(folder) != "finished":
        print(f"\n{task}, seed {seed}", flush=True)
        spent, begun = _seconds(notes), time.monotonic()
        try:
            done = groupwise.rl(config, task, overrides=overrides, resume=there)
        finally:
            write_json(notes, {"seconds": spent + time.monotonic() - begun})
        if done.exit_code:
            raise SystemExit("Interrupted. The same command goes on where it stopped.")
    summary = read_summary(folder)
    assert summary is not None
    return TaskResult(task, seed, folder, _seconds(notes) / 60, summary)


def _seconds(notes: Path) -> float:
    """How long all attempts at a run have taken so far."""
    return float(json.loads(notes.read_text())["seconds"]) if notes.is_file() else 0.0


def _refuse_another(folder: Path, task: str, ships: LoadedConfig) -> None:
    """Raise UsageError if what is there was made by another config than that which ships now."""
    ships = with_task_schema(ships, load_task(task).config_schema())
    found = compare_for_resume(read_config(folder), ships.config)
    every = (*found.free, *found.warned, *found.fixed)
    changed = [key for key in every if not key.startswith(SET_BY_WARM_UP)]
    if changed:
        raise UsageError(
            f"{folder} was made by another config: {', '.join(changed)} differ. Move all of {folder}* away, its warm-up and its time "
            "too, or name another folder by --runs."
        )


def overrides_of(config: Path, name: str, seed: int, runs: Path) -> list[str]:
    """The config keys of one run: its folder, its name, and the seed of the warm-up and of RL."""
    own = [f"run.dir={runs}", f"run.name={name}", f"training.seed={seed}"]
    warmed = load_config(config).config.warm_up is not None
    return [*own, f"warm_up.training.seed={seed}"] if warmed else own


# --- the page ------------------------------------------------------------------------------------


HEADER = (
    "task",
    "seed",
    "reward: base",
    "warmed up",
    "after RL",
    "gain by RL",
    "solved",
    "minutes",
)


def row_of(task: str, seed: int, numbers: Mapping[str, Any]) -> list[str]:
    """One run: the held-out reward of each stage, its change by RL with the 95 % interval, the share solved, the time."""
    held_out, gain = numbers["held_out"], numbers["held_out"]["change"]
    warmed = "base" in held_out
    there = [stage for stage in STAGES if stage in held_out]
    return [
        task,
        str(seed),
        f"{held_out[there[0]]['reward']['value']:.2f}",
        f"{held_out['before']['reward']['value']:.2f}" if warmed else "none",
        f"{held_out['after']['reward']['value']:.2f}",
        f"{gain['value']:+.2f} [{gain['low']:+.2f}, {gain['high']:+.2f}]",
        " → ".join(f"{held_out[stage]['pass@1']['value']:.2f}" for stage in there),
        f"{numbers['minutes']:.1f}",
    ]


def rows_of(numbers: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """The rows of the table, from the numbers by task and seed."""
    return [
        row_of(task, int(seed), numbers[task][seed])
        for task in TASKS
        if task in numbers
        for seed in sorted(numbers[task])
    ]


def numbers_of(found: Iterable[TaskResult]) -> dict[str, dict[str, Any]]:
    """The numbers of runs, by task and seed."""
    numbers: dict[str, dict[str, Any]] = {}
    for each in found:
        numbers.setdefault(each.task, {})[str(each.seed)] = each.numbers
    return numbers


def table(rows: Sequence[Sequence[str]], header: Sequence[str] = HEADER) -> str:
    """A Markdown table that is also readable in a terminal."""
    every = [header, *rows]
    widths = [max(len(row[column]) for row in every) for column in range(len(header))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in every
    ]
    return "\n".join(
        [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]
    )


def html_page(found: Sequence[TaskResult]) -> str:
    """All runs so far, as a page that stands alone."""
    rows = Table("", [tuple(row) for row in rows_of(numbers_of(found))], HEADER).as_html()
    return (
        "<!doctype html><meta charset=utf-8><title>Groupwise: the tour</title>"
        '<body style="font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em">'
        f"<h1>What each task teaches SmolLM2-135M-Instruct</h1><p>{as_html(_described(machine()))}. Rewards of held-out prompts; in "
        f"brackets the 95 % interval of what RL adds after the warm-up.</p>{rows}{''.join(map(html_section, found))}"
    )


def html_section(result: TaskResult) -> str:
    """A run: its curve, and the prompt that it gained most on."""
    answers = "".join(
        Code(stage, shorten(text, LONGEST)).as_html() for stage, text in answers_of(result)
    )
    return f"<h2>{result.task}, seed {result.seed}</h2>{curve(result)}{answers}"


def curve(result: TaskResult) -> str:
    """Plot the reward of the warm-up and of RL as SVG."""
    with Store.open(result.folder / RECORD, readonly=True) as store:
        points = store.metrics(["reward"])["reward"]
    series = with_mean("reward", points, warm_up=warm_up_curve(result.folder, "reward"))
    return svg_curve(series, title=f"{result.task}: reward of the sampled completions")


def titles_of(stages: Container[str]) -> dict[str, str]:
    """Those of the stages that there are."""
    found = {stage: title for stage, title in STAGES.items() if stage in stages}
    return found if "base" in found else {**found, "before": STAGES["base"]}


def answers_of(result: TaskResult) -> list[tuple[str, str]]:
    """The held-out prompt that gained most by RL, and what each stage wrote, with its reward."""
    with Store.open(result.folder / RECORD, readonly=True) as store:
        stages = {
            each.name: store.evaluation(each.step, each.name)
            for each in store.evaluations(rows=False)
        }
    rows = {name: _by_example(each) for name, each in stages.items() if each and name in STAGES}
    before, after = rows["before"], rows["after"]
    gains = {
        key: (after[key]["reward"] or 0) - (before[key]["reward"] or 0)
        for key in before.keys() & after.keys()
    }
    chosen = max(sorted(gains), key=lambda key: (after[key]["success"] is True, gains[key]))
    prompt = after[chosen]["prompt"]
    asked = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    said = [(title, rows[name][chosen]) for name, title in titles_of(rows).items()]
    return [
        ("asked", asked),
        *((f"{title}: reward {row['reward'] or 0:.2f}", row["completion"]) for title, row in said),
    ]


def _by_example(evaluation: EvaluationRecord) -> dict[int, Mapping[str, Any]]:
    return {row["example"]: row for row in evaluation.rows}


# --- the documentation ---------------------------------------------------------------------------

PAGES = ROOT / "docs" / "tasks"
MARKS = "<!-- tour -->\n", "<!-- end of tour -->"
"""What the program writes stands between these."""
NOT_SHOWN = "rewards/", "completions/", "task/"
"""Beginnings of the metrics that a task's page leaves out, because others say the same."""


def store(found: Sequence[TaskResult]) -> None:
    """Keep the numbers of all runs, and write what the pages of the tasks show of them."""
    described = machine()
    file = RESULTS / f"tour-{slug(described)}.json"
    kept: dict[str, dict[str, Any]] = (
        json.loads(file.read_text())["tasks"] if file.is_file() else {}
    )
    for task, seeds in numbers_of(found).items():
        kept[task] = kept.get(task, {}) | seeds
    file.write_text(json.dumps({"machine": described, "tasks": kept}, indent=2) + "\n")
    for each in found:
        if each.seed == 0:
            (IMAGES / f"tour-{each.task}.svg").write_text(curve(each))
            _write_between_marks(
                PAGES / f"{each.task}.md", docs_section(each, kept[each.task], described)
            )
    _write_between_marks(PAGES / "index.md", table(rows_of(kept)) + "\n")
    print(f"stored in {file}, {IMAGES} and {PAGES}")


def docs_section(first: TaskResult, seeds: Mapping[str, Any], described: Mapping[str, Any]) -> str:
    """What the page of a task says of its runs: the curve, each stage's numbers, and one prompt with its answers."""
    held_out = first.held_out
    steps = {"before": first.numbers["warm_up_steps"], "after": first.numbers["steps"]}
    there = titles_of(held_out)
    titles = [
        title + (f", {steps[stage]} steps" if steps.get(stage) else "")
        for stage, title in there.items()
    ]
    rows = metric_rows([held_out[stage] for stage in there])
    warmed = "base" in held_out
    stages = "the warm-up and of RL" if warmed else "RL"
    of_before = "warmed-up model" if warmed else "base model"
    included = "warm-up and evaluations" if warmed else "evaluations"
    gains = [
        f"{_interval(each['held_out']['change'], '+.2f')} with seed {seed}"
        for seed, each in sorted(seeds.items())
    ]
    minutes = " and ".join(f"{each['minutes']:.1f}" for _, each in sorted(seeds.items()))
    answers = "\n".join(f"{stage}\n{_indented(text)}" for stage, text in answers_of(first))
    said = (
        f"RL adds {' and '.join(gains)} to the held-out reward of the {of_before}. In all it took {minutes} minutes with "
        f"{included}, on {_described(described)}. This prompt gained most:"
    )
    return "\n".join(
        [
            f"![The reward of {first.task} over the steps of {stages}](../images/tour-{first.task}.svg)\n",
            table(rows, ["held-out prompts", *titles]),
            "\n" + textwrap.fill(said, 140, break_long_words=False, break_on_hyphens=False) + "\n",
            f"```text\n{answers}\n```\n",
        ]
    )


def metric_rows(stages: Sequence[Mapping[str, Mapping[str, float]]]) -> list[list[str]]:
    """A row for each metric that has an interval at every stage, and that is not the same as one above it."""
    rows: dict[tuple[str, ...], str] = {}
    for name in stages[-1]:
        if not name.startswith(NOT_SHOWN) and all("low" in stage.get(name, ()) for stage in stages):
            rows.setdefault(tuple(_interval(stage[name]) for stage in stages), name)
    return [[name, *values] for values, name in rows.items()]


def _described(found: Mapping[str, Any]) -> str:
    return f"{found['cores']} cores, {found['processor']}"


def _interval(found: Mapping[str, float], form: str = ".2f") -> str:
    return f"{found['value']:{form}} [{found['low']:{form}}, {found['high']:{form}}]"


def _indented(text: str) -> str:
    return "\n".join(f"  {line}".rstrip() for line in text.splitlines())


def _write_between_marks(page: Path, text: str) -> None:
    begin, end = MARKS
    before, _, rest = page.read_text().partition(begin)
    _, mark, after = rest.partition(end)
    if not mark:
        raise SystemExit(f"{page} has no place for it, which {begin.strip()} and {end} would mark.")
    page.write_text(f"{before}{begin}{text}{end}{after}")


if __name__ == "__main__":
    sys.exit(main())
