"""The state of a reinforcement-learning run: `Training` with sampler, rewards and prompts.

`Learning` is the part that turns scored groups of any origin into updates; a replay needs no more.
"""

from __future__ import annotations

import json
import logging
import shlex
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from groupwise.algorithms.base import Algorithm
from groupwise.core.reward_call.request import Scorer
from groupwise.core.types import Group, Policy, Sampler, SamplingParams
from groupwise.runs import routed_experts
from groupwise.runs.records import WarningRecord
from groupwise.tasks.data.reward_hacking import Signals
from groupwise.tasks.data.selection import Pool, Selection
from groupwise.tasks.rollouts.prompts import PromptSet
from groupwise.tasks.rollouts.rollout_request import RolloutKind
from groupwise.training import rollout_builder
from groupwise.training.config import RunConfig
from groupwise.training.evaluation.evaluate import HeldOut
from groupwise.training.loops.teaching import Teaching
from groupwise.training.loops.training import Training

logger = logging.getLogger(__name__)

SELECTION = "selection.json"
"""File of a checkpoint with the state of the data's selection."""
POLICIES = "policies"
"""Folder of a checkpoint with the policies that drew the groups of the next steps."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The groups of a step."""

    groups: Sequence[Group]
    """The groups to train on, in order."""
    rejected: Sequence[Group] = ()
    """Groups that the algorithm replaced by others; they are recorded and counted in metrics, but not trained on."""
    sampling: float = 0.0
    """Seconds from the request of the first group until the last token was sampled."""
    scoring: float = 0.0
    """Seconds from then until the last group was scored."""
    sampled_tokens: int = 0

    @property
    def all(self) -> list[Group]:
        return [*self.groups, *self.rejected]


class Schedule(Protocol):
    """Decides which policy draws which groups, and when; see `groupwise.training.loops.schedules`."""

    async def next(self) -> StepBatch:
        """The groups of the next step."""
        ...

    async def settle(self) -> None:
        """Wait until no completion is being sampled, so that the sampler can load other weights."""
        ...

    def committed(self, batch: StepBatch) -> None:
        """Called after the step with these groups was committed."""
        ...

    async def close(self) -> None:
        """Cancel the groups in progress."""
        ...

    @property
    def outstanding(self) -> Sequence[int]:
        """Draws before `next_draw` that belong to no committed step."""
        ...

    @property
    def next_draw(self) -> int:
        """The first draw that was not requested yet, apart from the outstanding ones."""
        ...


@dataclass(slots=True, kw_only=True)
class Learning(Training):
    """A run that learns from groups."""

    config: RunConfig  # pyright: ignore[reportIncompatibleVariableOverride] — never assigned again
    algorithm: Algorithm

    @property
    def longest_completion(self) -> int:
        """Largest number of tokens that the policy may write in one rollout."""
        return rollout_builder.longest_written(self.config)

    def adapt(self, metrics: Mapping[str, float]) -> None:
        """Adapt the algorithm for the next step to the metrics of the last one: its KL coefficient, if it is adaptive."""
        if "kl" in metrics:
            scored_count = int(metrics["rollouts/scored"])
            self.algorithm = self.algorithm.adapted(metrics["kl"], scored_count)

    def state(self) -> dict[str, Any]:
        """See `Training.state`."""
        spec = self.algorithm.loss_spec()
        algorithm = {"name": spec.name, "knobs": dict(spec.knobs)}
        return {**super(Learning, self).state(), "algorithm": algorithm}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """See `Training.load_state`."""
        super(Learning, self).load_state(state)
        self.algorithm = type(self.algorithm)(**state["algorithm"]["knobs"])


