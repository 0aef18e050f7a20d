"""Searches for good values of a config: each trial is a training, and Optuna chooses the values of the next one.

    found = search(config, {"learning_rate": Between(1e-6, 1e-4, log=True), "num_generations": [4, 8]}, trials=12)
    found.best            # a config

A trial that does worse than half of the others so far is ended early; one with the values of an earlier one is not trained, because
its result would be identical. The trials are recorded next to their runs, so an interrupted search resumes where it was, even in
the middle of a trial, and more trials can be added to a finished one.
"""

from __future__ import annotations

import json
import logging
from collections import deque
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
from groupwise.core.extras import require_packages
from groupwise.core.terminal.notebook import one_output, show, tell
from groupwise.notebook import credentials, drive
from groupwise.notebook.config import TrainingConfig, without_secrets
from groupwise.notebook.core import flat, run_folder
from groupwise.notebook.friendly_errors import is_count, plain_number
from groupwise.notebook.identity import ROWS, collected_names, comparable, differences, facts_of
from groupwise.notebook.rewards import RewardList, rewards_of
from groupwise.notebook.search_space import FIXED, Space, distributions, is_credential, with_values
from groupwise.notebook.session import Session, make_session, refuse_no_config
from groupwise.notebook.study import (
    JOURNAL,
    Search,
    early_end_reason,
    end_early,
    fail,
    next_trial,
    open_study,
    refuse_other_space,
    reuse_earlier_result,
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
"""Number of last steps whose mean reward is compared with that of other trials."""
AFTER = "-search"
"""Suffix of the name of the experiment's folder."""
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
    reward_functions: RewardList | None = None,
    extra_reward_functions: RewardList = (),
    server: str | None = None,
) -> Search:
    """Train with values of the space until there are so many trials; returns them with the best config.

    `metric` is one of the evaluation of the test part after the training, and larger is better. `prune` ends trials early that do
    worse than the median. The runs are in the experiment's folder with `-search` after its name, on the local disk; with
    save_to_drive the list of trials is copied to Drive, so another machine can resume after the last trial that had ended. Values
    that cannot be combined count as a failed trial. The search ends early once every combination of lists and whole numbers was
    tried. Raises ConfigError if an earlier search of this name had another configuration.
    """
    refuse_no_config(config)
    trials = plain_number(trials)
    if not is_count(trials):
        raise ConfigError(f"trials is {trials!r}; it must be a whole number, at least 1.")
    require_packages("search()", "notebook", "optuna")
    trial_space = distributions(config, space)
    credentials.provide(config)
    drive.ensure(config)
    base = make_session(config, server)
    rewards = rewards_of(config, base.train_dataset, reward_functions, extra_reward_functions)
    _check_metric(metric, base, rewards)
    folder = Path(f"{run_folder(config)}{AFTER}")
    on_drive = drive.mirror(config)
    journal = None if on_drive is None else Path(f"{on_drive}{AFTER}") / JOURNAL
    if journal is not None and journal.is_file():
        _bring_back(journal, folder / JOURNAL)
    study = open_study(folder, prune)
    result = Search(config, metric, study)
    refuse_other_space(study, trial_space)
    _refuse_other_question(study, folder, base, rewards, space, metric)
    while (trial := next_trial(study, trial_space, trials, config.seed)) is not None:
        try:
            if not reuse_earlier_result(study, trial):
                trial_config = with_values(config, trial.params).changed(
                    checkpoint_dir=str(folder / f"trial-{trial.number}"), save_to_drive=False
                )
                session = make_session(trial_config, server)
                rewards = rewards_of(
                    trial_config, session.train_dataset, reward_functions, extra_reward_functions
                )
                _train_trial(study, trial, session, rewards, metric, prune=prune)
        except (RunInUseError, ResumeMismatchError):
            raise
        except (RunError, UsageError) as error:
            fail(study, trial, error)
        _collect_names(study, folder)
        if journal is not None:
            _copy_to_drive(folder / JOURNAL, journal)
        show(result)
    if len(study.trials) < trials:
        tell(early_end_reason(study, trials))
    return result


