"""RLOO, REINFORCE leave-one-out: Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740, section 3.

    A_i  = r_i − mean(r of the other members)
    ρ_i  = exp( Σ_t log ratio_t )
    loss = 1/N · Σ_i [ −min(ρ_i · A_i, clip(ρ_i, 1 − 0.2, 1 + 0.2) · A_i) + beta · Σ_t KL_t ]

A rollout is one action: its sum is not divided by its number of tokens, and its baseline does not depend on it, so the gradient is
unbiased. On policy ρ is 1 and the gradient that of REINFORCE, as in the paper; the clip, as in TRL, acts only if several updates are made
from one step's samples.

Assumes rewards of a meaningful size, since nothing divides by their spread; and ratios that start at 1, since ρ is a product over all
tokens. So it is taken against the learner's own log-probabilities at the start of the step (`importance_sampling_correction`, on by
default).

In the paper and in TRL the KL is a part of the reward. Here it is a term of the loss, summed over the rollout, so that beta has the same
size: its gradient considers each token alone, and has less variance.

With `turn_discount`, each turn of a rollout has an advantage of its own: its return G less the mean return of the other members in the turn
of the same number. A turn then answers only for what came after it.

    G_ik = Σ_{j ≥ k} turn_discount^(j − k) · reward of turn j of rollout i         (`turns.py`)
    A_ik = G_ik − mean(G_k of the other members that had a turn k)

Degenerate cases: equal rewards, and a group of one, give advantage exactly 0, and so does a turn that no other member had. With two
members the advantages are twice those of `dr_grpo`. Failed and masked members as in `dr_grpo`. A rollout of several rows is still one
action, with one ratio.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from groupwise.algorithms import ops
from groupwise.algorithms.advantages import Advantages, leave_one_out, scored_rewards, to_members
from groupwise.algorithms.base import Tensor, TokenBatch
from groupwise.algorithms.clipped import Clipped
from groupwise.algorithms.correction import Correction
from groupwise.algorithms.group_relative import per_rollout
from groupwise.algorithms.knobs import TURN_DISCOUNT, metadata_of
from groupwise.algorithms.turns import discounted_returns, per_token
from groupwise.core.types import Group, RolloutCredit


@dataclass(frozen=True, slots=True, kw_only=True)
class Rloo(Clipped):
    """Leave-one-out baseline, the rollout as one action."""

    name: ClassVar[str] = "rloo"

    importance_sampling_correction: Correction = field(
        default="token_truncate", metadata=metadata_of(Clipped, "importance_sampling_correction")
    )

    turn_discount: float | None = field(
        default=None,
        metadata={
            **TURN_DISCOUNT,
            "description": "Gives each turn of a rollout its own advantage; this is the share of the next turn's return in a turn's "
            "return. null: one advantage for the rollout.",
        },
    )

    @property
    def ratio_of_rollout(self) -> bool:
        """True: all rows of a rollout share the sum of its log-ratios."""
        return True

    def advantages(self, groups: Sequence[Group]) -> Advantages:
        """Each reward less the mean of its siblings'."""
        return to_members(groups, [leave_one_out(scored_rewards(group)) for group in groups])

    def credits(self, groups: Sequence[Group]) -> tuple[tuple[RolloutCredit | None, ...], ...]:
        """The advantage of each rollout, or with `turn_discount` of each of its turns."""
        credits = Clipped.credits(self, groups)
        if self.turn_discount is None:
            return credits
        return tuple(
            _with_turns(group, of_group, self.turn_discount)
            for group, of_group in zip(groups, credits, strict=True)
        )

    def denominator(self, groups: Sequence[Group], max_completion_length: int) -> float:
        """The number of scored rollouts."""
        return per_rollout(groups)

    def surrogate(
        self, batch: TokenBatch, log_ratio_BT: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The rollout's surrogate, divided equally among its tokens."""
        surrogate, stats = Clipped.surrogate(self, batch, log_ratio_BT)
        return surrogate / ops.token_counts(batch.mask_BT, surrogate, batch.others), stats

    def own_log_ratio(self, batch: TokenBatch, log_ratio_BT: Tensor) -> Tensor:
        """The sum of the rollout's log-ratios."""
        return ops.sequence_log_ratio(log_ratio_BT, batch.others, batch.mask_BT, mean=False)


def _with_turns(
    group: Group, credits: Sequence[RolloutCredit | None], discount: float
) -> tuple[RolloutCredit | None, ...]:
    """The credits with an advantage for each turn, relative to the same turn of the other scored members."""
    returns = {rollout.member: discounted_returns(rollout, discount) for rollout in group.scored}
    for turn in range(max(map(len, returns.values()), default=0)):
        members = [member for member, values in returns.items() if turn < len(values)]
        advantages = leave_one_out([returns[member][turn] for member in members])
        for member, advantage in zip(members, advantages, strict=True):
            returns[member][turn] = advantage
    return tuple(
        credit and replace(credit, token_advantages=per_token(rollout, returns[rollout.member]))
        for rollout, credit in zip(group.rollouts, credits, strict=True)
    )
