"""How several sides learn the same task, with several seeds: runs that are kept one by one, shown and drawn together.

Each run has a process of its own, and is stored as soon as it is over. A study that was stopped goes on with the runs that are
missing, and what is there is drawn all the same. A study of other settings is refused.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import groupwise
from benchmarks.apart import apart
from benchmarks.step import machine
from groupwise.core.terminal.plot import Series, moving_mean, svg_curve
from groupwise.runs.store import Store

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs" / "quickstart.yaml"
TASK = ROOT / "examples" / "01_first_task" / "task.py"
IMAGES = ROOT / "docs" / "images"
WINDOW = 5
"""Steps whose mean a picture shows at each place."""

Curve = dict[str, list[float]]
"""Of one run: the mean `reward` and the `seconds` of each step, and what else its side measures."""
Learn = Callable[[int], Curve]
"""Makes a run, given its seed; known to pickle."""


@dataclass(slots=True)
class Study:
    """The runs of all sides."""

    settings: dict[str, Any]
    file: Path | None
    """Where they are kept; None: nowhere."""
    curves: dict[str, dict[str, Curve]] = field(default_factory=dict)
    """By side and seed."""

    @classmethod
    def opened(cls, settings: dict[str, Any], file: Path | None) -> Study:
        """With the runs that are there already."""
        if file is None or not file.exists():
            return cls(settings, file)
        stored = json.loads(file.read_text())
        if stored["settings"] != settings:
            raise SystemExit(
                f"{file} has runs with {stored['settings']}, not {settings}; move it away, or give those settings."
            )
        return cls(settings, file, stored["curves"])

    def run(
        self,
        sides: Mapping[str, Learn],
        seeds: int,
        minutes: float | None,
        *,
        together: bool = False,
    ) -> None:
        """Make the runs that are missing: one after the other, or with `together` those of a seed at the same time.

        None is begun after so many minutes.
        """
        begun = time.monotonic()
        for seed, names in self._missing(list(sides), seeds, together):
            if minutes is not None and time.monotonic() - begun > 60 * minutes:
                print("no time is left for the other runs; the same command goes on with them")
                return
            found = apart(*(partial(sides[name], seed) for name in names))
            for name, curve in zip(names, found, strict=True):
                self.curves.setdefault(name, {})[str(seed)] = curve
                print(f"{name} seed {seed}: {_described(curve)}", flush=True)
            self._keep()

    def show(self) -> None:
        """How far each side came, and how long a step took."""
        for side, runs in self.curves.items():
            whole = [fmean(run["reward"]) for run in runs.values()]
            ends = [fmean(run["reward"][-WINDOW:]) for run in runs.values()]
            seconds = fmean(second for run in runs.values() for second in run["seconds"])
            print(
                f"{side:<10} {len(runs)} seeds   reward of all steps {spread(whole)}   "
                f"of the last {WINDOW} {spread(ends)}   {seconds:.2f} s for a step"
            )

    def draw(self, name: str, labels: Sequence[str] = ("step", "seconds")) -> None:
        """Pictures of the reward against these, in `docs/images`."""
        for label in labels:
            series = [
                each for side, runs in self.curves.items() for each in _drawn(side, runs, label)
            ]
            picture = svg_curve(series, title="Reward, mean and range of seeds", x_label=label)
            (IMAGES / f"{name}-{label}.svg").write_text(picture)

    def _missing(
        self, names: Sequence[str], seeds: int, together: bool
    ) -> Iterator[tuple[int, list[str]]]:
        for seed in range(seeds):
            missing = [name for name in names if str(seed) not in self.curves.get(name, {})]
            if together and missing:
                yield seed, missing
            elif not together:
                yield from ((seed, [name]) for name in missing)

    def _keep(self) -> None:
        if self.file is not None:
            kept = {"machine": machine(), "settings": self.settings, "curves": self.curves}
            self.file.write_text(json.dumps(kept) + "\n")


def with_groupwise(overrides: Sequence[str], folder: str, task: Path = TASK) -> groupwise.RlResult:
    """A run of `groupwise.rl` on the quickstart's config, or on a task of its own, in `folder`."""
    return groupwise.rl(CONFIG, task, overrides=[*overrides, f"run.dir={folder}"])


def recorded(result: groupwise.RlResult) -> Curve:
    """The curve of a run of Groupwise."""
    return {
        "reward": step_values(result.folder, "reward"),
        "seconds": step_values(result.folder, "time/step"),
        "gap": step_values(result.folder, "sampling/logprob_gap"),
    }


def step_values(folder: Path, metric: str) -> list[float]:
    """A metric of every step of a run of Groupwise."""
    with Store.open(folder / "run.db", readonly=True) as record:
        return [value for _, value in record.metrics([metric])[metric]]


def spread(numbers: Sequence[float]) -> str:
    """Mean and standard deviation over seeds."""
    deviation = stdev(numbers) if len(numbers) > 1 else 0.0
    return f"{fmean(numbers):.3f} ± {deviation:.3f}"


def temporary() -> tempfile.TemporaryDirectory[str]:
    """A folder for a run that nobody will look at again."""
    return tempfile.TemporaryDirectory(prefix="groupwise-bench-")


def _described(curve: Curve) -> str:
    return f"reward {fmean(curve['reward']):.3f}, {fmean(curve['seconds']):.2f} s for a step"


def _drawn(side: str, runs: Mapping[str, Curve], label: str) -> tuple[Series, Series]:
    """The range of all seeds, and their mean."""
    smooth = [moving_mean(run["reward"], WINDOW) for run in runs.values()]
    steps = min(map(len, smooth))
    seconds = [fmean(run["seconds"][step] for run in runs.values()) for step in range(steps)]
    places = list(accumulate(seconds)) if label == "seconds" else [*range(1, steps + 1)]
    columns = [[curve[step] for curve in smooth] for step in range(steps)]
    edges = [(x, y) for x, ys in zip(places, columns, strict=True) for y in (min(ys), max(ys))]
    means = [(x, fmean(ys)) for x, ys in zip(places, columns, strict=True)]
    return Series(side, tuple(edges), "band"), Series(side, tuple(means))
