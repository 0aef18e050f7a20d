"""Groupwise and TRL side by side on the same work: `python -m benchmarks.against_trl`.

Each side lives in a process of its own; they take turns, one step each, so that both meet the same moods of the machine. The work is
fixed (`benchmarks.work`): prompts of so many tokens, completions of exactly so many new ones, one update. TRL runs at its best here: the
base in bfloat16, a LoRA of rank 16 on all linear layers, one micro-batch for each group. Prints seconds of sampling, learning and the
whole step, peak memory and start-up of both, with their spread, and the ratios; ratios of one run compare, seconds of different
machines do not. `--store` keeps the result with the name of the machine.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from dataclasses import asdict
from statistics import median
from typing import Any

from benchmarks import groupwise_side, trl_side
from benchmarks.memory import Watch
from benchmarks.step import RESULTS, machine, slug, spread
from benchmarks.work import CORNERS, W1, Work

SIDES = {"groupwise": groupwise_side.serve, "trl": trl_side.serve}
PHASES = ("sampling", "learning", "step")


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--corners", action="store_true", help="the corner cells too, twice each")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--store", action="store_true", help="keep the result")
    given = parser.parse_args()
    cells = {"W1": (W1, given.repetitions)}
    if given.corners:
        cells |= {name: (work, 2) for name, work in CORNERS.items()}
    found = {name: compare(work, times, given.dtype) for name, (work, times) in cells.items()}
    for name, result in found.items():
        show(name, result)
    if given.store:
        described = machine()
        file = RESULTS / f"against-trl-{slug(described)}-{given.dtype}.json"
        file.write_text(json.dumps({"machine": described, "cells": found}, indent=2) + "\n")
        print(f"stored in {file}")


def compare(work: Work, repetitions: int, dtype: str) -> dict[str, Any]:
    """Both sides' figures, step by step in turns, after one step each that is not counted."""
    sides = {name: Side(name, work, dtype) for name in SIDES}
    try:
        for side in sides.values():
            side.step()
        for _ in range(repetitions):
            for side in sides.values():
                side.measured.append(side.step())
    finally:
        for side in sides.values():
            side.end()
    return {"work": asdict(work), **{name: side.result() for name, side in sides.items()}}


class Side:
    """One of the two, in its process."""

    def __init__(self, name: str, work: Work, dtype: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=SIDES[name], args=(theirs, work, dtype))
        started = time.perf_counter()
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self._watch = Watch(self._process.pid)
        self._receive()
        self.start_up = time.perf_counter() - started
        self.measured: list[dict[str, float]] = []

    def step(self) -> dict[str, float]:
        """Seconds of each phase of one step."""
        with self._watch:
            self._connection.send("step")
            return self._receive()

    def end(self) -> None:
        """Let the process go."""
        self._connection.send("end")
        self._process.join(60)
        self._process.kill()

    def result(self) -> dict[str, Any]:
        """What is stored."""
        seconds = {phase: [step[phase] for step in self.measured] for phase in PHASES}
        return {"seconds": seconds, "peak_mib": self._watch.peak, "start_up_seconds": self.start_up}

    def _receive(self) -> dict[str, float]:
        try:
            return self._connection.recv()
        except EOFError:
            raise SystemExit(f"{self._process.name} ended; see above") from None


def show(name: str, result: dict[str, Any]) -> None:
    """A table for people: both sides, and how many times as fast Groupwise is."""
    work = Work(**result["work"])
    print(f"\n{name}: {work.described}")
    ours, theirs = result["groupwise"], result["trl"]
    for phase in PHASES:
        a, b = ours["seconds"][phase], theirs["seconds"][phase]
        print(
            f"  {phase:<10} {spread(a)} s   TRL {spread(b)} s   {median(b) / median(a):.2f} times"
        )
    share = ours["peak_mib"] / theirs["peak_mib"]
    print(f"  memory     {ours['peak_mib']:,} MiB   TRL {theirs['peak_mib']:,} MiB   {share:.0%}")
    print(f"  start-up   {ours['start_up_seconds']:.1f} s   TRL {theirs['start_up_seconds']:.1f} s")


if __name__ == "__main__":
    main()
