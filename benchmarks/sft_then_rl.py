"""Worked solutions and then rewards, against rewards alone for the same time: `python -m benchmarks.sft_then_rl`.

Runs `examples/05_sft_then_rl` twice on the same held-out sums: supervised steps followed by rewards, and rewards alone with as many more
steps as fit into the seconds that the supervised ones took. Prints the held-out accuracy of both with its 95 % interval, draws
the share of right answers over the seconds of training (evaluations do not count), and stores both with the name of the machine.
On two CPU cores it takes about twenty minutes. The runs stay in `runs/`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import groupwise
from benchmarks.learning import IMAGES, ROOT, step_values
from benchmarks.step import RESULTS, machine, slug
from groupwise.core.terminal.plot import Series, moving_mean, svg_curve

EXAMPLE = ROOT / "examples" / "05_sft_then_rl"
PICTURE = IMAGES / "sft-then-rl.svg"
RIGHT = "rewards/right/mean"
WINDOW = 5


@dataclass(frozen=True, slots=True)
class Way:
    """One way of learning, measured."""

    name: str
    summary: dict[str, Any]
    seconds: tuple[float, ...]
    """Of training when each step of rewards was done, supervised steps before it included."""
    right: tuple[float, ...]
    """Share of right answers in each step."""

    @property
    def accuracy(self) -> dict[str, float]:
        """On the held-out sums after training, with its interval."""
        return self.summary["held_out"]["after"]["accuracy"]

    @property
    def curve(self) -> Series:
        return Series(
            self.name, tuple(zip(self.seconds, moving_mean(self.right, WINDOW), strict=True))
        )


def main() -> None:
    """Run both, print, draw, and store if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40, help="steps of rewards after the warm-up")
    parser.add_argument("--sft-steps", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", default="runs", help="folder of the runs")
    parser.add_argument("--store", action="store_true", help="keep picture and numbers")
    parser.add_argument("overrides", nargs="*", help="key=value for both reward runs")
    given = parser.parse_args()
    both = compare(given)
    for way in both:
        print("{:<24} {value:.3f} [{low:.3f}, {high:.3f}]".format(way.name, **way.accuracy))
    if given.store:
        store(both)


def compare(given: argparse.Namespace) -> tuple[Way, Way]:
    """The two ways, with equal seconds of training."""
    common = [f"training.seed={given.seed}", f"run.dir={given.dir}"]
    taught = groupwise.sft(
        EXAMPLE / "sft.yaml",
        EXAMPLE / "task.py",
        overrides=[*common, f"training.max_steps={given.sft_steps}"],
    )
    warm_up = sum(step_values(taught.folder, "time/step"))
    steps = [*common, *given.overrides, f"training.max_steps={given.steps}"]
    first = rewarded(steps, "worked solutions first", warm_up, str(taught.folder))
    mean_step = (first.seconds[-1] - warm_up) / given.steps
    more = given.steps + round(warm_up / mean_step)
    alone = [*common, *given.overrides, f"training.max_steps={more}", "warm_up=null"]
    return first, rewarded(alone, "rewards alone", 0.0, None)


def rewarded(overrides: list[str], name: str, before: float, start: str | None) -> Way:
    """A run of rewards, `before` seconds of training after the start of its way."""
    label = f"run.name=addition-{name.replace(' ', '-')}"
    result = groupwise.rl(
        EXAMPLE / "rl.yaml", EXAMPLE / "task.py", overrides=[*overrides, label], init_from=start
    )
    steps = step_values(result.folder, "time/step")
    done = tuple(before + seconds for seconds in accumulate(steps))
    return Way(name, result.summary, done, tuple(step_values(result.folder, RIGHT)))


def store(both: tuple[Way, Way]) -> None:
    """Picture and numbers."""
    title = "Three-digit sums: share right"
    curves = [way.curve for way in both]
    PICTURE.write_text(svg_curve(curves, title=title, x_label="seconds of training"))
    described = machine()
    numbers = {
        way.name: {
            "held_out_accuracy": way.accuracy,
            "seconds": way.seconds[-1],
            "steps": len(way.seconds),
            "right": way.right,
        }
        for way in both
    }
    file = RESULTS / f"sft-then-rl-{slug(described)}.json"
    file.write_text(json.dumps({"machine": described, **numbers}, indent=2) + "\n")
    print(f"stored in {PICTURE} and {file}")


if __name__ == "__main__":
    main()
