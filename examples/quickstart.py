"""`make quickstart`: train a real model on two CPU cores, and see what it learnt.

Everything here goes through the public functions; the first line of `configs/quickstart.yaml` is the same run as a command.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import groupwise
from groupwise import GroupwiseError, RunNotFoundError, Store
from groupwise.core.terminal.plot import terminal_curve, with_mean
from groupwise.core.terminal.text import one_line
from groupwise.runs.find import newest_unfinished

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "configs" / "quickstart.yaml"
TASK = ROOT / "examples" / "01_first_task" / "task.py"
SHORT = [
    "training.max_steps=3",
    "training.prompts_per_step=2",
    "eval.max_prompts=8",
    "run.name=quickstart-short",
]
SHOWN = 5


def main() -> int:
    """Train, then show the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--short", action="store_true", help="three small steps: does everything work here?"
    )
    parser.add_argument("--runs", default="runs", help="folder of the runs")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="config keys set here")
    given = parser.parse_args()
    place = [] if given.runs == "runs" else [f"run.dir={given.runs}"]
    overrides = [*(SHORT if given.short else []), *place, *given.overrides]
    name = "quickstart-short" if given.short else "quickstart"
    began = time.monotonic()
    print(
        "SmolLM2-135M-Instruct learns to add two numbers: LoRA and group-relative RL on this machine.\n",
        flush=True,
    )
    try:
        result = groupwise.rl(
            CONFIG, TASK, overrides=overrides, resume=unfinished(name, Path(given.runs))
        )
    except GroupwiseError as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("\nStopped before the first step. `make quickstart` begins again.")
        return 130
    if result.exit_code:
        print("\nInterrupted. `make quickstart` continues where it stopped.")
        return result.exit_code
    report(result, time.monotonic() - began, overrides)
    return 0


def unfinished(name: str, runs: Path) -> bool:
    """Whether an earlier quickstart was interrupted and can continue."""
    try:
        newest_unfinished(name, runs)
    except RunNotFoundError:
        return False
    return True


def report(result: groupwise.RlResult, seconds: float, overrides: list[str]) -> None:
    """The curve, the same prompts before and after, the held-out numbers, and where to go from here."""
    folder, summary = result.folder, result.summary
    with Store.open(folder / "run.db", readonly=True) as store:
        rewards = with_mean("reward", store.metrics(["reward"]).get("reward", []))
    title = "reward of the sampled completions"
    print("\n" + terminal_curve(rewards, title=title, colour=sys.stdout.isatty()))
    steps = summary["steps"] - summary.get("resumed_from_step", 0)
    print(f"\n{steps} steps in {seconds / 60:.1f} minutes.")
    if result.before and result.after:
        show_answers(result.before, result.after)
        show_numbers(summary["held_out"])
    print(next_steps(summary, folder, overrides))


def show_answers(before: groupwise.EvalResult, after: groupwise.EvalResult) -> None:
    """Some held-out prompts, answered before and after."""
    print("\nThe same held-out prompts before and after:\n")
    for first, last in list(zip(before.rows, after.rows, strict=True))[:SHOWN]:
        print(f"  {one_line(first['prompt'][-1]['content'])}")
        for when, row in (("before", first), ("after", last)):
            reward = "failed" if row["reward"] is None else f"{row['reward']:.2f}"
            print(f"    {when:<7} {reward}  {one_line(row['completion'])}")


def show_numbers(held_out: dict[str, Any]) -> None:
    """Metrics on all held-out prompts."""
    print(f"\nOn {held_out['prompts']} held-out prompts, greedy, with 95 % intervals:\n")
    measured = {name: after for name, after in held_out["after"].items() if "low" in after}
    for metric, after in measured.items():
        print(f"  {metric:<17} {interval(held_out['before'][metric])}  →  {interval(after)}")
    verdict = "rises" if held_out["rises"] else "has not clearly risen"
    change = interval(held_out["change"])
    print(f"  {'change in reward':<17} {change}: the held-out reward {verdict}")


def interval(found: dict[str, float]) -> str:
    """A value with its interval."""
    return f"{found['value']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"


def next_steps(summary: dict[str, Any], folder: Path, overrides: list[str]) -> str:
    """Commands for what comes next, ready to be pasted."""
    run, steps = summary["run"], summary["steps"]
    at = "" if folder.parent == Path("runs") else f" --dir {folder.parent}"
    kept = [word for word in overrides if not word.startswith(("training.max_steps=", "run.name="))]
    same = f"--config {shown(CONFIG)} --task-module {shown(TASK)} {shlex.join(kept)}".rstrip()
    return f"""
The curve as a picture: {folder / "reward.svg"}    The adapter: {folder / "final"}
Your own task: copy {shown(TASK)}, change what is asked and what is rewarded, and give the copy as --task-module.

Next:
  . .venv/bin/activate
  groupwise runs rollouts {run}{at} --best  # what it wrote, with rewards and advantages
  groupwise runs plot {run}{at} --metric entropy  # any metric as a curve
  groupwise eval {same} --policy {run}
  groupwise rl {same} --resume-from {run}@{steps} training.max_steps={2 * steps}
"""


def shown(path: Path) -> Path:
    """The path as one would type it here."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


if __name__ == "__main__":
    sys.exit(main())