@dataclass(slots=True, kw_only=True)
class Run(Learning):
    """A run that takes steps with scored groups of any origin; this is all that `take_step` needs."""

    sampler: Sampler
    signals: Signals | None
    """Detects reward hacking; None if the config has disabled it."""
    serving: Policy
    """The policy that the sampler has loaded."""
    publications: Path
    """Folder for the learner's publications and for the policies that were restored from a checkpoint."""
    recent_policies: dict[int, Policy] = field(default_factory=dict[int, Policy])
    """The policies after the last steps, by step; `kept_policies` of them are kept."""
    unscored_reasons: list[str] = field(default_factory=list[str])
    """Reasons why rollouts failed in the last step, if it had no scored group; otherwise empty."""
    unscored_steps: int = 0
    unrewarded: bool = False
    """True if environments give the rewards and none has given any so far; False again once that was warned of."""
    gap_warned: bool = False
    """True once a large difference between the sampler's and the learner's log-probabilities was warned of."""
    uncommitted_groups: dict[int, Group] = field(default_factory=dict[int, Group])
    """Groups that are sampled and scored but belong to no committed step."""

    @property
    def kept_policies(self) -> int:
        """Number of policies before the newest that are kept, because groups of the next steps are drawn by them."""
        return 0

    @property
    def unscored_limit(self) -> int | None:
        """Number of steps in a row without a scored group after which the run fails; None: no limit."""
        return self.config.rewards.max_unscored_steps

    async def settle(self) -> None:
        """Wait until no completion is being sampled, so that the sampler can load other weights."""

    def committed(self, batch: StepBatch) -> None:
        """Called after the step with these groups was committed."""

    def observe(self, groups: Sequence[Group]) -> None:
        """Update the selection of data with the groups of a step, before it is committed."""

    def data_metrics(self, groups: Sequence[Group]) -> Mapping[str, float]:
        """Metrics about how the examples of a step were chosen."""
        return {}

    def warn(self, warning: WarningRecord) -> None:
        """Log a signal that starts or ends."""
        logger.warning("%s", self.warning_text(warning))

    def warning_text(self, warning: WarningRecord) -> str:
        """A signal that starts or ends, and which command shows what it is about."""
        run = f"{shlex.quote(self.folder.name)} --dir {shlex.quote(str(self.folder.path.parent))}"
        hint = f"; read the best rollouts: groupwise runs rollouts {run} --best"
        text = f"after {warning.step} steps: signal {warning.name}: {warning.message}"
        return text + (hint if warning.kind == "begins" else "")

    def state(self) -> dict[str, Any]:
        """See `Training.state`."""
        return {
            **super(Run, self).state(),
            "unscored_steps": self.unscored_steps,
            "signals": self.signals and self.signals.state(),
            "earlier": {
                str(step): {"version": policy.version, "fingerprint": policy.fingerprint}
                for step, policy in self.recent_policies.items()
            },
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """See `Training.load_state`."""
        super(Run, self).load_state(state)
        self.unscored_steps = state["unscored_steps"]
        signals_state = state.get("signals")  # earlier versions did not record signals
        if self.signals is not None and signals_state is not None:
            self.signals.load_state(signals_state)

    def save_extra_files(self, folder: Path) -> None:
        """Save the policies that draw the groups of the next steps."""
        for step, policy in self.recent_policies.items():
            shutil.copytree(policy.path, folder / POLICIES / f"step-{step}")

    def load_extra_files(self, folder: Path, position: Mapping[str, Any]) -> None:
        """See `Training.load_extra_files`. The files of policies are copied, because the checkpoint may be deleted."""
        for name, facts in position["earlier"].items():
            saved = self.publications / f"after-step-{name}"
            shutil.copytree(folder / POLICIES / f"step-{name}", saved)
            self.recent_policies[int(name)] = replace(self.policy, **facts, path=str(saved))


@dataclass(slots=True, kw_only=True)
class TaskRun(Run):
    """A run that draws its own groups from the examples of a task."""

    rollouts: RolloutKind
    scorer: Scorer
    params: SamplingParams
    prompts: PromptSet
    easy: PromptSet | None
    """The prompts of the easy pool; None without one."""
    selection: Selection
    held_out: HeldOut | None
    teaching: Teaching | None = None
    """Adds what the teacher of a distillation knows to scored groups; None if there is nothing to add."""
    schedule: Schedule | None = None
    """None before the first step."""
    next_draw: int = 0
    """The first draw that belongs to no step yet, in schedules that train groups in the order of their draws."""
    outstanding: tuple[int, ...] = ()
    """Draws that were requested before the checkpoint and belong to no step yet."""

    @property
    def kept_policies(self) -> int:
        """See `Run.kept_policies`."""
        training = self.config.training
        return training.max_off_policy_steps if training.schedule == "fixed_lag" else 0

    async def settle(self) -> None:
        """See `Run.settle`."""
        if self.schedule is not None:
            await self.schedule.settle()

    def committed(self, batch: StepBatch) -> None:
        """See `Run.committed`."""
        if self.schedule is not None:
            self.schedule.committed(batch)

    def observe(self, groups: Sequence[Group]) -> None:
        """See `Run.observe`. Choices of experts are written for completions that may be trained on again."""
        self.selection.observe(groups)
        replayable_draws = self.selection.replayable_draws
        for group in groups:
            if group.draw in replayable_draws:
                routed_experts.write(self.folder.path, group)
        routed_experts.keep_only(self.folder.path, replayable_draws)

    def data_metrics(self, groups: Sequence[Group]) -> Mapping[str, float]:
        """See `Run.data_metrics`."""
        return self.selection.metrics(groups, self.step)

    def keep_for_replay(self, draws: Iterable[int]) -> None:
        """See `Training.keep_for_replay`."""
        self.selection.keep(draws)

    def pool(self, name: Pool) -> PromptSet:
        """The prompts of the pool with this name."""
        pool = self.prompts if name == "main" else self.easy
        assert pool is not None, "what is drawn from the easy pool was chosen because there is one"
        return pool

    def params_at(self, step: int) -> SamplingParams:
        """The sampling parameters of a step."""
        return replace(self.params, temperature=self.config.sampler.temperature_at(step))

    def epoch(self) -> float:
        """See `Training.epoch`."""
        return self.selection.epochs

    @property
    def steps_per_epoch(self) -> float:
        """Number of steps in one pass over the data; see `Selection.turns_in_an_epoch`."""
        return self.selection.turns_in_an_epoch / self.config.training.prompts_per_step

    def state(self) -> dict[str, Any]:
        """See `Training.state`."""
        schedule = self.schedule
        return {
            **super(TaskRun, self).state(),
            "next_draw": schedule.next_draw if schedule else self.next_draw,
            "outstanding": list(schedule.outstanding if schedule else self.outstanding),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """See `Training.load_state`."""
        super(TaskRun, self).load_state(state)
        self.next_draw = state["next_draw"]
        self.outstanding = tuple(state["outstanding"])

    def save_extra_files(self, folder: Path) -> None:
        """Save the state of the data's selection, in addition to the files of every run."""
        super(TaskRun, self).save_extra_files(folder)
        (folder / SELECTION).write_text(json.dumps(self.selection.state()))
        routed_experts.link_all(self.folder.path, folder)

    def load_extra_files(self, folder: Path, position: Mapping[str, Any]) -> None:
        """See `Training.load_extra_files`."""
        selection_file = folder / SELECTION  # earlier versions drew in order and had no such file
        ordered_state = {"cursor": position["next_draw"]}
        self.selection.load_state(
            json.loads(selection_file.read_bytes()) if selection_file.exists() else ordered_state
        )
        routed_experts.keep_only(self.folder.path, ())
        routed_experts.link_all(folder, self.folder.path)
        super(TaskRun, self).load_extra_files(folder, position)
