"""The rows of the run's record, except groups and rollouts, which are in `groupwise.core.types`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from groupwise.core.types import EndedBy, Outcome, RewardPart

TIMING_PREFIXES = ("time/", "perf/")
"""Metrics with these prefixes measure speed. They are recorded like the others, but ignored when runs are compared for equality."""

Order = Literal["draw", "newest", "best", "worst"]
"""`draw`: by draw, then member. `newest`: the last written first. `best`, `worst`: by the reward (or reward part)."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The manifest of one committed step: what was trained, in which order, and the resulting policy."""

    step: int
    """Index from 0."""
    version_in: int
    version_out: int
    """Equal to `version_in` if nothing was trained."""
    fingerprint_out: str
    draws: tuple[int, ...]
    """The step's groups in the order of training."""
    learning_rate: float
    finished_at: float
    """Seconds since 1970."""
    rejected: tuple[int, ...] = ()
    """Groups that were drawn for the step and not trained: the algorithm rejected them and drew others."""

    @property
    def all_draws(self) -> tuple[int, ...]:
        """The trained draws, then the rejected ones."""
        return (*self.draws, *self.rejected)


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A curve over some consecutive steps; the values are None if none of them is finite."""

    at: float
    """Position of these steps in a plot: the middle of their column, which is the same for all curves over the same range."""
    first: int
    last: int
    """The first and the last of these steps; equal for a single one."""
    mean: float | None
    low: float | None
    high: float | None
    lost: int = 0
    """Number of these steps whose value was not finite; the mean, low and high leave them out."""


@dataclass(frozen=True, slots=True)
class Rewound:
    """Counts of what a resume deleted, to be done again."""

    steps: int
    rollouts: int


@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    """One evaluation of the run's policy."""

    step: int
    """Number of steps done; 0 is the policy that the run started from."""
    name: str
    policy: str
    """The evaluated policy: `base`, `run@step`, or a fingerprint."""
    metrics: Mapping[str, float]
    rows: Sequence[Mapping[str, Any]] = ()
    """One mapping for each prompt or sample, as JSON."""
    asked: str = ""
    """Fingerprint of the questions and how they were asked: only evaluations with the same one are comparable. Empty: unknown."""


@dataclass(frozen=True, slots=True)
class WarningRecord:
    """A signal of reward hacking that starts or ends."""

    step: int
    """Number of steps done."""
    name: str
    """Name of the signal."""
    kind: Literal["begins", "ends"]
    message: str
    """Its meaning, with the numbers, for people."""
    values: Mapping[str, float] = field(default_factory=dict[str, float])
    """The numbers that the message is based on."""


@dataclass(frozen=True, slots=True)
class ResumeRecord:
    """One resume of the run."""

    step: int
    """The first step that was done (again) after the resume."""
    dropped: Rewound
    resumed_at: float
    """Seconds since 1970."""
    changes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Config keys that change with this resume: dotted key -> [before, after]."""


@dataclass(frozen=True, slots=True)
class RolloutFilter:
    """Selects the rollouts to show. Every condition that is not None must hold."""

    step: int | None = None
    """Number of the step, from 1."""
    committed: bool = False
    """True: only rollouts that belong to a committed step."""
    group: int | None = None
    """Number of the group, from 1: its draw + 1."""
    example: int | None = None
    task: str | None = None
    """Task in a mixture: the label of the example, or the name of its dataset."""
    outcome: Outcome | tuple[Outcome, ...] | None = None
    part: str | None = None
    """Only rollouts that have this reward part. `min_reward`, `max_reward`, `best` and `worst` then apply to its value; if a
    rollout has the part in several turns, one turn that matches is enough."""
    min_reward: float | None = None
    max_reward: float | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    """Maximum number of tokens that the policy wrote."""
    truncated: bool | None = None
    """True if a limit cut it off."""
    text: str | None = None
    """Words and quoted phrases that must all occur in the prompt, or all in the completion. See `groupwise.runs.text_index`."""
    order: Order = "draw"
    limit: int = 50
    offset: int = 0


@dataclass(frozen=True, slots=True)
class RolloutView:
    """One rollout as lists show it, without tokens."""

    id: int
    step: int | None
    """Number of its step, from 1; None if it belongs to no committed step."""
    group: int
    """Number of its group in the run, from 1: its draw + 1."""
    rollout: int
    """Its number in the group, from 1: its member + 1."""
    attempt: int
    example: int
    outcome: Outcome
    reason: str | None
    reward: float | None
    advantage: float | None
    parts: tuple[RewardPart, ...]
    truncated: bool
    completion_tokens: int
    prompt: str
    """The prompt as the model saw it if that is recorded, else as the task gave it."""
    completion: str
    ended_by: EndedBy | None = None
    """The reason why a rollout with an environment ended; None for others."""
    task: str | None = None
    """Task as in `RolloutFilter.task`; None if its example names none."""


@dataclass(frozen=True, slots=True)
class RolloutDetail:
    """Details of one rollout."""

    origin: str
    """Why its example was drawn; see `groupwise.core.types.Group.origin`."""
    again: int | None
    """The number of the group whose completions these are, if they were replayed."""
    columns: str
    """The columns of its example, as JSON."""
    messages: str | None
    """Messages of a multi-turn chat, as JSON; None for others."""
    notes: str
    """Notes of the rollout, as JSON."""


@dataclass(frozen=True, slots=True)
class FailureKind:
    """Rollouts that were not scored for the same reason, ignoring numbers and quoted parts in it."""

    reason: str
    """The reason with `…` in place of numbers and quoted parts."""
    count: int
    example: str
    """The newest of these reasons, unchanged."""
    rollout: int
    """Id of the rollout that has this reason."""


@dataclass(frozen=True, slots=True)
class GroupReward:
    """Rewards of one group of a committed step."""

    step: int
    """Number of the step, from 1."""
    draw: int
    prompt: str
    """The prompt as text; equal for equal prompts."""
    mean: float
    """Mean reward of its scored rollouts."""


class CompletedPrompt(NamedTuple):
    """A prompt that was completed in a committed step. A tuple for speed, because a page creates ten thousand of them."""

    draw: int
    step: int
    """Number of the step, from 1."""
    example: int
    prompt: str
    """The prompt as text, as the task gave it; equal for equal prompts."""


@dataclass(frozen=True, slots=True)
class GroupScore:
    """Mean and best reward of a group's members; both None if none was scored."""

    mean: float | None
    best: float | None
