"""CISPO, clipped importance-sampling weights: MiniMax-M1, https://arxiv.org/abs/2506.13585, eq. 4, 5.

    A_i  = (r_i − mean(r)) / (std(r) + 1e-4)
    loss = 1/(Σ_i |o_i|) · Σ_i Σ_t −sg[ min(ratio, 1 + epsilon_high) ] · A_i · log-probability

The weight is clipped, not the update: sg stops its gradient, so every token keeps the gradient of its log-probability, at most
1 + epsilon_high times. A clip like PPO's removes exactly the unlikely tokens that start a new thought. There is no lower bound, as in the
paper's experiments.

Assumes that few weights are above the cap; each of them makes the gradient a little biased. The paper does not give its cap, nor does the
text of ScaleRL (https://arxiv.org/abs/2510.13786), which finds little difference over a wide range (appendix A.17.2). The default, 5 in
all, is the value that TRL gives for ScaleRL, as `epsilon_high: 5.0`; here the key means the same in all algorithms.

The value of the loss has no meaning, only its gradient has: on policy it is that of REINFORCE.

Degenerate cases: those of `grpo`; the tokens of a masked truncated rollout are not counted either.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from groupwise.algorithms import ops
from groupwise.algorithms.base import Tensor, TokenBatch
from groupwise.algorithms.clipped import Clipped
from groupwise.algorithms.group_relative import GroupRelative, ScaledRewards
from groupwise.algorithms.knobs import SCALE_REWARDS, ScaleRewards, metadata_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Cispo(ScaledRewards, GroupRelative):
    """A capped, detached weight times the log-probability; mean over the tokens of the step."""

    name: ClassVar[str] = "cispo"

    epsilon_high: float = field(default=4.0, metadata=metadata_of(Clipped, "epsilon_high"))
    scale_rewards: ScaleRewards = field(default="group", metadata=SCALE_REWARDS)

    def surrogate(
        self, batch: TokenBatch, log_ratio_BT: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The capped weight times advantage times log-probability."""
        outside_mask = batch.mask_BT == 0
        ratio = ops.bound_log_ratio(log_ratio_BT.detach()).exp()
        weight = ratio.clamp(max=1 + self.epsilon_high) * batch.advantages
        surrogate = weight * batch.policy_logprobs_BT.masked_fill(outside_mask, 0)
        is_capped = (ratio > 1 + self.epsilon_high) & (batch.advantages != 0)
        return surrogate, {"clip_high": is_capped, "ratio": ratio.masked_fill(outside_mask, 0.0)}
