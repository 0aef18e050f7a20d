"""Groupwise and TRL side by side on the same work: `python -m benchmarks.against_trl`.

Each side lives in a process of its own; they take turns, one step each, so that both meet the same moods of the machine. On a GPU one
begins when the other has ended, because each takes what memory it finds there. The work is
fixed (`benchmarks.work`): prompts of so many tokens, completions of exactly so many new ones, one update. TRL runs at its best here: the
base in bfloat16 where the processor multiplies that itself, else in float32, a LoRA of rank 16 on all linear layers, one micro-batch for
each group. Prints seconds of sampling, learning and the whole step with their spread, and how many times as fast Groupwise is, with the
range of the pairs of steps that followed each other; peak memory; and seconds until a first step could begin, which each side has once
(`benchmarks.start_up` measures what a user waits for). Ratios of one run compare, seconds of different machines do not. Where completions
stop where they will, the two write different ones, and seconds per token are compared. `--store` keeps the result with the name of the
machine, steps in the order in which they were taken; `--check` fails where a ratio of speed or the share of memory is clearly worse than
in the stored one, and where there is no stored one.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import groupwise_side, trl_side
from benchmarks.memory import Watch
from benchmarks.step import RESULTS, machine, quick_dtype, slug, spread, times
from benchmarks.work import CORNERS, MODEL, NATURAL, ON_A_GPU, W1, Rules, Workload

SIDES = {"groupwise": groupwise_side.serve, "trl": trl_side.serve}
PHASES = ("sampling", "learning", "step")
CELLS = {"W1": W1, **CORNERS, "natural lengths": NATURAL, "on a GPU": ON_A_GPU}
WORSE = 0.85
"""A ratio below so much of the stored one is a regression; the machine's moods make a tenth."""
MORE = 1.15
"""So is a share of memory above so much of the stored one."""


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5, help="of W1; others have two")
    parser.add_argument(
        "--cell",
        choices=CELLS,
        help="this one alone, else all but that for a GPU; W1 takes five minutes",
    )
    parser.add_argument("--model", default=MODEL, help="another one: its name or folder")
    parser.add_argument(
        "--vllm", action="store_true", help="TRL samples by vLLM on the GPU on which it learns"
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default=quick_dtype())
    either = parser.add_mutually_exclusive_group()  # or the good figures were gone when it fails
    either.add_argument("--store", action="store_true", help="keep the result")
    either.add_argument("--check", action="store_true", help="fail where the stored one is better")
    given = parser.parse_args()
    described = machine()
    rules = Rules(given.dtype, given.model, given.vllm)
    compared = Path(given.model).name + ("-vllm" if given.vllm else "")
    other = "" if compared == MODEL else f"-{compared}"
    file = RESULTS / f"against-trl-{slug(described)}-{given.dtype}{other}.json"
    stored: dict[str, Any] = json.loads(file.read_text())["cells"] if file.exists() else {}
    names = [given.cell] if given.cell else [name for name in CELLS if name != "on a GPU"]
    if given.check:
        expect_stored(names, stored, file)
    found: dict[str, Any] = {}
    for name in names:
        repetitions = given.repetitions if name == "W1" else 2
        found[name] = compare(CELLS[name], repetitions, rules, in_turn=described["gpu"] is None)
        show(name, found[name])
        if given.store:
            keep(file, described, {**stored, **found})
    if given.check and (worse := regressions(found, stored)):
        raise SystemExit("worse than in " + file.name + ":\n  " + "\n  ".join(worse))


def keep(file: Path, described: dict[str, Any], cells: dict[str, Any]) -> None:
    """Store what is known of all cells, in their order."""
    ordered = {name: cells[name] for name in CELLS if name in cells}
    file.write_text(json.dumps({"machine": described, "cells": ordered}, indent=2) + "\n")
    print(f"stored in {file}", flush=True)


def expect_stored(names: Sequence[str], stored: dict[str, Any], file: Path) -> None:
    """Raise SystemExit where a cell has nothing to be compared with."""
    missing = [name for name in names if name not in stored]
    if missing:
        has = f"has {', '.join(stored)}" if stored else "does not exist"
        raise SystemExit(
            f"--check has nothing to compare {', '.join(missing)} with: {file} {has}. Results are kept by machine and number "
            "format. Give --store instead of --check once, with a version that you trust; from then on --check can compare."
        )


def regressions(found: dict[str, Any], stored: dict[str, Any]) -> list[str]:
    """What got clearly worse against TRL, in words."""
    return [
        said
        for name in found
        for said in (*_slower(name, found, stored), *_larger(name, found, stored))
    ]


def _slower(name: str, found: dict[str, Any], stored: dict[str, Any]) -> Iterator[str]:
    for phase in PHASES:
        now, then = ratio(found[name], phase), ratio(stored[name], phase)
        if now < WORSE * then:
            yield f"{name}, {phase}: {now:.2f} times as fast as TRL, not {then:.2f}"


def _larger(name: str, found: dict[str, Any], stored: dict[str, Any]) -> Iterator[str]:
    now, then = share_of_memory(found[name]), share_of_memory(stored[name])
    if now > MORE * then:
        yield f"{name}, memory: {now:.0%} of TRL's, not {then:.0%}"


