"""The state of a training run, common to reinforcement learning and supervised training.

A `Training` holds everything that both loops need: the learner, the folder, the position. The functions in this module are the steps
that both take: update, count non-finite updates, write a checkpoint. `groupwise.training.loops.rl` and `groupwise.training.loops.sft` add
the rest.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from groupwise.core import atomic_files
from groupwise.core.errors import NonFiniteError
from groupwise.core.interruption import Interruption, wait_until_done
from groupwise.core.types import Learner, OptimiserParams, Policy, Row, UpdateResult, to_json
from groupwise.engine.learner.config import OptimisationConfig
from groupwise.runs import checkpoints
from groupwise.runs.config import RunSection
from groupwise.runs.folder import RunFolder
from groupwise.runs.notebook_names import is_of_notebook, own_names
from groupwise.runs.record_segments import write_record_segment
from groupwise.runs.recovery import add_run_files
from groupwise.training.callbacks.base import Callbacks
from groupwise.training.loops.metrics import Timings

if TYPE_CHECKING:
    from groupwise.core.terminal.progress import Progress

logger = logging.getLogger(__name__)

NON_FINITE = "non-finite"
"""Folder of a run that holds the rows of skipped updates."""
MAX_NON_FINITE_FILES = 20
"""Largest number of files in this folder."""


class SharedConfig(Protocol):
    """The part of a config that both kinds of training have."""

    @property
    def training(self) -> OptimisationConfig: ...
    @property
    def run(self) -> RunSection: ...
    def model_dump(self, *, mode: str) -> dict[str, Any]: ...


@dataclass(slots=True, kw_only=True)
class Training:
    """A running training: its parts and its position."""

    config: SharedConfig
    max_steps: int
    learner: Learner
    tokenizer: Any
    folder: RunFolder
    progress: Progress
    interruption: Interruption
    policy: Policy
    """The policy that was published last."""
    step: int = 0
    """Number of steps done."""
    saved_step: int | None = None
    """Number of steps done at the last checkpoint."""
    non_finite: int = 0
    """Number of steps in a row with a skipped update."""
    tokens_seen: int = 0
    timings: Timings = field(default_factory=Timings)
    callbacks: Callbacks = field(default_factory=Callbacks)

    @property
    def over(self) -> bool:
        """True if there is no further step: the last one is done, or a callback asked to stop."""
        return self.step >= self.max_steps or self.callbacks.stop is not None

    @property
    def non_finite_limit(self) -> int | None:
        """Number of steps in a row with a skipped update after which the run fails; None: no limit."""
        return self.config.training.max_non_finite_steps

    def keep_for_replay(self, draws: Iterable[int]) -> None:
        """Put the prompts of these draws of the current step into the replay buffer, if the run has one."""

    def epoch(self) -> float:
        """Number of passes over the data so far."""
        return 0.0

    def say(self, text: str) -> None:
        """Show a message to users and write it to the log; in a notebook with the names of its config."""
        if is_of_notebook(self.folder.store.get_meta()):
            text = own_names(text)
        logger.info("%s", text)
        self.progress.note(text)

    def state(self) -> dict[str, Any]:
        """The part of the run's state that a checkpoint stores in addition to weights and optimiser, as plain JSON."""
        return {
            "step": self.step,
            "policy": {"version": self.policy.version, "fingerprint": self.policy.fingerprint},
            "tokens_seen": self.tokens_seen,
            "non_finite": self.non_finite,
            "callbacks": self.callbacks.state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned. The policy's path stays empty until the policy is published again."""
        self.step = self.saved_step = state["step"]
        version, fingerprint = state["policy"]["version"], state["policy"]["fingerprint"]
        self.policy = Policy(self.policy.run, version, fingerprint, self.policy.kind, "")
        self.tokens_seen = state["tokens_seen"]
        self.non_finite = state["non_finite"]
        self.callbacks.load_state(state["callbacks"])

    def save_extra_files(self, folder: Path) -> None:
        """Write the other files that a resume needs into a checkpoint that is being written."""

    def load_extra_files(self, folder: Path, position: Mapping[str, Any]) -> None:
        """Restore what `save_extra_files` wrote into the checkpoint in `folder`; `position` is that checkpoint's position."""


# --- updates -------------------------------------------------------------------------------------


async def update(
    training: Training, rows: list[Row], sums: Mapping[str, float], rate: float
) -> UpdateResult:
    """Make one optimiser step with the gradient that the learner holds; skip it if loss or gradient is not finite.

    The rows of a skipped update are stored as JSON Lines (up to `MAX_NON_FINITE_FILES` files), so that the user can look for the cause.
    """
    if all(map(math.isfinite, sums.values())):
        config = training.config.training
        params = OptimiserParams(
            learning_rate=rate,
            max_grad_norm=config.max_grad_norm,
            weight_decay=config.weight_decay,
            beta1=config.adam_beta1,
            beta2=config.adam_beta2,
            eps=config.adam_epsilon,
        )
        result = await training.learner.update(params)
    else:
        training.learner.discard()
        result = UpdateResult(grad_norm=math.nan, applied=False)
    if not result.applied:
        logger.warning(
            "step %d: loss or gradient was not finite; the update was left out", training.step + 1
        )
        folder = training.folder.path / NON_FINITE
        with atomic_files.explaining_disk_errors(folder):
            folder.mkdir(exist_ok=True)
            names_kept = {file.name for file in folder.glob("step-*.jsonl")}
        if len(names_kept) < MAX_NON_FINITE_FILES:
            numbered_suffixes = (f"-{number}" for number in count(2))
            names = (
                f"step-{training.step}{suffix}.jsonl" for suffix in chain([""], numbered_suffixes)
            )
            file = folder / next(name for name in names if name not in names_kept)
            atomic_files.write_file(file, b"".join(to_json(row) + b"\n" for row in rows))
            logger.warning("its rows are in %s", file)
    return result


def count_non_finite(training: Training, left_out: int) -> None:
    """Count the steps in a row with a skipped update; raise NonFiniteError at the limit."""
    training.non_finite = training.non_finite + 1 if left_out else 0
    limit = training.non_finite_limit
    if limit is not None and training.non_finite >= limit:
        raise NonFiniteError(
            f"Loss or gradient was not finite in {training.non_finite} steps in a row "
            "(training.max_non_finite_steps). The last checkpoint stands. Lower training.learning_rate, or look at the rows "
            f"in {training.folder.path / NON_FINITE}."
        )


# --- checkpoints ---------------------------------------------------------------------------------


async def save_checkpoint(training: Training) -> None:
    """Write a checkpoint of the steps done, unless there is one, and delete older ones as configured."""
    if training.saved_step != training.step:
        await write_checkpoint(training)
    keep = training.config.run.save_total_limit
    if keep is not None:
        checkpoints.prune(training.folder.checkpoints, keep)


async def write_checkpoint(training: Training) -> None:
    """Write everything that a resume needs as one folder, which appears under its name only when complete.

    The weights are written and hashed by threads, while groups of later steps are sampled.
    """
    training.progress.phase("saving", 0, 1)
    with checkpoints.begin(training.folder.checkpoints, training.step) as folder:
        # What sampling changes is written before anything is waited for.
        extra = {"position": training.state()}
        training.save_extra_files(folder)
        write_record_segment(
            training.folder.path, training.folder.store.path, folder, training.step
        )
        add_run_files(training.folder.path, folder, training.step)
        if training.policy.kind == "full":  # another run can then start from the checkpoint
            training.tokenizer.save_pretrained(folder)
        await training.learner.save(str(folder))
        await wait_until_done(asyncio.to_thread(checkpoints.finish, folder, training.step, extra))
    training.saved_step = training.step
