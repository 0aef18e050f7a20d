"""Training in a notebook: the core's loop on the notebook's rows and rewards, which resumes an earlier one that was cut off."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from groupwise.core.errors import NothingScoredError
from groupwise.core.terminal.notebook import kernel_display, tell
from groupwise.notebook import drive
from groupwise.notebook.config import TrainingConfig
from groupwise.notebook.core import by_own_names, run_folder
from groupwise.notebook.identity import UNSEEN, USED, Collected, collected_names, facts_of
from groupwise.notebook.previous_runs import newest_alike
from groupwise.notebook.record import Record
from groupwise.notebook.rewards import RewardList, rewards_of
from groupwise.notebook.session import Session, refuse_other
from groupwise.notebook.task import NotebookTask
from groupwise.runs import find
from groupwise.runs.find import RunInfo
from groupwise.runs.folder import RECORD, read_summary
from groupwise.runs.store import Store
from groupwise.tasks.rewards.rubric import Rubric
from groupwise.training.callbacks.base import Callback, RunHandle
from groupwise.training.evaluation.evaluate import EvalResult
from groupwise.training.loops.rl_start import AFTER, BEFORE, RlResult, rl

TABLES = 8
"""Number of tables of completions printed in a training."""
MAX_ROWS = 4
"""Completions per table."""
REWARDS_CHANGED = (
    "In a notebook, a run with changed rewards begins at its first step, next to this one."
)
LONGEST = 70
"""Characters shown of a completion (half as many of its prompt), so a table row fits on one line of a screen."""


@dataclass
class TrainerState:
    """The result of a training."""

    grpo_trainer: RlResult = field(repr=False)
    """The run's result: its summary, and the held-out evaluations before and after it."""
    final_policy: Path
    """The folder of the newest weights: a PEFT adapter with the tokenizer."""
    checkpoint_dir: str
    """The run's folder."""
    test_answer: str | None = None
    """The model's answer in the quick test of `run_full_pipeline`."""
    config: TrainingConfig | None = field(default=None, repr=False)
    """The config that was trained."""


class Stopped(KeyboardInterrupt):
    """The cell was interrupted after a clean checkpoint. As an exception, it also keeps the cells below from running."""

    def __init__(self, steps: int) -> None:
        super().__init__(f"stopped after {steps} steps")
        self.steps = steps

    def _render_traceback_(self) -> list[str]:
        return [f"Stopped after {self.steps} steps. Run the cell again to go on from there."]


def train_grpo(
    config: TrainingConfig,
    session: Session,
    *,
    reward_functions: RewardList | None = None,
    extra_reward_functions: RewardList = (),
    resume: bool = True,
) -> TrainerState:
    """Train, with checkpoints on the way and at the end.

    Resumes an earlier training with the same config, rows and rewards that was cut off. If one was finished, its result is returned,
    since a new one would be the same bit by bit; `resume=False` starts a new one in a folder of its own. `reward_functions` replaces
    those of the config, `extra_reward_functions` adds to them; each function may be a pair with its weight. An interrupted cell leaves a
    checkpoint of the last whole step and raises `Stopped`. If no kernel draws its page, some completions are printed as text. At the end
    it says what the numbers of the last steps mean.
    """
    refuse_other(config, session)
    rewards = rewards_of(config, session.train_dataset, reward_functions, extra_reward_functions)
    session.given_rewards = reward_functions, extra_reward_functions
    page = kernel_display() is not None
    state = run_training(session, rewards, [] if page else [Completions()], resume=resume)
    for advice in state.grpo_trainer.summary.get("advice", ()):
        tell(f"{advice['says']} {advice['do']}")
    return state


