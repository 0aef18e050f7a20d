"""What slow rewards cost: `python -m benchmarks.overlap --store`.

Steps of 8 prompts × 8 completions of exactly 32 tokens whose rewards wait for 0, 2 and 4 seconds, each group in one of four workers,
with as many completions under way at once as half of the step has. At lag 0 the groups that are sampled first are scored while others
are sampled, and a step cannot be shorter than sampling, its last rewards, and learning. At lag 1 the next step is sampled
while this one is scored and learnt from. Both are held against the sum of the parts, which is what doing one after the other would take:
sampling, all rewards by the same workers, learning, publication, as measured at lag 0 with the same rewards.

Prints the median seconds of a step, without the first and the last one of a run, in which nothing can overlap. Ten minutes on two
CPU cores.
"""

from __future__ import annotations

import argparse
import json
import math
from functools import partial
from pathlib import Path
from statistics import median

import groupwise
from benchmarks.apart import apart
from benchmarks.learning import step_values, temporary
from benchmarks.step import RESULTS, machine, slug
from benchmarks.work import MODEL

TASK = Path(__file__).parent / "waiting_task.py"
WAITS = (0.0, 2.0, 4.0)
WORKERS = 4
LAGS = (0, 1)
PARTS = ("sampling", "learning", "publishing")

Cell = dict[str, float]
"""Median seconds of a `step` and of its parts."""


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--waits", type=float, nargs="+", default=WAITS)
    parser.add_argument("--steps", type=int, default=6, help="of each run")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--store", action="store_true", help="keep the result")
    given = parser.parse_args()
    described = machine()
    found: dict[str, dict[str, Cell]] = {}
    print("rewards wait   sum of the parts    lag 0          lag 1")
    for wait in given.waits:
        run = partial(steps, wait, given.steps, given.prompts, given.tokens)
        found[f"{wait:g}"] = {str(lag): apart(partial(run, lag))[0] for lag in LAGS}
        print(line(wait, found, given.prompts), flush=True)
        if given.store:
            kept = {"machine": described, "prompts": given.prompts, "tokens": given.tokens}
            file = RESULTS / f"overlap-{slug(described)}.json"
            file.write_text(json.dumps({**kept, "steps": found}, indent=2) + "\n")


def steps(wait: float, count: int, prompts: int, tokens: int, lag: int) -> Cell:
    """A run with rewards that wait."""
    config = {
        "model": {"name": MODEL},
        "sampler": {
            "max_completion_length": tokens,
            "min_completion_length": tokens,
            "max_num_seqs": 16,
        },
        "training": {
            "max_steps": count,
            "prompts_per_step": prompts,
            "num_generations": 8,
            "max_off_policy_steps": lag,
        },
        "rewards": {"workers": WORKERS},
        "eval": {"before_and_after": False},
        "run": {"save_steps": count},
        "task": {"wait": wait},
    }
    with temporary() as folder:
        result = groupwise.rl(config, TASK, overrides=[f"run.dir={folder}"])
        return {
            name: median(step_values(result.folder, f"time/{name}")[1:-1])
            for name in ("step", "scoring", *PARTS)
        }


def one_after_the_other(wait: float, prompts: int, synchronous: Cell) -> float:
    """Seconds of a step that does so; `synchronous` is one at lag 0."""
    return sum(synchronous[name] for name in PARTS) + math.ceil(prompts / WORKERS) * wait


def line(wait: float, found: dict[str, dict[str, Cell]], prompts: int) -> str:
    """For people: seconds, and their share of the sum."""
    cells = found[f"{wait:g}"]
    whole = one_after_the_other(wait, prompts, cells["0"])
    lags = [cells[str(lag)]["step"] for lag in LAGS]
    shares = "   ".join(f"{seconds:6.2f} s {seconds / whole:4.0%}" for seconds in lags)
    return f"{wait:>10.1f} s   {whole:14.2f} s   {shares}"


if __name__ == "__main__":
    main()
