"""How much a busy neighbour slows a step down: `python -m benchmarks.busy --store`.

Steps of the fixed work (`benchmarks.work`), in turns alone and beside a process that keeps one core busy, laid out in two ways: as two
processes of one thread, which is what Groupwise chooses on two cores, and as one process with two threads. Prints seconds of both and
their ratio. Three that share two cores fairly take 1.5 times as long each; threads that wait for each other at every small
operation lose more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.apart import apart
from benchmarks.step import RESULTS, config_of, machine, one_step, requests, slug, spread
from benchmarks.work import W1, Workload
from groupwise.training import placement
from groupwise.training.assembly.parts import Parts
from groupwise.training.assembly.start import training_parts

WORKS = {"W1": W1, "small": Workload((20, 30), 8, 8)}
LAYOUTS = {"processes": 2, "threads": 1}
"""How many processes share the threads."""
PHASES = ("sampling", "learning", "step")

Seconds = dict[str, list[float]]
"""Of each phase, in every repetition."""


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2, help="of all processes together")
    parser.add_argument("--work", choices=WORKS, default="W1")
    parser.add_argument("--store", action="store_true", help="keep the result")
    given = parser.parse_args()
    found: dict[str, dict[str, Seconds]] = {}
    for name, processes in LAYOUTS.items():
        work = WORKS[given.work]
        [found[name]] = apart(partial(measured, work, given.threads, processes, given.repetitions))
        print(f"{name}: {processes} × {max(1, given.threads // processes)} threads")
        for phase in PHASES:
            quiet, busy = found[name]["quiet"][phase], found[name]["busy"][phase]
            ratio = median(busy) / median(quiet)
            print(f"  {phase:<9} {spread(quiet)} s   busy {spread(busy)} s   {ratio:.2f} times")
    if given.store:
        described = machine()
        file = RESULTS / f"busy-{slug(described)}.json"
        file.write_text(json.dumps({"machine": described, "layouts": found}, indent=2) + "\n")
        print(f"stored in {file}")


def measured(work: Workload, threads: int, processes: int, repetitions: int) -> dict[str, Seconds]:
    """Seconds alone and beside a neighbour."""
    config = config_of(work, "auto", threads, processes)
    layout = placement.choose_layout(config, longest_prompt=work.longest)
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(training_parts(config, layout, "bench", Path(folder))) as parts,
    ):
        return asyncio.run(_steps(parts, work, repetitions))


async def _steps(parts: Parts, work: Workload, repetitions: int) -> dict[str, Seconds]:
    found: dict[str, Seconds] = {
        kind: {phase: [] for phase in PHASES} for kind in ("quiet", "busy")
    }
    await parts.sampler.load(await parts.learner.publish(0))
    await one_step(parts, requests(work, 0), 0)
    for repetition in range(1, repetitions + 1):
        for kind, beside in (("quiet", nullcontext), ("busy", neighbour)):
            with beside():
                taken = await one_step(parts, requests(work, repetition), repetition)
            del taken["tokens"]
            taken["step"] = sum(taken.values())
            for phase in PHASES:
                found[kind][phase].append(taken[phase])
    return found


@contextmanager
def neighbour() -> Iterator[subprocess.Popen[bytes]]:
    """A process that keeps one core busy."""
    process = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.read(1)  # it is up
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


if __name__ == "__main__":
    main()
