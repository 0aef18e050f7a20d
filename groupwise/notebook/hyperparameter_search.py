"""Looking for good values of a config: each trial is a training, and Optuna chooses what to try next.

    found = search(config, {"learning_rate": Between(1e-6, 1e-4, log=True), "num_generations": [4, 8]}, trials=12)
    found.best            # a config

A trial that does worse than half of the others so far is ended early; one with the values of an earlier one is not trained, since it would
come to the same bits. What was tried is kept beside the trials' runs, so a search that was cut off goes on where it was, in the middle of
a trial too, and one that is done can be given more trials.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from groupwise.core import atomic_files
from groupwise.core.errors import (
    ConfigError,
    ResumeMismatchError,
    RunError,
    RunInUseError,
    StoreError,
    UsageError,
)
from groupwise.core.terminal.notebook import one_output, show, tell
from groupwise.notebook import credentials, drive
from groupwise.notebook.config import TrainingConfig, without_secrets
from groupwise.notebook.core import flat, run_folder
from groupwise.notebook.friendly_errors import plain_number
from groupwise.notebook.identity import ROWS, differences, facts_of
from groupwise.notebook.reward_state import collected, comparable
from groupwise.notebook.rewards import Given, rewards_of
from groupwise.notebook.search_result import Search
from groupwise.notebook.search_space import FIXED, Space, distributions, is_credential, with_values
from groupwise.notebook.session import Session, is_count, make_session, refuse_no_config
from groupwise.notebook.study import (
    JOURNAL,
    end_early,
    fail,
    next_trial,
    open_study,
    refuse_other_space,
    refuse_without_optuna,
    repeats,
    why_over,
)
from groupwise.notebook.task import metric_names
from groupwise.notebook.training import run_training
from groupwise.tasks.rewards.rubric import Rubric
from groupwise.training.callbacks.base import Callback, RunHandle

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import Trial

logger = logging.getLogger(__name__)

RECENT = 5
"""Steps whose mean reward is compared with that of other trials."""
AFTER = "-search"
"""Stands after the name of the experiment's folder."""
QUESTION = "question"
COLLECTED = "collected"


@one_output()
def search(
    config: TrainingConfig,
    space: Space,
    trials: int = 20,
    *,
    metric: str = "reward",
    prune: bool = True,
    reward_functions: Given | None = None,
    extra_reward_functions: Given = (),
    server: str | None = None,
) -> Search:
    """Train with values of the space until there are so many trials; returns them with the best config.

    `metric` is one of the evaluation of the test part after the training, and larger is better. `prune` ends trials early that do worse
    than the median. The runs are in the experiment's folder with `-search` after its name, on the local disk; with save_to_drive what
    was tried is copied to Drive, so that another machine goes on after the last trial that had ended. Values that cannot go together
    are a trial that failed. Where each combination of lists and whole numbers was tried, the search is over. Raises ConfigError for a
    search of this name that asked for something else.
    """
    refuse_no_config(config)
    trials = plain_number(trials)
    _refuse_count(trials)
    refuse_without_optuna()
    wanted = distributions(config, space)
    credentials.provide(config)
    drive.ensure(config)
    base = make_session(config, server)
    rewards = rewards_of(config, base.train_dataset, reward_functions, extra_reward_functions)
    _check_metric(metric, base, rewards)
    folder = Path(f"{run_folder(config)}{AFTER}")
    _bring_back(config, folder)
    study = open_study(folder, prune)
    found = Search(config, metric, study)
    refuse_other_space(study, wanted)
    _refuse_other_question(study, _question(base, rewards, space, metric), folder)
    while (trial := next_trial(study, wanted, trials, config.seed)) is not None:
        try:
            if not repeats(study, trial):
                own = with_values(config, trial.params).changed(
                    checkpoint_dir=str(folder / f"trial-{trial.number}"), save_to_drive=False
                )
                session = make_session(own, server)
                rewards = rewards_of(
                    own, session.train_dataset, reward_functions, extra_reward_functions
                )
                _tried(study, trial, session, rewards, metric, prune=prune)
        except (RunInUseError, ResumeMismatchError):
            raise
        except (RunError, UsageError) as error:
            fail(study, trial, error)
        _collected(study, folder)
        _copy_to_drive(config, folder)
        show(found)
    if len(study.trials) < trials:
        tell(why_over(study, trials))
    return found


def _refuse_count(trials: object) -> None:
    if not is_count(trials):
        raise ConfigError(f"trials is {trials!r}; it must be a whole number, at least 1.")


