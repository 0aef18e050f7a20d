"""The record of a run, as a notebook looks at it: the same database that the commands and the dashboard read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from groupwise.core.errors import UsageError
from groupwise.core.plugins import nearest
from groupwise.core.terminal.notebook import Table
from groupwise.core.terminal.page import EACH, number, picture, prompt_end
from groupwise.core.terminal.plot import svg_curve, with_mean
from groupwise.core.terminal.text import shorten
from groupwise.notebook.friendly_errors import plain_number
from groupwise.runs.folder import RECORD, read_summary
from groupwise.runs.records import RolloutFilter, RolloutView
from groupwise.runs.store import Store

MAX_CHARACTERS_IN_TABLE = 300
"""Characters of a completion in a table."""


class _Evaluations(dict[str, Mapping[str, float]]):
    """The metrics of each evaluation by its name."""

    def __missing__(self, name: str) -> NoReturn:
        raise UsageError(
            f"The run has no evaluation {name!r}. It has: {', '.join(self) or 'none'}. The one called after is made at the end of a "
            "training; evaluate(config, session) makes one at any time."
        )


@dataclass(frozen=True, slots=True)
class Record:
    """A run folder, read again for each query; also works while the run is in progress."""

    folder: Path

    @property
    def summary(self) -> Mapping[str, Any]:
        """The run's results; empty before its end."""
        return read_summary(self.folder) or {}

    def metrics(self, *names: str) -> dict[str, list[tuple[int, float]]]:
        """Curves by name, each (step, value); all of them without names.

        Raises UsageError for a metric that the run does not have; before its first step there are no metrics, and no name is refused.
        """
        with self._store() as store:
            if names:
                available = store.metric_names()
                for name in names if available else ():
                    if name not in available:
                        close_matches = nearest(str(name), available)
                        hint = (
                            f" Did you mean {' or '.join(close_matches)}?" if close_matches else ""
                        )
                        raise UsageError(
                            f"The run has no metric {name!r}.{hint} It has: {', '.join(available)}."
                        )
            return store.metrics(names or None)

    def metric_names(self) -> list[str]:
        """Names of all metrics."""
        with self._store() as store:
            return store.metric_names()

    def rollouts(self, step: int | None = None, limit: int = 8) -> list[RolloutView]:
        """Completions with their rewards: of one step, or the newest ones. Raises UsageError for a step not done yet."""
        step = plain_number(step)
        with self._store() as store:
            steps = store.step_count()
            is_done = type(step) is int and 1 <= step <= steps
            if step is not None and not is_done:
                available_steps = f"there are 1 to {steps}" if steps else "no step is done yet"
                raise UsageError(
                    f"step is {step!r}, but {available_steps}. Give one of the steps that are done, or None for the newest completions."
                )
            return store.rollouts(
                RolloutFilter(
                    step=step, order="draw" if step is not None else "newest", limit=limit
                )
            )

    def evaluations(self) -> dict[str, Mapping[str, float]]:
        """The metrics of each evaluation of the held-out part by its name: before, after.

        Raises UsageError for a name that the run does not have.
        """
        with self._store() as store:
            return _Evaluations(
                (evaluation.name, evaluation.metrics)
                for evaluation in store.evaluations(rows=False)
            )

    def plot(self, metric: str = "reward") -> Plot:
        """A curve with its moving mean. Raises UsageError for a metric that the run does not have."""
        return self._plot(metric, self.metrics(metric))

    def _plot(self, metric: str, curves: Mapping[str, list[tuple[int, float]]]) -> Plot:
        points = curves.get(metric, [])
        title = f"{self.folder.name}: {metric}"
        return Plot(title, svg_curve(with_mean(EACH, points), title=title))

    def table(
        self, step: int | None = None, limit: int = 8, longest: int = MAX_CHARACTERS_IN_TABLE
    ) -> Table:
        """Completions with their rewards, for reading, of one step, or the newest ones.

        `longest`: characters shown of one. Raises UsageError for a step not done yet.
        """
        rollouts = self.rollouts(step, limit)
        with self._store() as store:
            prompts = store.prompts({rollout.group - 1 for rollout in rollouts})
        # Only the first row of each group shows the prompt.
        groups = [None, *(rollout.group for rollout in rollouts)]
        rows = [
            (
                prompt_end(prompts[rollout.group - 1], longest // 2)
                if rollout.group != previous_group
                else "",
                number(rollout.reward),
                "  ".join(f"{part.name} {number(part.value)}" for part in rollout.parts),
                shorten(rollout.completion, longest),
            )
            for previous_group, rollout in zip(groups, rollouts, strict=False)
        ]
        return Table("Completions", rows, ("asked", "reward", "parts", "completion"))

    def _repr_html_(self) -> str:
        return self._plot("reward", self.metrics()).as_html() + self.table().as_html()

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