def run_training(
    session: Session, rewards: Rubric, callbacks: Sequence[Callback] = (), *, resume: bool = True
) -> TrainerState:
    """Train a session's config on its rows; `callbacks` observe it."""
    facts = facts_of(session.config, session.train_dataset, session.test_dataset, rewards)
    core = session.core.config
    with by_own_names(session.config):
        previous = newest_alike(core, facts, say=tell) if resume else None
    if previous is not None and previous.state == "finished":
        tell(
            f"{previous.path} was finished with this config, these rows and these rewards; another training would come to the same. "
            f"Change a field (seed=…), or train again with resume=False.{_not_compared(facts, previous)}"
        )
        session.folder = previous.path
        if (mirror := drive.mirror_of(session.config, previous.name)) is not None:
            mirror.keep_finished(previous.path)
        with Store.open(previous.path / RECORD, readonly=True) as store:
            held_out = {
                evaluation.name: EvalResult.from_record(evaluation)
                for evaluation in store.evaluations()
            }
        result = RlResult(
            read_summary(previous.path) or {},
            previous.path,
            before=held_out.get(BEFORE),
            after=held_out.get(AFTER),
        )
        return _trainer_state(session, result)
    if previous is not None:
        name = previous.name
        if previous.state != "running":
            tell(f"{previous.path} was cut off: it goes on.{_not_compared(facts, previous)}")
    else:
        name = session.next_folder.name
    core = core.model_copy(update={"run": core.run.model_copy(update={"name": name})})
    mirror = drive.mirror_of(session.config, name)
    all_callbacks = [
        _SetFolder(session, resumes=previous is not None),
        Collected(rewards, facts),
        *([] if mirror is None else [mirror]),
        *callbacks,
    ]
    task = NotebookTask(
        session.config,
        session.dataset,
        session.train_dataset,
        session.test_dataset,
        rewards,
        all_callbacks,
        facts,
    )
    try:
        with by_own_names(session.config):
            result = rl(core, task, resume=previous is not None)
    except NothingScoredError as error:
        raise NothingScoredError(f"{error.message}\n{REWARDS_CHANGED}") from error
    if result.exit_code >= 128:
        raise Stopped(result.summary["steps"])
    return _trainer_state(session, result)


def _not_compared(facts: Mapping[str, Any], previous: RunInfo) -> str:
    """A note on objects that were not compared, and so may have changed unnoticed."""
    unseen = [f"{name} ({kind})" for name, kind in facts[UNSEEN].items()]
    changed = sorted(collected_names(previous.path).intersection(facts[USED]))
    return "".join(
        f" {reason}, and not compared: {', '.join(names)}."
        for reason, names in (
            ("Known by type alone", unseen),
            ("Changed by the training itself", changed),
        )
        if names
    )


def _trainer_state(session: Session, result: RlResult) -> TrainerState:
    weights = find.newest_weights(result.folder)
    assert weights is not None, "a finished run has weights"
    return TrainerState(result, weights, str(result.folder), config=session.config)


class _SetFolder(Callback):
    """Stores the run's folder in the session when the run starts, so it is set even if the training fails; says if its name is another."""

    def __init__(self, session: Session, *, resumes: bool) -> None:
        self._session, self._resumes = session, resumes

    def on_run_begin(self, run: RunHandle) -> None:
        """See `Callback`."""
        self._session.folder = run.folder
        first = run_folder(self._session.config).name
        if run.folder.name != first and not self._resumes:
            run.say(f"The name {first} is taken: this run is {run.folder}.")


class Completions(Callback):
    """Prints completions of the first step, the last one, and some between, as text. Used if no kernel draws the live page.

    The steps are divided into TABLES sections with one table at the end of each, so a long training prints no more than a short
    one.
    """

    def on_step_end(self, run: RunHandle, metrics: dict[str, float]) -> None:
        """See `Callback`."""
        stretch = math.ceil(run.max_steps / TABLES)
        is_section_end = run.step % stretch == 0 or run.step == run.max_steps
        if is_section_end or run.step == run.first_step + 1:
            table = Record(run.folder).table(run.step, MAX_ROWS, LONGEST)
            run.say(str(replace(table, title=f"Completions of step {run.step}")))
