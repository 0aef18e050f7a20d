"""The record of a run, as a notebook looks at it: the same database that the commands and the dashboard read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.display.notebook import Table
from groupwise.display.page import EACH, number, picture
from groupwise.display.plot import svg_curve, with_mean
from groupwise.display.text import shorten
from groupwise.runs.folder import RECORD, read_summary
from groupwise.runs.records import RolloutFilter, RolloutView
from groupwise.runs.store import Store

SHOWN = 300
"""Characters of a completion in a table."""


@dataclass(frozen=True, slots=True)
class Record:
    """A run folder, read anew at each question; also while the run goes on."""

    folder: Path

    @property
    def summary(self) -> Mapping[str, Any]:
        """What the run came to; empty before its end."""
        return read_summary(self.folder) or {}

    def metrics(self, *names: str) -> dict[str, list[tuple[int, float]]]:
        """Curves by name, each (step, value); all of them without names."""
        with self._store() as store:
            return store.metrics(names or None)

    def metric_names(self) -> list[str]:
        """Of all that was measured."""
        with self._store() as store:
            return store.metric_names()

    def rollouts(self, step: int | None = None, limit: int = 8) -> list[RolloutView]:
        """Completions with their rewards: of one step (an index from 0), or the newest ones."""
        with self._store() as store:
            return store.rollouts(
                RolloutFilter(
                    step=step, order="draw" if step is not None else "newest", limit=limit
                )
            )

    def evaluations(self) -> dict[str, Mapping[str, float]]:
        """The metrics of each evaluation of the held-out part by its name: before, after."""
        with self._store() as store:
            return {each.name: each.metrics for each in store.evaluations(rows=False)}

    def plot(self, metric: str = "reward") -> Plot:
        """A curve with its moving mean."""
        points = self.metrics(metric).get(metric, [])
        title = f"{self.folder.name}: {metric}"
        return Plot(title, svg_curve(with_mean(EACH, points), title=title))

    def table(self, step: int | None = None, limit: int = 8, longest: int = SHOWN) -> Table:
        """Completions with their rewards, for reading; `longest`: characters shown of one."""
        return completions_table(self.rollouts(step, limit), longest)

    def _repr_html_(self) -> str:
        return self.plot().as_html() + self.table().as_html()

    def _store(self) -> Store:
        return Store.open(self.folder / RECORD, readonly=True)


@dataclass(frozen=True, slots=True)
class Plot:
    """A curve that a notebook draws; `svg` is its source."""

    title: str
    svg: str

    def as_html(self) -> str:
        """An image."""
        return picture(self.svg, self.title)

    def _repr_html_(self) -> str:
        return self.as_html()


def completions_table(rollouts: Sequence[RolloutView], longest: int = SHOWN) -> Table:
    """Reward, its parts, and what was said."""
    rows = [
        (
            number(each.reward),
            "  ".join(f"{part.name} {number(part.value)}" for part in each.parts),
            shorten(each.completion, longest),
        )
        for each in rollouts
    ]
    return Table("Completions", rows, ("reward", "parts", "completion"))
