"""The result of a search: the best config, a table of the trials and a plot."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from groupwise.core.errors import UsageError
from groupwise.core.terminal.notebook import Table
from groupwise.core.terminal.page import picture
from groupwise.core.terminal.plot import Series, svg_curve
from groupwise.notebook.config import TrainingConfig
from groupwise.notebook.search_space import with_values
from groupwise.notebook.study import REASON, REPEATED

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial


@dataclass(frozen=True, slots=True)
class Search:
    """A search's trials and their results."""

    config: TrainingConfig = field(repr=False)
    metric: str
    study: Study = field(repr=False)
    """Optuna's own object, for its plots and importances."""

    @property
    def best(self) -> TrainingConfig:
        """The config of the best trial, to be trained under a name of its own. Raises UsageError where no trial has ended well."""
        return with_values(self.config, self._best.params)

    @property
    def best_value(self) -> float:
        """Its metric."""
        value = self._best.value
        assert value is not None, "it is complete"
        return value

    @property
    def _best(self) -> FrozenTrial:
        if not any(trial.state.name == "COMPLETE" for trial in self.study.trials):
            raise UsageError("No trial has ended well yet; the table says what became of each.")
        return self.study.best_trial

    def table(self) -> Table:
        """A line for each trial, the best first."""
        trials = sorted(self.study.trials, key=_rank)
        names = list(dict.fromkeys(name for trial in trials for name in trial.params))
        rows = [
            (
                str(trial.number),
                *(_shown(trial.params.get(name, "")) for name in names),
                "" if trial.value is None or trial.state.name == "PRUNED" else f"{trial.value:.4g}",
                _became(trial),
            )
            for trial in trials
        ]
        return Table("Trials", rows, ("trial", *names, self.metric, ""))

    def plot_svg(self) -> str:
        """The metric of each trial, and the best so far."""
        done = [
            (trial.number, trial.value)
            for trial in self.study.trials
            if trial.state.name == "COMPLETE"
        ]
        points = [(float(number), value) for number, value in done if value is not None]
        numbers, values = ([each[axis] for each in points] for axis in (0, 1))
        best = zip(numbers, accumulate(values, max), strict=True)
        series = [Series("trial", tuple(points), "points"), Series("best so far", tuple(best))]
        return svg_curve(series, title=f"{self.metric} of each trial", x_label="trial")

    def as_html(self) -> str:
        """Plot and table."""
        return picture(self.plot_svg(), self.metric) + self.table().as_html()

    def _repr_html_(self) -> str:
        return self.as_html()

    def __str__(self) -> str:
        return str(self.table())


_STATES = {
    "COMPLETE": "",
    "PRUNED": "ended early",
    "FAIL": "failed",
    "RUNNING": "cut off",
    "WAITING": "waits",
}


def _rank(trial: FrozenTrial) -> tuple[bool, float, int]:
    complete = trial.state.name == "COMPLETE" and trial.value is not None
    return not complete, -(trial.value or 0.0) if complete else 0.0, trial.number


def _became(trial: FrozenTrial) -> str:
    """The outcome of a trial, shown in the table beside its value."""
    told = _STATES[trial.state.name]
    if (earlier := trial.user_attrs.get(REPEATED)) is not None:
        return f"{told}, as trial {earlier}" if told else f"as trial {earlier}"
    reason = trial.user_attrs.get(REASON)
    if trial.state.name == "FAIL" and reason:
        return f"{told}: {reason.splitlines()[0]}"
    return told


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
