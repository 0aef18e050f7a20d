"""DAPO, "decoupled clip and dynamic sampling": https://arxiv.org/abs/2503.14476, equations 8 to 13.

    A_i  = (r_i − mean(r)) / (std(r) + 1e-4)
    loss = 1/(Σ_i |o_i|) · Σ_i Σ_t −min(ratio · A_i, clip(ratio, 1 − 0.2, 1 + 0.28) · A_i)

Four changes to `grpo`. The clip is wider above, so that unlikely tokens can grow. The sums are divided by the tokens of the whole step, so
that a token of a long rollout counts as much as any other. Groups in which all succeed or all fail are drawn again (dynamic sampling). And
rewards sink over the last tokens before the length limit (`overlong.py`): |y| is the number of tokens that the policy wrote, and the cache
is a fifth of the limit unless `soft_punish_cache` is set, as in the paper (4,096 of 20,480). The paper has no KL penalty.

Assumes that drawing again is worth its cost: late in training most groups may be solved, and a step then takes up to
`max_resample_rounds` rounds of sampling.

Degenerate cases: those of `grpo`. The tokens of a masked truncated rollout are not counted either. The rewards of the task, before the
punishment, decide whether a group is drawn again: a group that differs only in length teaches nothing about the task.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from groupwise.algorithms.clipped import Clipped
from groupwise.algorithms.group_relative import ScaledRewards
from groupwise.algorithms.knobs import SCALE_REWARDS, KnobConflict, ScaleRewards, metadata_of
from groupwise.algorithms.overlong import check_names, with_overlong_punishment
from groupwise.core.types import Group

CACHE_SHARE = 0.2
"""Default cache as a share of the limit: 4,096 / 20,480."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dapo(ScaledRewards, Clipped):
    """Wider clip above, mean over the tokens of the step, dynamic sampling, over-long shaping."""

    name: ClassVar[str] = "dapo"

    epsilon_high: float | None = field(default=0.28, metadata=metadata_of(Clipped, "epsilon_high"))
    dynamic_sampling: bool = field(default=True, metadata=metadata_of(Clipped, "dynamic_sampling"))
    scale_rewards: ScaleRewards = field(default="group", metadata=SCALE_REWARDS)
    soft_punish_cache: int | None = field(
        default=None,
        metadata={
            "description": "Over-long shaping: tokens before max_completion_length over which the "
            "reward sinks. null: a fifth of it, as published. 0: no shaping.",
            "ge": 0,
        },
    )
    soft_punish_factor: float = field(
        default=1.0,
        metadata={
            "description": "Over-long shaping: how much reward a rollout as long as the limit loses.",
            "gt": 0.0,
        },
    )

    def conflicts(self) -> Iterator[KnobConflict]:
        """Also yield a punishment factor without a punishment."""
        yield from Clipped.conflicts(self)
        if self.soft_punish_cache == 0 and self.soft_punish_factor != 1:
            yield KnobConflict(
                f"dapo.soft_punish_factor is {self.soft_punish_factor:g}, which has no effect while soft_punish_cache is 0. Give "
                "a cache, or leave the factor out.",
                ("soft_punish_cache", "soft_punish_factor"),
            )

    def check(self, max_length: int, rewards: Sequence[str]) -> None:
        """Raise ValueError for a cache longer than the limit, and TaskError for a reward with the name of the punishment."""
        if self._cache_length(max_length):
            check_names(rewards)

    def shaped(self, group: Group, max_completion_length: int) -> Group:
        """The group with the soft over-long punishment. Raises the errors of `check`."""
        cache = self._cache_length(max_completion_length)
        if cache == 0:
            return group
        return with_overlong_punishment(
            group, max_completion_length, cache, self.soft_punish_factor
        )

    def _cache_length(self, max_length: int) -> int:
        """Number of tokens before the limit over which the reward sinks."""
        cache = self.soft_punish_cache
        if cache is None:
            return round(CACHE_SHARE * max_length)
        if cache > max_length:
            raise ValueError(
                f"algorithm.soft_punish_cache is {cache}, but the policy may write {max_length} tokens "
                "at most in a rollout; a fifth of them is usual, and is what null means."
            )
        return cache