def ratio(result: dict[str, Any], phase: str) -> float:
    """How many times as fast Groupwise is; seconds per token where each side has written its own."""
    ours, theirs = (median(_each(result, side, phase)) for side in SIDES)
    return theirs / ours


def share_of_memory(result: dict[str, Any]) -> float:
    """Groupwise's peak over TRL's, on the GPU if there is one."""
    ours, theirs = (memory(result, side) for side in SIDES)
    return ours / theirs


def memory(result: dict[str, Any], side: str) -> float:
    """A side's peak in MiB, on the GPU if there is one. Results from before that was measured have none."""
    return result[side].get("gpu_mib") or result[side]["peak_mib"]


def _each(result: dict[str, Any], side: str, phase: str) -> list[float]:
    seconds, tokens = result[side]["seconds"][phase], result[side].get("tokens")
    if not result["work"].get("natural"):
        return seconds
    return [1000 * each / count for each, count in zip(seconds, tokens, strict=True)]


def compare(work: Workload, repetitions: int, rules: Rules, *, in_turn: bool) -> dict[str, Any]:
    """Both sides' figures, step by step in turns, or one side after the other. Before and after them is a step whose memory is watched,
    which takes time."""
    results: dict[str, Any] = {}
    for names in [[*SIDES]] if in_turn else [[name] for name in SIDES]:
        sides: dict[str, Side] = {}
        try:
            for name in names:
                tries = (1,) if in_turn or name != "trl" else micro_batches(len(work.prompts))
                sides[name] = first_that_fits(name, work, rules, tries)
            for _ in range(repetitions):
                for side in sides.values():
                    side.measured.append(side.step())
            for side in sides.values():
                side.watched_step()
        finally:
            for side in sides.values():
                side.end()
        results |= {name: side.result() for name, side in sides.items()}
        if "trl" in sides:
            results["trl"]["groups_in_micro_batch"] = sides["trl"].groups
    return {"work": asdict(work), **results}


def micro_batches(groups: int) -> tuple[int, ...]:
    """Numbers of groups that divide a step's into equal micro-batches, the largest first: all, a half, a quarter and so on."""
    numbers = [groups]
    while numbers[-1] % 2 == 0:
        numbers.append(numbers[-1] // 2)
    return tuple(numbers)


def first_that_fits(name: str, work: Workload, rules: Rules, tries: Sequence[int]) -> Side:
    """A side that has taken a watched step, with the first of these micro-batches for which there is memory."""
    for groups in tries:
        side = Side(name, work, replace(rules, groups=groups))
        try:
            side.watched_step()
        except MemoryError:
            side.end()
            print(f"  {name}: {groups} groups in a micro-batch do not fit", flush=True)
        except BaseException:
            side.end()
            raise
        else:
            return side
    raise SystemExit(f"{name} has too little memory for {tries[-1]} groups in a micro-batch")


class Side:
    """One of the two, in its process."""

    def __init__(self, name: str, work: Workload, rules: Rules) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=SIDES[name], args=(theirs, work, rules))
        started = time.perf_counter()
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self._watch = Watch(self._process.pid)
        self._receive()
        self.groups = rules.groups
        self.start_up = time.perf_counter() - started
        self.measured: list[dict[str, float]] = []

    def step(self) -> dict[str, float]:
        """Seconds of each phase of one step, and its tokens."""
        self._connection.send("step")
        return self._receive()

    def watched_step(self) -> None:
        """A step that counts for the peak of memory alone."""
        with self._watch:
            self.step()

    def end(self) -> None:
        """Let the process go."""
        with suppress(BrokenPipeError):  # it has ended already
            self._connection.send("end")
        self._process.join(60)
        self._process.kill()

    def result(self) -> dict[str, Any]:
        """What is stored."""
        seconds = {phase: [step[phase] for step in self.measured] for phase in PHASES}
        return {
            "seconds": seconds,
            "tokens": [step["tokens"] for step in self.measured],
            "peak_mib": self._watch.peak,
            "gpu_mib": max(step["gpu_mib"] for step in self.measured),
            "start_up_seconds": self.start_up,
        }

    def _receive(self) -> dict[str, float]:
        try:
            received = self._connection.recv()
        except EOFError:
            raise SystemExit(f"{self._process.name} ended; see above") from None
        if received == trl_side.OUT_OF_MEMORY:
            raise MemoryError
        return received


def show(name: str, result: dict[str, Any]) -> None:
    """A table for people: both sides, and how many times as fast Groupwise is."""
    work = Workload(**result["work"])
    print(f"\n{name}: {work.described}")
    ours, theirs = result["groupwise"], result["trl"]
    unit = "ms per token" if work.natural else "s"
    for phase in PHASES:
        a, b = (_each(result, side, phase) for side in SIDES)
        print(f"  {phase:<10} {spread(a)} {unit}   TRL {spread(b)} {unit}   {times(a, b)}")
    share = share_of_memory(result)
    a, b = (memory(result, side) for side in SIDES)
    print(f"  memory     {a:,.0f} MiB   TRL {b:,.0f} MiB   {share:.0%}")
    a, b = ours["start_up_seconds"], theirs["start_up_seconds"]
    print(f"  start-up   {a:.1f} s   TRL {b:.1f} s   {b / a:.2f} times")


if __name__ == "__main__":
    main()
