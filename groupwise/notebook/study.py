"""The study that Optuna keeps of a search: which trial is the next one, and what became of each."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.core.errors import ConfigError, UsageError
from groupwise.core.settings.credentials import holds_secret
from groupwise.notebook.search_space import size

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial, Trial

logger = logging.getLogger(__name__)

JOURNAL = "trials.jsonl"
REPEATED = "repeated"
"""The number of the trial that had the same values."""
REASON = "reason"
"""The reason why a trial failed."""


def refuse_without_optuna() -> None:
    """Raise UsageError where Optuna is not installed."""
    if importlib.util.find_spec("optuna") is None:
        raise UsageError(
            "search() needs the package optuna, which is not installed: %pip install optuna, then run the cell again."
        )


def open_study(folder: Path, prune: bool) -> Study:
    """The study of a folder; `prune`: one that ends trials early which do worse than the median."""
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
    """Raise ConfigError where earlier trials had another space."""
    for trial in study.trials:
        begun = trial.state.name == "RUNNING" and trial.distributions.keys() < distributions.keys()
        if trial.distributions != dict(distributions) and not begun:
            raise ConfigError(
                "There is a search of this experiment already, with another space: "
                f"{', '.join(trial.distributions)}. Choose another experiment_name, or give the same space to go on."
            )


def next_trial(study: Study, distributions: dict[str, Any], trials: int, seed: int) -> Trial | None:
    """The trial that was cut off, else a new one; None where there are enough, or none is left to be tried."""
    from optuna.samplers import TPESampler
    from optuna.trial import Trial

    for frozen in study.trials:
        if frozen.state.name == "RUNNING" and frozen.distributions != distributions:
            study.tell(frozen.number, state=_state("FAIL"))  # cut off while its values were chosen
        elif frozen.state.name == "RUNNING":
            return Trial(study, frozen._trial_id)  # pyright: ignore[reportPrivateUsage]  # no other way to go on with one
    done = len(study.trials)
    if done >= trials or _all_tried(study, distributions):
        return None
    study.sampler = TPESampler(
        seed=seed + done
    )  # what it tries does not depend on who tried the others
    return study.ask(distributions)


def _all_tried(study: Study, distributions: Mapping[str, Any]) -> bool:
    """True if every combination was tried; a range of numbers that are not whole never ends."""
    sizes = [size(each) for each in distributions.values()]
    if None in sizes:
        return False
    tried: list[dict[str, Any]] = []
    for trial in study.trials:
        if trial.params.keys() == distributions.keys() and trial.params not in tried:
            tried.append(trial.params)
    return len(tried) == prod(size for size in sizes if size is not None)


def repeats(study: Study, trial: Trial) -> bool:
    """Reports an earlier result if a trial with these values has ended already, and says if so."""
    ended = [each for each in study.trials if each.state.name in ("COMPLETE", "PRUNED")]
    earlier = next((each for each in ended if each.params == trial.params), None)
    if earlier is None:
        return False
    trial.set_user_attr(REPEATED, earlier.number)
    if earlier.state.name == "COMPLETE":
        study.tell(trial, earlier.value)
    else:
        _report(study, trial, earlier)
        end_early(study, trial)
    return True


def _report(study: Study, trial: Trial, earlier: FrozenTrial) -> None:
    """Reports the last step of an earlier, pruned trial, by which the study ranks it; not again after an interruption."""
    step = earlier.last_step
    if step is not None and step not in study.trials[trial.number].intermediate_values:
        trial.report(earlier.intermediate_values[step], step)


def end_early(study: Study, trial: Trial) -> None:
    """A trial that did worse than the others; the study takes what it reported last."""
    study.tell(trial, state=_state("PRUNED"))


def fail(study: Study, trial: Trial, error: Exception) -> None:
    """A trial that failed, and why; no credential is written down."""
    lines = ("…" if holds_secret(line) else line for line in str(error).splitlines())
    reason = "\n".join(lines)
    logger.warning("trial %d failed: %s", trial.number, reason)
    trial.set_user_attr(REASON, reason)
    study.tell(trial, state=_state("FAIL"))


def why_over(study: Study, trials: int) -> str:
    """The explanation for fewer trials than the user asked for."""
    failed = sum(trial.state.name == "FAIL" for trial in study.trials)
    again = "; those that failed are tried again under another experiment_name" if failed else ""
    return f"Each combination of the space was tried, so that the search is over after {len(study.trials)} of {trials} trials{again}."


def _state(name: str) -> Any:
    from optuna.trial import TrialState

    return TrialState[name]
