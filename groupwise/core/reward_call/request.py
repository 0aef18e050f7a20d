"""The request to score a group, and its result: plain records and the `Scorer` protocol.

A `Scorer` is called once for each group. It never raises because of a reward function: members that could not be
scored come back as `failed` or `timed_out` with a reason. It raises `RewardWorkerError` if scoring itself is impossible.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from groupwise.core.reward_call.text import CompletionText
from groupwise.core.types import Outcome, Prompt, RewardPart

ORIGIN = "origin"
"""The column with the source of an example (fresh, easy, replay), unless the dataset has a column of this name."""


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """A group to be scored: every list has one entry for each member, in order."""

    draw: int
    prompts: list[Prompt]
    completions: list[CompletionText]
    completion_ids: list[list[int]]
    columns: dict[str, list[Any]]
    """The other columns of the dataset; their values may be anything that can be pickled."""
    global_step: int
    max_steps: int
    prompt_ids: list[list[int]] = field(default_factory=list[list[int]])
    """Empty if the tokens are unknown."""
    prompts_seen: list[Prompt] = field(default_factory=list[Prompt])
    """The prompts as the model saw them, with the chat template's text; empty if unknown."""
    notes: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """What the environment recorded about each rollout; empty if nothing was."""
    steps_per_epoch: float | None = None
    """Number of steps in one pass over the rows; None if unknown."""


@dataclass(frozen=True, slots=True)
class MemberScore:
    """The score of one rollout."""

    outcome: Outcome
    reason: str | None = None
    """The reason why it is not `scored`."""
    reward: float | None = None
    """Σ weight × value over the parts that apply; None unless `scored`."""
    parts: tuple[RewardPart, ...] = ()
    notes: dict[str, Any] = field(default_factory=dict[str, Any])
    """Notes that functions recorded with `log_extra`, as plain JSON values."""


@dataclass(frozen=True, slots=True)
class GroupScore:
    """The scores of a group, in the order of its members."""

    members: tuple[MemberScore, ...]
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """Metrics that functions recorded with `log_metric`, averaged over the group."""


class Scorer(Protocol):
    """Scores groups. Implementations: `RewardWorkers` (killable processes), `InProcessScorer` (one thread)."""

    async def start(self) -> None:
        """Start workers; raises RewardWorkerError if that fails. Optional: the first call of `score` does it too."""
        ...

    async def score(self, request: ScoreRequest) -> GroupScore:
        """Score one group; may be awaited for many groups at once."""
        ...

    async def compute_metrics(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[CompletionText],
        rows: Sequence[dict[str, Any]],
    ) -> dict[str, Any]:
        """The task's own metrics over flat lists, as plain JSON values. Raises RewardWorkerError if they fail."""
        ...

    async def close(self) -> None:
        """End every process and thread. Calls in progress are abandoned."""
        ...


def unpicklable(columns: Mapping[str, Any]) -> list[str]:
    """The columns whose values cannot be sent to another process."""
    names: list[str] = []
    for name, values in columns.items():
        try:
            pickle.dumps(values)
        except Exception:  # noqa: BLE001 — values of user classes may raise anything here
            names.append(name)
    return names


def unscored_group(count: int, outcome: Outcome, reason: str) -> GroupScore:
    """The result of a group in which no member could be scored, for one reason."""
    return GroupScore(tuple(MemberScore(outcome, reason) for _ in range(count)))
