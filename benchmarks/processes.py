"""What several processes gain: `python -m benchmarks.processes --store`.

The same steps, of 4 prompts × 8 completions of exactly 32 tokens, by one process with one thread and with all, by processes that share a
model (`run.processes`), by learners that have a model each (`distributed.learners`), and with samplers apart from them
(`distributed.samplers`). At lag 0 one half waits for the other where they are apart; at lag 1 the next step is sampled while this one is
learnt from.

Prints the median seconds of a step, without the first and the last one of a run, how many times as fast that is as one process with all
threads at lag 0, and the most memory that all processes hold together. Two processes with a thread each on two cores are twice as fast at
best. Five minutes on two CPU cores.
"""

from __future__ import annotations

import argparse
import json
import os
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import groupwise
from benchmarks.apart import apart
from benchmarks.learning import step_values, temporary
from benchmarks.memory import Watch
from benchmarks.overlap import TASK
from benchmarks.step import RESULTS, machine, slug
from benchmarks.work import MODEL
from groupwise.engine.models.machine import available_cores

LAGS = (0, 1)
ALONE = "one process"
CORES = available_cores()

Cell = dict[str, float]
"""Median seconds of a `step`, of its `sampling` and its `learning`, and `peak_mib`."""


def layouts() -> dict[str, dict[str, Any]]:
    """Ways of dividing the same work, by what they are called: keys of a config."""
    half = max(1, CORES // 2)
    return {
        "one process, one thread": {"run.processes": 1, "run.threads": 1},
        ALONE: {"run.processes": 1},
        f"run.processes={CORES}": {"run.processes": CORES},
        f"distributed.learners={CORES}": {"distributed.learners": CORES},
        f"distributed.learners={half} samplers={half}": {
            "distributed.learners": half,
            "distributed.samplers": half,
        },
        f"distributed.learners={CORES} samplers={CORES}": {
            "distributed.learners": CORES,
            "distributed.samplers": CORES,
        },
    }


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--steps", type=int, default=5, help="of each run")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--store", action="store_true", help="keep the result")
    given = parser.parse_args()
    described = machine()
    found: dict[str, dict[str, Cell]] = {}
    print(f"{'':>32}" + "".join(f"  lag {lag}: step, sampling, learning" for lag in LAGS))
    for name, keys in layouts().items():
        run = partial(steps, keys, given.model, given.steps, given.prompts, given.tokens)
        found[name] = {str(lag): apart(partial(run, lag))[0] for lag in LAGS}
        print(seconds(name, found[name]), flush=True)
        if given.store:
            kept = {"machine": described, "prompts": given.prompts, "tokens": given.tokens}
            file = RESULTS / f"processes-{slug(described)}.json"
            file.write_text(json.dumps({**kept, "steps": found}, indent=2) + "\n")
    print(f"\n{'':>32}" + "".join(f"  lag {lag}: as fast, memory" for lag in LAGS))
    for name, cells in found.items():
        print(gain(name, cells, found[ALONE]["0"]["step"]))


def steps(
    keys: dict[str, Any], model: str, count: int, prompts: int, tokens: int, lag: int
) -> Cell:
    """A run whose work is divided so."""
    config = {
        "model": {"name": model},
        "sampler": {"max_completion_length": tokens, "min_completion_length": tokens},
        "training": {
            "max_steps": count,
            "prompts_per_step": prompts,
            "num_generations": 8,
            "max_off_policy_steps": lag,
        },
        "eval": {"before_and_after": False},
        "run": {"save_steps": count},
        "task": {"wait": 0.0},
    }
    watch = Watch(os.getpid())
    with temporary() as folder, watch:
        words = [f"{key}={value}" for key, value in keys.items()]
        result = groupwise.rl(config, TASK, overrides=[f"run.dir={Path(folder)}", *words])
        found = {
            name: median(step_values(result.folder, f"time/{name}")[1:-1])
            for name in ("step", "sampling", "learning")
        }
    return {**found, "peak_mib": float(watch.peak)}


def seconds(name: str, cells: dict[str, Cell]) -> str:
    """For people: what a step takes."""
    columns = [
        "".join(f"{cells[str(lag)][part]:9.2f} s" for part in ("step", "sampling", "learning"))
        for lag in LAGS
    ]
    return f"{name:>32}{''.join(columns)}"


def gain(name: str, cells: dict[str, Cell], alone: float) -> str:
    """For people: how many times as fast as one process, and what that takes."""
    columns = [
        f"{alone / cells[str(lag)]['step']:13.2f} × {cells[str(lag)]['peak_mib']:6.0f} MiB"
        for lag in LAGS
    ]
    return f"{name:>32}{''.join(columns)}"


if __name__ == "__main__":
    main()
