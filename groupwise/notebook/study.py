"""The Optuna study of a search: selects the next trial, and records the result of each."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.core.errors import ConfigError, UsageError
from groupwise.core.settings.credentials import holds_secret
from groupwise.core.terminal.notebook import Table
from groupwise.core.terminal.page import picture
from groupwise.core.terminal.plot import Series, svg_curve
from groupwise.notebook.config import TrainingConfig
from groupwise.notebook.search_space import with_values

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial, Trial

logger = logging.getLogger(__name__)

JOURNAL = "trials.jsonl"
REPEATED = "repeated"
"""The number of the trial that had the same values."""
REASON = "reason"
"""The reason why a trial failed."""


def open_study(folder: Path, prune: bool) -> Study:
    """The study of a folder. `prune`: end trials early if they do worse than the median."""
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    folder.mkdir(parents=True, exist_ok=True)
    return optuna.create_study(
        study_name="search",
        direction="maximize",
        storage=JournalStorage(JournalFileBackend(str(folder / JOURNAL))),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=3)
        if prune
        else optuna.pruners.NopPruner(),
        load_if_exists=True,
    )


def refuse_other_space(study: Study, distributions: Mapping[str, Any]) -> None:
    """Raise ConfigError if earlier trials used another space."""
    for trial in study.trials:
        is_running = (
            trial.state.name == "RUNNING" and trial.distributions.keys() < distributions.keys()
        )
        if trial.distributions != dict(distributions) and not is_running:
            raise ConfigError(
                "There is a search of this experiment already, with another space: "
                f"{', '.join(trial.distributions)}. Choose another experiment_name, or give the same space to go on."
            )


def next_trial(study: Study, distributions: dict[str, Any], trials: int, seed: int) -> Trial | None:
    """The trial that was cut off, else a new one; None if there are enough trials, or no combination is left to try."""
    from optuna.samplers import TPESampler
    from optuna.trial import Trial, TrialState

    for frozen in study.trials:
        if frozen.state.name == "RUNNING" and frozen.distributions != distributions:
            # It was cut off while its values were chosen.
            study.tell(frozen.number, state=TrialState.FAIL)
        elif frozen.state.name == "RUNNING":
            return Trial(study, frozen._trial_id)  # pyright: ignore[reportPrivateUsage]  # no other way to continue a trial
    done = len(study.trials)
    if done >= trials or _all_tried(study, distributions):
        return None
    # With this seed a trial's values do not depend on which machine ran the others.
    study.sampler = TPESampler(seed=seed + done)
    return study.ask(distributions)


def _all_tried(study: Study, distributions: Mapping[str, Any]) -> bool:
    """True if every combination was tried; never for a continuous range."""
    from optuna.distributions import CategoricalDistribution, IntDistribution

    combinations = 1
    for distribution in distributions.values():
        if isinstance(distribution, CategoricalDistribution):
            choices = distribution.choices
            combinations *= sum(
                choice not in choices[:index] for index, choice in enumerate(choices)
            )
        elif isinstance(distribution, IntDistribution):
            combinations *= distribution.high - distribution.low + 1
        else:
            return False
    combinations_tried: list[dict[str, Any]] = []
    for trial in study.trials:
        if trial.params.keys() == distributions.keys() and trial.params not in combinations_tried:
            combinations_tried.append(trial.params)
    return len(combinations_tried) == combinations


def reuse_earlier_result(study: Study, trial: Trial) -> bool:
    """True if a trial with these values has already ended; its result is then reported for this trial too."""
    ended_trials = [
        earlier_trial
        for earlier_trial in study.trials
        if earlier_trial.state.name in ("COMPLETE", "PRUNED")
    ]
    earlier = next(
        (earlier_trial for earlier_trial in ended_trials if earlier_trial.params == trial.params),
        None,
    )
    if earlier is None:
        return False
    trial.set_user_attr(REPEATED, earlier.number)
    if earlier.state.name == "COMPLETE":
        study.tell(trial, earlier.value)
    else:
        step = earlier.last_step
        if step is not None and step not in study.trials[trial.number].intermediate_values:
            trial.report(earlier.intermediate_values[step], step)
        end_early(study, trial)
    return True


def end_early(study: Study, trial: Trial) -> None:
    """End a trial that did worse than the others; the study keeps the last value that it reported."""
    study.tell(trial, state=_trial_state("PRUNED"))


def fail(study: Study, trial: Trial, error: Exception) -> None:
    """Mark a trial as failed, with the reason; credentials are not written down."""
    lines = ("…" if holds_secret(line) else line for line in str(error).splitlines())
    reason = "\n".join(lines)
    logger.warning("trial %d failed: %s", trial.number, reason)
    trial.set_user_attr(REASON, reason)
    study.tell(trial, state=_trial_state("FAIL"))


def early_end_reason(study: Study, trials: int) -> str:
    """The explanation for fewer trials than the user asked for."""
    failed_count = sum(trial.state.name == "FAIL" for trial in study.trials)
    retry_hint = (
        "; those that failed are tried again under another experiment_name" if failed_count else ""
    )
    return f"Each combination of the space was tried, so that the search is over after {len(study.trials)} of {trials} trials{retry_hint}."


def _trial_state(name: str) -> Any:
    from optuna.trial import TrialState

    return TrialState[name]


@dataclass(frozen=True, slots=True)
class Search:
    """A search's trials and their results."""

    config: TrainingConfig = field(repr=False)
    metric: str
    study: Study = field(repr=False)
    """Optuna's own object, for its plots and importances."""

    @property
    def best(self) -> TrainingConfig:
        """The config of the best trial, to be trained under a name of its own. Raises UsageError if no trial has succeeded."""
        return with_values(self.config, self._best_trial.params)

    @property
    def best_value(self) -> float:
        """Its metric."""
        value = self._best_trial.value
        assert value is not None, "it is complete"
        return value

    @property
    def _best_trial(self) -> FrozenTrial:
        if not any(trial.state.name == "COMPLETE" for trial in self.study.trials):
            raise UsageError("No trial has ended well yet; the table says what became of each.")
        return self.study.best_trial

    def table(self) -> Table:
        """A line for each trial, the best first."""

        def rank(trial: FrozenTrial) -> tuple[bool, float, int]:
            complete = trial.state.name == "COMPLETE" and trial.value is not None
            return not complete, -(trial.value or 0.0) if complete else 0.0, trial.number

        trials = sorted(self.study.trials, key=rank)
        names = list(dict.fromkeys(name for trial in trials for name in trial.params))
        rows: list[tuple[str, ...]] = []
        for trial in trials:
            values = [trial.params.get(name, "") for name in names]
            outcome = _STATES[trial.state.name]
            repeated_number, reason = (trial.user_attrs.get(key) for key in (REPEATED, REASON))
            if repeated_number is not None:
                outcome = (
                    f"{outcome}, as trial {repeated_number}"
                    if outcome
                    else f"as trial {repeated_number}"
                )
            elif trial.state.name == "FAIL" and reason:
                outcome = f"{outcome}: {reason.splitlines()[0]}"
            value = trial.value if trial.state.name != "PRUNED" else None
            rows.append(
                (
                    str(trial.number),
                    *(
                        f"{number:.3g}" if isinstance(number, float) else str(number)
                        for number in values
                    ),
                    "" if value is None else f"{value:.4g}",
                    outcome,
                )
            )
        return Table("Trials", rows, ("trial", *names, self.metric, ""))

    def plot_svg(self) -> str:
        """The metric of each trial, and the best so far."""
        completed = [
            (trial.number, trial.value)
            for trial in self.study.trials
            if trial.state.name == "COMPLETE"
        ]
        points = [(float(number), value) for number, value in completed if value is not None]
        numbers, values = ([point[axis] for point in points] for axis in (0, 1))
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
