"""Training in a notebook: the core's loop on the notebook's rows and rewards, which resumes an earlier one that was cut off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from groupwise.core.terminal.notebook import kernel_display, tell
from groupwise.notebook import drive
from groupwise.notebook.completions import Completions
from groupwise.notebook.config import TrainingConfig
from groupwise.notebook.core import by_own_names, run_folder
from groupwise.notebook.identity import UNSEEN, USED, facts_of
from groupwise.notebook.previous_runs import newest_alike
from groupwise.notebook.reward_state import Collected, collected
from groupwise.notebook.rewards import Given, rewards_of
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


@dataclass
class TrainerState:
    """The result of a training."""

    grpo_trainer: RlResult = field(repr=False)
    """Its result: summary, and the held-out evaluations before and after it."""
    final_policy: Path
    """The folder of the newest weights: a PEFT adapter with the tokenizer."""
    checkpoint_dir: str
    """The run's folder."""
    test_answer: str | None = None
    """The model's answer in the quick test of `run_full_pipeline`."""
    config: TrainingConfig | None = field(default=None, repr=False)
    """The config that was trained."""


class Stopped(KeyboardInterrupt):
    """The cell was interrupted after a clean checkpoint; cells that were to follow do not run."""

    def __init__(self, steps: int) -> None:
        super().__init__(f"stopped after {steps} steps")
        self.steps = steps

    def _render_traceback_(self) -> list[str]:
        return [f"Stopped after {self.steps} steps. Run the cell again to go on from there."]


def train_grpo(
    config: TrainingConfig,
    session: Session,
    *,
    reward_functions: Given | None = None,
    extra_reward_functions: Given = (),
    resume: bool = True,
) -> TrainerState:
    """Train, with checkpoints on the way and at the end.

    Resumes an earlier training with the same config, rows and rewards that was cut off. If one was finished, its result is returned,
    since a new one would be the same bit by bit; `resume=False` starts a new one in a folder of its own. `reward_functions` replaces
    those of the config, `extra_reward_functions` adds to them; each function may be a pair with its weight. An interrupted cell leaves a
    checkpoint of the last whole step and raises `Stopped`. If no kernel draws its page, some completions are printed as text.
    """
    refuse_other(config, session)
    rewards = rewards_of(config, session.train_dataset, reward_functions, extra_reward_functions)
    page = kernel_display() is not None
    return run_training(session, rewards, [] if page else [Completions()], resume=resume)


def run_training(
    session: Session, rewards: Rubric, callbacks: Sequence[Callback] = (), *, resume: bool = True
) -> TrainerState:
    """Train a session's config on its rows; `callbacks` watch."""
    facts = facts_of(session.config, session.train_dataset, session.test_dataset, rewards)
    core = session.core.config
    with by_own_names(session.config):
        earlier = newest_alike(core, facts, say=tell) if resume else None
    if earlier is not None and earlier.state == "finished":
        tell(
            f"{earlier.path} was finished with this config, these rows and these rewards; another training would come to the same. "
            f"Change a field (seed=…), or train anew with resume=False.{_not_compared(facts, earlier)}"
        )
        return _as_it_ended(session, earlier.path)
    if earlier is not None and earlier.state != "running":
        tell(f"{earlier.path} was cut off: it goes on.{_not_compared(facts, earlier)}")
    name = earlier.name if earlier is not None else _new_name(session)
    core = core.model_copy(update={"run": core.run.model_copy(update={"name": name})})
    mirror = drive.mirror_of(session.config, name)
    watching = [
        _Found(session),
        Collected(rewards, facts),
        *([] if mirror is None else [mirror]),
        *callbacks,
    ]
    task = NotebookTask(
        session.config, session.train_dataset, session.test_dataset, rewards, watching, facts
    )
    with by_own_names(session.config):
        result = rl(core, task, resume=earlier is not None)
    if result.exit_code >= 128:
        raise Stopped(result.summary["steps"])
    return _state(session, result)


def _not_compared(facts: Mapping[str, Any], earlier: RunInfo) -> str:
    """A note on what may have changed without being noticed."""
    unseen = [f"{name} ({kind})" for name, kind in facts[UNSEEN].items()]
    changed = sorted(collected(earlier.path).intersection(facts[USED]))
    return "".join(
        f" {why}, and not compared: {', '.join(names)}."
        for why, names in (
            ("Known by type alone", unseen),
            ("Changed by the training itself", changed),
        )
        if names
    )


def _new_name(session: Session) -> str:
    first, place = run_folder(session.config), session.next_folder
    if place != first:
        tell(f"The name {first.name} is taken: this run is {place}.")
    return place.name


class _Found(Callback):
    """The session's run is the one that trains, also when it fails."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def on_run_begin(self, run: RunHandle) -> None:
        """See `Callback`."""
        self._session.folder = run.folder


def _as_it_ended(session: Session, run: Path) -> TrainerState:
    session.folder = run
    if (mirror := drive.mirror_of(session.config, run.name)) is not None:
        mirror.keep_finished(run)
    with Store.open(run / RECORD, readonly=True) as store:
        held_out = {each.name: EvalResult.recorded(each) for each in store.evaluations()}
    before, after = held_out.get(BEFORE), held_out.get(AFTER)
    return _state(session, RlResult(read_summary(run) or {}, run, before=before, after=after))


def _state(session: Session, result: RlResult) -> TrainerState:
    weights = find.newest_weights(result.folder)
    assert weights is not None, "a finished run has weights"
    return TrainerState(result, weights, str(result.folder), config=session.config)
