"""KL-Cov, of "The entropy mechanism of reinforcement learning": https://arxiv.org/abs/2505.22617.

    A_i    = (r_i − mean(r)) / (std(r) + 1e-4)
    cov_t  = (A_t − mean(A)) · (log-probability_t − mean(log-probability))       means over the trained tokens of the step
    chosen = kl_cov_ratio of the tokens, those of the largest cov_t
    loss   = 1/(Σ_i |o_i|) · Σ_i Σ_t −ratio · A_t + kl_cov_coef · |log ratio| for the chosen, −ratio · A_t for the others

The alternative to `clip_cov`: the tokens that lower the entropy most keep their gradient, but are held near the policy that sampled
them. Nothing is clipped. The penalty acts from the second update of a step on; at a ratio of 1 it has no gradient.

Differences to verl's `kl_cov`: as in `clip_cov`, the tokens are chosen once a step by the sampler's log-probabilities; there again in each
mini-batch. And only a covariance above 0 counts, in a rollout whose advantage is not 0.

The loss recognises the chosen tokens by their credit: it is 0 in a rollout whose own advantage is not.

Degenerate cases: those of `grpo`. At least one token is chosen if any has a covariance above 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from groupwise.algorithms import ops
from groupwise.algorithms.base import Tensor, TokenBatch
from groupwise.algorithms.clip_cov import token_covariances, zero_advantages
from groupwise.algorithms.group_relative import GroupRelative, ScaledRewards
from groupwise.algorithms.knobs import SCALE_REWARDS, ScaleRewards
from groupwise.core.types import Group, RolloutCredit


@dataclass(frozen=True, slots=True, kw_only=True)
class KlCov(ScaledRewards, GroupRelative):
    """A KL penalty for a few of the tokens that lower the entropy most, mean over the tokens of the step."""

    name: ClassVar[str] = "kl_cov"

    kl_cov_ratio: float = field(
        default=2e-4,
        metadata={
            "description": "Share of the step's trained tokens that are held near the policy that sampled them.",
            "gt": 0.0,
            "le": 1.0,
        },
    )
    kl_cov_coef: float = field(
        default=1.0,
        metadata={
            "description": "Weight of |log ratio| for these tokens, against a token's advantage.",
            "gt": 0.0,
        },
    )
    scale_rewards: ScaleRewards = field(default="group", metadata=SCALE_REWARDS)

    def credits(self, groups: Sequence[Group]) -> tuple[tuple[RolloutCredit | None, ...], ...]:
        """The advantage of each rollout, and of its tokens, where it is 0 for the chosen ones."""
        credits = GroupRelative.credits(self, groups)
        covariances = token_covariances(groups, credits)
        without_signal = {
            (rollout.draw, rollout.member)
            for group, of_group in zip(groups, credits, strict=True)
            for rollout, credit in zip(group.rollouts, of_group, strict=True)
            if credit is not None and credit.advantage == 0
        }
        places = [
            place
            for place, covariance in covariances.items()
            if covariance > 0 and place[:2] not in without_signal
        ]
        count = max(1, int(self.kl_cov_ratio * len(covariances)))
        largest = sorted(places, key=lambda place: (-covariances[place], place))[:count]
        return zero_advantages(groups, credits, frozenset(largest))

    def teaches(self, credits: Sequence[RolloutCredit | None]) -> bool:
        """Also true if all tokens of the only rollout with an advantage are chosen ones."""
        return GroupRelative.teaches(self, credits) or any(
            credit is not None and credit.advantage != 0 for credit in credits
        )

    def surrogate(
        self, batch: TokenBatch, log_ratio_BT: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The ratio times the advantage, less the penalty of the chosen tokens."""
        log_ratio_BT = ops.bound_log_ratio(log_ratio_BT)
        ratio_BT = log_ratio_BT.exp()
        stats = {"ratio": ratio_BT.detach().masked_fill(batch.mask_BT == 0, 0.0)}
        if batch.credits_BT is None:
            return ratio_BT * batch.advantages, stats
        own_B1 = batch.advantages_B.unsqueeze(-1)
        is_chosen_BT = (batch.credits_BT == 0) & (batch.mask_BT != 0) & (own_B1 != 0)
        advantages_BT = batch.advantages + own_B1 * is_chosen_BT
        penalty_BT = log_ratio_BT.abs() * self.kl_cov_coef * is_chosen_BT
        return ratio_BT * advantages_BT - penalty_BT, stats
