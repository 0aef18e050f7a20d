"""VESPO, variational sequence-level soft policy optimisation: https://arxiv.org/abs/2602.10693.

    A_i  = (r_i − mean(r)) / (std(r) + 1e-4)
    w_i  = Π_t ratio_t
    φ(w) = w^k · exp(λ · (1 − w)),   k and λ = k_positive and lambda_positive if A_i ≥ 0, else k_negative and lambda_negative
    loss = 1/(Σ_i |o_i|) · Σ_i Σ_t −sg[ φ(w_i) ] · A_i · log-probability

The ratio is that of the whole rollout, a product that no mean over its tokens makes small. A clip is replaced by the kernel of a Gamma
distribution, which is 1 at w = 1, largest at w = k / λ, and sinks on both sides; sg stops its gradient. So a rollout that the policy has
left far behind counts little, whichever sign its advantage has. The loss is that of TRL's `loss_type: vespo`.

The ratio is taken against the sampler. With `importance_sampling_correction` it is taken against the policy at the start of the step, and
the correction weighs single tokens or rollouts beside it; TRL puts its correction into w instead.

The value of the loss has no meaning, only its gradient has: on policy it is that of REINFORCE.

Degenerate cases: those of `grpo`. A rollout of several rows has one ratio for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from groupwise.algorithms import ops
from groupwise.algorithms.base import Tensor, TokenBatch
from groupwise.algorithms.group_relative import GroupRelative, ScaledRewards
from groupwise.algorithms.knobs import SCALE_REWARDS, ScaleRewards


@dataclass(frozen=True, slots=True, kw_only=True)
class Vespo(ScaledRewards, GroupRelative):
    """A soft, detached weight of each rollout's whole ratio times the log-probability; mean over the tokens of the step."""

    name: ClassVar[str] = "vespo"

    k_positive: float = field(
        default=2.0,
        metadata={
            "description": "Power of the rollout's ratio in its weight, where the advantage is positive or 0.",
            "ge": 0.0,
        },
    )
    lambda_positive: float = field(
        default=3.0,
        metadata={
            "description": "How fast the weight sinks as the rollout's ratio grows, where the advantage is positive or 0.",
            "gt": 0.0,
        },
    )
    k_negative: float = field(
        default=3.0,
        metadata={
            "description": "Power of the rollout's ratio in its weight, where the advantage is negative.",
            "ge": 0.0,
        },
    )
    lambda_negative: float = field(
        default=2.0,
        metadata={
            "description": "How fast the weight sinks as the rollout's ratio grows, where the advantage is negative.",
            "gt": 0.0,
        },
    )
    scale_rewards: ScaleRewards = field(default="group", metadata=SCALE_REWARDS)

    @property
    def ratio_of_rollout(self) -> bool:
        """True: all rows of a rollout share the sum of its log-ratios."""
        return True

    def surrogate(
        self, batch: TokenBatch, log_ratio_BT: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The rollout's weight times advantage times log-probability."""
        outside_mask = batch.mask_BT == 0
        log_ratio_BT = ops.sequence_log_ratio(
            log_ratio_BT.detach(), batch.others, batch.mask_BT, mean=False
        )
        ratio_BT = log_ratio_BT.exp()
        rises = batch.advantages >= 0
        k = rises * self.k_positive + ~rises * self.k_negative
        rate = rises * self.lambda_positive + ~rises * self.lambda_negative
        weight_BT = (log_ratio_BT * k + (1 - ratio_BT) * rate).exp()
        logprobs_BT = batch.policy_logprobs_BT.masked_fill(outside_mask, 0.0)
        stats = {"ratio": ratio_BT.masked_fill(outside_mask, 0.0)}
        return weight_BT * batch.advantages * logprobs_BT, stats
