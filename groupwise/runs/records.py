"""Rows written to and read from the run's record, beside the groups and rollouts of `groupwise.core.types`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from groupwise.core.types import EndedBy, Outcome, RewardPart

TIMING_PREFIXES = ("time/", "perf/")
"""Metrics of these names say how fast it went: they are recorded like the others, but are no part of any equality."""

Order = Literal["draw", "newest", "best", "worst"]
"""`draw`: as drawn, members in order. `newest`: the last written first. `best`, `worst`: by the reward (or part)."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The manifest of one committed step: what was trained, in which order, and what came of it."""

    step: int
    """Index from 0."""
    version_in: int
    version_out: int
    """Equal to `version_in` where nothing taught."""
    fingerprint_out: str
    draws: tuple[int, ...]
    """The step's groups in the order of training."""
    learning_rate: float
    finished_at: float
    """Seconds since 1970."""
    rejected: tuple[int, ...] = ()
    """Groups that were drawn for the step and not trained: the algorithm drew others in their place."""

    @property
    def all_draws(self) -> tuple[int, ...]:
        """The trained ones, then the rejected ones."""
        return (*self.draws, *self.rejected)


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A curve over some consecutive steps; the values are None if it has no finite one there."""

    at: float
    """Position of these steps in a picture: the middle of their column, which is the same for all curves over the same range."""
    first: int
    last: int
    """Steps, equal where it is a single one."""
    mean: float | None
    low: float | None
    high: float | None
    lost: int = 0
    """Steps of these whose value was no finite number; the others say what the values are."""


@dataclass(frozen=True, slots=True)
class Rewound:
    """Counts of what a resume deleted in order to do it again."""

    steps: int
    rollouts: int


@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    """One evaluation of the run's policy."""

    step: int
    """After this many steps; 0 is the policy that the run started from."""
    name: str
    policy: str
    """The evaluated policy: `base`, `run@step`, or a fingerprint."""
    metrics: Mapping[str, float]
    rows: Sequence[Mapping[str, Any]] = ()
    """One mapping for each prompt or sample, as JSON."""
    asked: str = ""
    """Fingerprint of what was asked, and how: only evaluations that have the same one compare. Empty: not known."""


@dataclass(frozen=True, slots=True)
class WarningRecord:
    """A signal of reward hacking that begins or ends."""

    step: int
    """After this many steps."""
    name: str
    """Name of the signal."""
    kind: Literal["begins", "ends"]
    message: str
    """Its meaning, with the numbers, for people."""
    values: Mapping[str, float] = field(default_factory=dict[str, float])
    """The numbers behind it."""


@dataclass(frozen=True, slots=True)
class ResumeRecord:
    """One time that the run was taken up again."""

    step: int
    """The first step that was done (again)."""
    dropped: Rewound
    resumed_at: float
    """Seconds since 1970."""
    changes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Config keys that are different from now on: dotted key -> [before, after]."""


@dataclass(frozen=True, slots=True)
class RolloutFilter:
    """Selects the rollouts to show. Every condition that is not None must hold."""

    step: int | None = None
    draw: int | None = None
    example: int | None = None
    task: str | None = None
    """Task of a mixture: the label of the example, or the name of its data set."""
    outcome: Outcome | tuple[Outcome, ...] | None = None
    part: str | None = None
    """Only rollouts that have this reward part; `min_reward`, `max_reward`, `best` and `worst` are then about its value, of
    several turns about any that meets them."""
    min_reward: float | None = None
    max_reward: float | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    """Most tokens that the policy wrote."""
    truncated: bool | None = None
    """True if a limit cut it off."""
    text: str | None = None
    """Words that all stand in the prompt, or all in the completion, anywhere; in quotes a phrase. See `groupwise.runs.text_index`."""
    order: Order = "draw"
    limit: int = 50
    offset: int = 0


@dataclass(frozen=True, slots=True)
class RolloutView:
    """One rollout as it is shown in lists: no tokens."""

    id: int
    step: int | None
    draw: int
    member: int
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
    """The reason why a rollout with an environment ended."""
    task: str | None = None
    """Task as in `RolloutFilter.task`; None if its example names none."""


@dataclass(frozen=True, slots=True)
class RolloutDetail:
    """Details of one rollout."""

    origin: str
    """Why its example was drawn, as `groupwise.core.types.Group` says it."""
    again: int | None
    """The draw whose completions these are, if they were replayed."""
    columns: str
    """Those of its example, as JSON."""
    messages: str | None
    """Messages of a chat of several turns, as JSON."""
    notes: str
    """Notes of the rollout, as JSON."""


@dataclass(frozen=True, slots=True)
class FailureKind:
    """Rollouts that were not scored for the same reason, but for numbers and quoted parts in it."""

    reason: str
    """The reason with `…` in place of these."""
    count: int
    example: str
    """One of them, the newest, as it was said."""
    rollout: int
    """The rollout whose reason that is."""


@dataclass(frozen=True, slots=True)
class GroupReward:
    """Rewards of one group of a committed step."""

    step: int
    draw: int
    prompt: str
    """The prompt as text; equal for equal prompts."""
    mean: float
    """Mean reward of its scored rollouts."""


class GroupAsked(NamedTuple):
    """A prompt that was answered in a committed step; a tuple, because a page makes ten thousand of them."""

    draw: int
    step: int
    example: int
    prompt: str
    """The prompt as text, as the task gave it; equal for equal prompts."""


@dataclass(frozen=True, slots=True)
class GroupScore:
    """Rewards of a group's members; None if none of them was scored."""

    mean: float | None
    best: float | None
