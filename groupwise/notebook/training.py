"""Training in a notebook: the core's loop on the notebook's rows and rewards, which goes on by itself where an earlier one was cut off."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from groupwise.callbacks.base import Callback
from groupwise.config import RunConfig, resolved
from groupwise.display.notebook import tell
from groupwise.errors import UsageError
from groupwise.loops.rl_start import RlResult, rl
from groupwise.notebook import drive
from groupwise.notebook.config import TrainingConfig
from groupwise.notebook.rewards import Given, rewards_of
from groupwise.notebook.session import Session
from groupwise.notebook.task import NotebookTask
from groupwise.rewards.rubric import Rubric
from groupwise.runs import find
from groupwise.runs.folder import read_config
from groupwise.settings.comparison import compare


@dataclass
class TrainerState:
    """What a training came to."""

    grpo_trainer: RlResult = field(repr=False)
    """Its result: summary, and the held-out evaluations before and after it."""
    final_policy: Path
    """The folder of the newest weights: a PEFT adapter with the tokenizer."""
    checkpoint_dir: str
    """The run's folder."""
    test_answer: str | None = None
    """What `run_full_pipeline` was answered in its quick test."""


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
) -> TrainerState:
    """Train, with a checkpoint every 100 steps and at the end; goes on where an earlier training of the same config was cut off.

    `reward_functions` replaces those of the config, `extra_reward_functions` stand beside them; each may be a pair with its weight. An
    interrupted cell leaves a checkpoint of the last whole step and raises `Stopped`.
    """
    _refuse_other(config, session)
    rewards = rewards_of(config, session.train_dataset, reward_functions, extra_reward_functions)
    return run_training(session, rewards)


def run_training(
    session: Session, rewards: Rubric, callbacks: Sequence[Callback] = ()
) -> TrainerState:
    """Train a session's config on its rows; `callbacks` watch."""
    config = session.config
    place = drive.mirror(config)
    mirror = [drive.Mirror(place)] if place is not None else []
    task = NotebookTask(
        config, session.train_dataset, session.test_dataset, rewards, [*mirror, *callbacks]
    )
    core = session.core.config
    name, goes_on = _place(core)
    core = core.model_copy(update={"run": core.run.model_copy(update={"name": name})})
    result = rl(core, task, resume=goes_on)
    session.folder = result.folder
    if result.exit_code >= 128:
        raise Stopped(result.summary["steps"])
    weights = find.newest_weights(result.folder)
    assert weights is not None, "a finished run has weights"
    return TrainerState(result, weights, str(result.folder))


def _refuse_other(config: TrainingConfig, session: Session) -> None:
    if config is not session.config and config != session.config:
        changed = [
            name
            for name in type(session.config).model_fields
            if getattr(config, name, None) != getattr(session.config, name)
        ]
        raise UsageError(
            f"The session was prepared with another config: {', '.join(changed) or 'of another class'} differ. Prepare one with this "
            "config: session = prepare_session(config)."
        )


def _place(core: RunConfig) -> tuple[str, bool]:
    """The name of the run, and whether it goes on: the newest that was cut off and has this config, else one whose name is free."""
    runs, wanted = Path(core.run.dir), str(core.run.name)
    name = re.compile(rf"{re.escape(wanted)}(-\d+)?")
    found = [each for each in find.list_runs(runs) if name.fullmatch(each.name)]
    for run in reversed(found):
        if run.broken is not None or run.state == "finished":
            continue
        changed = _changes(read_config(run.path), resolved(core))
        if not changed:
            tell(f"{run.path} was cut off: it goes on.")
            return run.name, True
        tell(
            f"{run.path} was cut off, but had another config ({', '.join(changed)}): a new run begins beside it."
        )
    taken = {each.name for each in found}
    free = (wanted if number == 1 else f"{wanted}-{number}" for number in count(1))
    return next(each for each in free if each not in taken), False


def _changes(before: dict[str, Any], now: dict[str, Any]) -> Sequence[str]:
    found = compare(before, now, RunConfig)
    length = [key for key in found.free if key == "training.max_steps"]
    return [*found.fixed, *length]
