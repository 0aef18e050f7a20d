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

Degenerate cases: equal rewards, and a group of one, give advantage exactly 0; with two members the advantages are twice those of
`dr_grpo`. Failed and masked members as in `dr_grpo`. A rollout of several rows is still one action, with one ratio.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from groupwise.algorithms import ops
from groupwise.algorithms.advantages import Advantages, leave_one_out, scored_rewards, to_members
from groupwise.algorithms.base import Tensor, TokenBatch
from groupwise.algorithms.clipped import Clipped
from groupwise.algorithms.correction import Correction
from groupwise.algorithms.family import per_rollout
from groupwise.algorithms.knobs import metadata_of
from groupwise.core.types import Group, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Rloo(Clipped):
    """Leave-one-out baseline, the rollout as one action."""

    name: ClassVar[str] = "rloo"

    importance_sampling_correction: Correction = field(
        default="token_truncate", metadata=metadata_of(Clipped, "importance_sampling_correction")
    )

    @property
    def ratio_of_rollout(self) -> bool:
        """True: all rows of a rollout share the sum of its log-ratios."""
        return True

    def advantages(self, groups: Sequence[Group]) -> Advantages:
        """Each reward less the mean of its siblings'."""
        return to_members(groups, [leave_one_out(scored_rewards(group)) for group in groups])

    def scale(self, rollout: Rollout) -> float:
        """1: a rollout's log-probability is the sum of its tokens' log-probabilities."""
        return 1.0

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