def _train_trial(
    study: Study, trial: Trial, session: Session, rewards: Rubric, metric: str, *, prune: bool
) -> None:
    """Train a trial, unless it was already trained before an interruption, and report its result to the study."""
    run_training(session, rewards, [_Pruner(trial)] if prune else [])
    if "stopped" in session.run.summary:
        end_early(study, trial)
    else:
        study.tell(trial, session.run.evaluations()["after"][metric])


def _refuse_other_question(
    study: Study, folder: Path, session: Session, rewards: Rubric, space: Space, metric: str
) -> None:
    """Raise ConfigError if earlier trials of the study cannot be compared with those to come.

    They can be compared if metric, rows, rewards, and the fields and keys that are not varied are the same. Lists that the trials'
    rewards filled are ignored.
    """
    config = session.config
    fields = config.model_dump(mode="json", exclude={*FIXED, *space})
    fields |= {key: value for key, value in flat(config.overrides) if key not in space}
    fields = {key: value for key, value in fields.items() if not is_credential(key)}
    facts = facts_of(config, session.train_dataset, session.test_dataset, rewards)
    if {"seed", "train_fraction"} & {*space}:  # each trial has its own split
        facts = {name: value for name, value in facts.items() if name not in ROWS}
    question = {"metric": metric, **without_secrets(fields), **facts}
    question = json.loads(json.dumps(question, default=str))
    earlier_question = study.user_attrs.get(QUESTION)
    if earlier_question is None:
        study.set_user_attr(QUESTION, question)
        return
    earlier_question, question = comparable(
        earlier_question, question, _collect_names(study, folder)
    )
    # A fact that the new search no longer has is a difference, too.
    if changes := differences(earlier_question, {**dict.fromkeys(earlier_question), **question}):
        raise ConfigError(
            f"There is a search of this experiment already, which differs in {', '.join(changes)}, so that its trials say nothing about "
            "this one. Choose another experiment_name, or ask as before to go on."
        )


def _collect_names(study: Study, folder: Path) -> set[str]:
    """Names that the trials' rewards changed; the study keeps them, because the trials' folders are not copied to Drive."""
    stored_names = {*study.user_attrs.get(COLLECTED, ())}
    names = stored_names.union(*map(collected_names, folder.glob("trial-*")))
    if names != stored_names:
        study.set_user_attr(COLLECTED, sorted(names))
    return names


def _bring_back(on_drive: Path, local_journal: Path) -> None:
    """Replace the journal by the one on Drive if that is longer; an incomplete last line is ignored."""
    journal_bytes = on_drive.read_bytes()
    journal_bytes = journal_bytes[: journal_bytes.rfind(b"\n") + 1]
    if len(journal_bytes) > (local_journal.stat().st_size if local_journal.is_file() else 0):
        local_journal.parent.mkdir(parents=True, exist_ok=True)
        atomic_files.write_file(local_journal, journal_bytes)


def _copy_to_drive(journal: Path, to: Path) -> None:
    """Copy the journal to Drive. A failure is only logged, because the original is on this machine."""
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        atomic_files.write_file(to, journal.read_bytes())
    except (OSError, StoreError) as error:
        logger.warning("what was tried is not copied to %s: %s", to, error)


def _check_metric(metric: str, session: Session, rewards: Rubric) -> None:
    """Raise UsageError for a metric that no evaluation of such a training will have."""
    if not session.core.config.eval.before_and_after:
        raise UsageError(
            "The test part is not evaluated: overrides has eval.before_and_after false. A search compares trainings by it; leave it out."
        )
    task_metrics = metric_names(session.config.tags, session.test_dataset)
    valid_names = ["reward", *task_metrics, *(f"rewards/{name}/mean" for name in rewards.names)]
    if metric not in valid_names:
        raise UsageError(
            f"There is no metric {metric!r} of the test part. There are: {', '.join(valid_names)}."
        )


class _Pruner(Callback):
    """Reports the mean reward of the last steps, and ends a trial that the study prunes."""

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
