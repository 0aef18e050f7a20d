"""How the cost of a step grows with its work: `python -m benchmarks.scaling --store`.

Sampling and learning over the number of completions (of a fixed length), over their length (of a fixed number), and over the length of the
prompts. Prints seconds, microseconds for each token of completions, and the most memory that all processes hold together; draws
the curves for `docs/performance.md`. A straight line is the ideal; attention makes lengths cost a little more. Each cell has a process
of its own, laid out as a run of that size would be, and is stored as soon as it is there; cells that are stored are not measured again. Ten
minutes on two CPU cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.apart import apart
from benchmarks.learning import IMAGES
from benchmarks.memory import Watch
from benchmarks.step import RESULTS, config_of, machine, measure, one_step, requests, slug
from benchmarks.work import Workload
from groupwise.core.terminal.plot import Series, svg_curve
from groupwise.training import placement
from groupwise.training.assembly.parts import Parts
from groupwise.training.assembly.start import training_parts

Cell = dict[str, float]
"""Of one work: its `size` (what the sweep varies), seconds of `sampling` and `learning`, `peak_mib`, and how many `tokens` it samples."""

SWEEPS = {
    "completions": [
        Workload((64,), 4, 48),
        *(Workload((64,) * count, 8, 48) for count in (1, 2, 4, 8)),
    ],
    "completion tokens": [Workload((64,) * 2, 8, length) for length in (48, 128, 256, 512, 1024)],
    "prompt tokens": [Workload((length,) * 2, 8, 48) for length in (50, 200, 800)],
}


def main() -> None:
    """Measure, print, draw, store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", choices=SWEEPS, help="this one alone")
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--most", type=int, help="leave out works that sample more tokens")
    parser.add_argument("--store", action="store_true", help="keep numbers and pictures")
    given = parser.parse_args()
    described = machine()
    file = RESULTS / f"scaling-{slug(described)}.json" if given.store else None
    found: dict[str, dict[str, Cell]] = (
        json.loads(file.read_text())["sweeps"] if file and file.exists() else {}
    )
    for name in [given.sweep] if given.sweep else SWEEPS:
        print(f"\n{name:>18}    sampling   learning   for a token      memory")
        cells = found.setdefault(name, {})
        for work in SWEEPS[name]:
            if given.most and work.sampled > given.most:
                continue
            if work.described not in cells:
                [cell] = apart(partial(measured, work, given.repetitions))
                cells[work.described] = {"size": size(name, work), **cell}
                if file:
                    file.write_text(json.dumps({"machine": described, "sweeps": found}, indent=2))
            print(line(cells[work.described]), flush=True)
        if given.store:
            draw(name, list(cells.values()))


def size(sweep: str, work: Workload) -> float:
    """What a sweep varies."""
    sizes = {
        "completions": len(work.prompts) * work.members,
        "completion tokens": work.new_tokens,
        "prompt tokens": work.longest,
    }
    return float(sizes[sweep])


def measured(work: Workload, repetitions: int) -> dict[str, float]:
    """Seconds of the fastest of some steps after one that is not counted, and the most memory in one more, which looking slows down."""
    config = config_of(work, "auto")
    layout = placement.choose_layout(config, longest_prompt=work.longest)
    watch = Watch(os.getpid())
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(training_parts(config, layout, "bench", Path(folder))) as parts,
    ):
        seconds, _ = asyncio.run(_steps(parts, work, repetitions, watch))
    return {
        "sampling": min(seconds["sampling"]),
        "learning": min(seconds["learning"]),
        "peak_mib": float(watch.peak),
        "tokens": float(work.sampled),
    }


async def _steps(parts: Parts, work: Workload, repetitions: int, watch: Watch) -> Any:
    seconds = await measure(parts, repetitions, work)
    with watch:
        return seconds, await one_step(parts, requests(work, repetitions + 1), repetitions + 1)


def line(cell: Cell) -> str:
    """For people."""
    each = 1e6 * (cell["sampling"] + cell["learning"]) / cell["tokens"]
    return (
        f"{cell['size']:>18.0f}  {cell['sampling']:8.2f} s {cell['learning']:8.2f} s   "
        f"{each:8.0f} µs   {cell['peak_mib']:6.0f} MiB"
    )


def draw(name: str, cells: list[Cell]) -> None:
    """Seconds of sampling and learning over what the sweep varies, and memory likewise."""
    ordered = sorted(cells, key=lambda cell: cell["size"])
    file = f"scaling-{name.replace(' ', '-')}"
    phases = [_series(phase, ordered) for phase in ("sampling", "learning")]
    title = f"Seconds of a step over {name}"
    (IMAGES / f"{file}.svg").write_text(svg_curve(phases, title=title, x_label=name))
    memory = svg_curve(
        [_series("peak_mib", ordered)], title=f"Peak memory over {name} (MiB)", x_label=name
    )
    (IMAGES / f"{file}-memory.svg").write_text(memory)


def _series(key: str, cells: list[Cell]) -> Series:
    return Series(key.replace("peak_mib", "memory"), tuple((c["size"], c[key]) for c in cells))


if __name__ == "__main__":
    main()
