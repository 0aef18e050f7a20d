"""How the cost of a step grows with its work: `python -m benchmarks.scaling --store`.

Sampling and learning are measured apart, with one prompt of 64 tokens, over the number of completions (at a fixed length) and over their
length (at a fixed number), and over the length of the prompt. Prints seconds, microseconds per completion token and peak memory; draws the
curves for `docs/performance.md`. A line through the origin is the ideal: attention makes lengths cost a little more than that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from contextlib import closing
from pathlib import Path

from benchmarks.step import RESULTS, config_of, machine, measure, slug
from benchmarks.work import Work
from groupwise import build
from groupwise.display.plot import Series, svg_curve

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
SWEEPS = {
    "completions": [Work((64,) * count, 8, 48) for count in (1, 2, 4, 8, 16)],
    "completion tokens": [Work((64, 64), 8, length) for length in (32, 64, 128, 256, 512, 1024)],
    "prompt tokens": [Work((length,) * 2, 8, 48) for length in (50, 100, 200, 400, 800)],
}
REPETITIONS = 2


def main() -> None:
    """Measure, print, draw, store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", action="store_true", help="keep numbers and pictures")
    given = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {}
    for name, works in SWEEPS.items():
        print(f"\n{name:>18}   sampling    learning    memory")
        found[name] = []
        for work in works:
            cell = {"size": size(name, work), **measured(work)}
            found[name].append(cell)
            print(
                f"{cell['size']:>18.0f} {cell['sampling']:8.2f} s  {cell['learning']:8.2f} s  {cell['peak_mib']:6.0f} MiB",
                flush=True,
            )
    if given.store:
        described = machine()
        file = RESULTS / f"scaling-{slug(described)}.json"
        file.write_text(json.dumps({"machine": described, "sweeps": found}, indent=2) + "\n")
        for name, cells in found.items():
            draw(name, cells)
        print(f"stored in {file}")


def size(sweep: str, work: Work) -> float:
    """What a sweep varies."""
    sizes = {
        "completions": len(work.prompts) * work.members,
        "completion tokens": work.new_tokens,
        "prompt tokens": work.longest,
    }
    return float(sizes[sweep])


def measured(work: Work) -> dict[str, float]:
    """Seconds of the fastest of some steps after one that is not counted, and the most memory that was held."""
    config = config_of(work, "auto")
    layout = build.choose_layout(config, longest_prompt=work.longest)
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(build.training_parts(config, layout, "bench", Path(folder))) as parts,
    ):
        seconds = asyncio.run(measure(parts, REPETITIONS, work))
        peak = parts.peak_memory(layout.device) >> 20
    return {
        "sampling": min(seconds["sampling"]),
        "learning": min(seconds["learning"]),
        "peak_mib": float(peak),
    }


def draw(name: str, cells: list[dict[str, float]]) -> None:
    """Seconds of sampling and learning over what the sweep varies."""
    series = [
        Series(phase, tuple((cell["size"], cell[phase]) for cell in cells))
        for phase in ("sampling", "learning")
    ]
    picture = svg_curve(series, title=f"Seconds of a step over {name}", x_label=name)
    (IMAGES / f"scaling-{name.replace(' ', '-')}.svg").write_text(picture)


if __name__ == "__main__":
    main()