def _tried(
    study: Study, trial: Trial, session: Session, rewards: Rubric, metric: str, *, prune: bool
) -> None:
    """Train a trial, unless that was done already, and tell the study what came of it."""
    run_training(session, rewards, [_Pruner(trial)] if prune else [])
    if "stopped" in session.run.summary:
        end_early(study, trial)
    else:
        study.tell(trial, session.run.evaluations()["after"][metric])


def _question(session: Session, rewards: Rubric, space: Space, metric: str) -> dict[str, Any]:
    """Facts that trials must share to be compared: the metric, the fields and keys that are not varied, rows and rewards."""
    config = session.config
    fields = config.model_dump(mode="json", exclude={*FIXED, *space})
    set_here = {
        **fields,
        **{key: value for key, value in flat(config.overrides) if key not in space},
    }
    told = {key: value for key, value in set_here.items() if not is_credential(key)}
    facts = facts_of(config, session.train_dataset, session.test_dataset, rewards)
    if {"seed", "train_fraction"} & {*space}:  # each trial has a split of its own
        facts = {name: value for name, value in facts.items() if name not in ROWS}
    asked = {"metric": metric, **without_secrets(told), **facts}
    return json.loads(json.dumps(asked, default=str))


def _refuse_other_question(study: Study, question: Mapping[str, Any], folder: Path) -> None:
    """Raises ConfigError if the study answers another question. Lists that the trials' rewards filled make no difference."""
    before = study.user_attrs.get(QUESTION)
    if before is None:
        study.set_user_attr(QUESTION, question)
        return
    gone = _collected(study, folder)
    before, question = comparable(before, question, gone)
    asked = {**dict.fromkeys(before), **question}  # what is not asked any more is a difference, too
    if changed := differences(before, asked):
        raise ConfigError(
            f"There is a search of this experiment already, which differs in {', '.join(changed)}, so that its trials say nothing about "
            "this one. Choose another experiment_name, or ask as before to go on."
        )


def _collected(study: Study, folder: Path) -> set[str]:
    """Names that the trials' rewards changed; the study keeps them, since the trials' folders stay on this machine."""
    kept = {*study.user_attrs.get(COLLECTED, ())}
    found = kept.union(*map(collected, folder.glob("trial-*")))
    if found != kept:
        study.set_user_attr(COLLECTED, sorted(found))
    return found


def _bring_back(config: TrainingConfig, folder: Path) -> None:
    """Replace the journal by the one on Drive if that holds more; a last line that was cut off does not count."""
    kept = _journal_on_drive(config)
    if kept is None or not kept.is_file():
        return
    there = kept.read_bytes()
    there = there[: there.rfind(b"\n") + 1]
    here = folder / JOURNAL
    if len(there) > (here.stat().st_size if here.is_file() else 0):
        folder.mkdir(parents=True, exist_ok=True)
        atomic_files.write_file(here, there)


def _journal_on_drive(config: TrainingConfig) -> Path | None:
    place = drive.mirror(config)
    return None if place is None else Path(f"{place}{AFTER}") / JOURNAL


def _copy_to_drive(config: TrainingConfig, folder: Path) -> None:
    """Copies the journal; if Drive refuses, this only warns, since the original is here."""
    kept = _journal_on_drive(config)
    if kept is None:
        return
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        atomic_files.write_file(kept, (folder / JOURNAL).read_bytes())
    except (OSError, StoreError) as error:
        logger.warning("what was tried is not copied to %s: %s", kept, error)


def _check_metric(metric: str, session: Session, rewards: Rubric) -> None:
    """Raise UsageError for a metric that no evaluation of such a training will have."""
    if not session.core.config.eval.before_and_after:
        raise UsageError(
            "The test part is not evaluated: overrides has eval.before_and_after false. A search compares trainings by it; leave it out."
        )
    own = metric_names(session.config.tags, session.test_dataset)
    known = ["reward", *own, *(f"rewards/{name}/mean" for name in rewards.names)]
    if metric not in known:
        raise UsageError(
            f"There is no metric {metric!r} of the test part. There are: {', '.join(known)}."
        )


class _Pruner(Callback):
    """Reports the mean reward of the last steps, and ends a trial that the study gives up."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._recent: deque[float] = deque(maxlen=RECENT)

    def on_step_end(self, run: RunHandle, metrics: dict[str, float]) -> None:
        """See `Callback`."""
        if "reward" not in metrics:
            return
        self._recent.append(metrics["reward"])
        self._trial.report(fmean(self._recent), run.step)
        if run.step < run.max_steps and self._trial.should_prune():
            run.stop("the median of the other trials is better")

    def state(self) -> Any:
        """See `Callback`."""
        return {"recent": list(self._recent)}

    def load_state(self, state: Any) -> None:
        """See `Callback`."""
        self._recent.extend(state["recent"])
