"""The loss of the family: PPO's clipped surrogate, and a KL penalty to the reference.

    policy = −Σ_rows scale · Σ_tokens min(ratio · A, clip(ratio, 1 − epsilon, 1 + epsilon_high) · A)
    kl     = beta · Σ_rows scale · Σ_tokens k3(policy, reference)
    ratio  = exp(policy log-probability − sampling log-probability)

The ratio is taken against what the sampler reported when it drew the token, so it also corrects for
the small differences between sampler and learner. Right after publication it is 1 up to those, and
the gradient is that of REINFORCE. The clip works as a brake only on the side that would be gained
on: with A > 0 above `1 + epsilon_high`, with A < 0 below `1 − epsilon`. A token beyond it keeps its
value but has no gradient.

An algorithm of the family inherits knobs and loss from here, and adds what distinguishes it: how
rewards become weights, and what the sums are divided by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import ClassVar

from groupwise.algorithms import ops
from groupwise.algorithms.base import LossResult, TokenBatch, check_knobs
from groupwise.types import LossSpec, Rollout, Weight


@dataclass(frozen=True, slots=True)
class ClippedSurrogate:
    """Knobs and loss that the algorithms of the family share."""

    name: ClassVar[str]

    beta: float = field(
        default=0.0,
        metadata={
            "description": "Weight of the KL penalty to the reference policy (k3 estimator). "
            "0: no penalty and no reference to compute, usual where rewards can be verified.",
            "ge": 0.0,
        },
    )
    epsilon: float = field(
        default=0.2,
        metadata={
            "description": "The ratio is clipped below at 1 - epsilon, PPO's usual value; "
            "1 or more: no clip below.",
            "gt": 0.0,
        },
    )
    epsilon_high: float | None = field(
        default=None,
        metadata={
            "description": "The ratio is clipped above at 1 + epsilon_high; null: the same as "
            "epsilon. A larger value (0.28 in DAPO) lets unlikely tokens grow faster.",
            "gt": 0.0,
        },
    )
    mask_truncated_completions: bool = field(
        default=False,
        metadata={
            "description": "Leave rollouts that the length limit cut off out of the loss. Their "
            "rewards still count in mean and spread, and they still count in the denominators.",
        },
    )

    def __post_init__(self) -> None:
        check_knobs(self)

    @property
    def needs_reference(self) -> bool:
        """Only the KL penalty does."""
        return self.beta > 0

    def trains(self, rollout: Rollout) -> bool:
        """Whether a scored rollout has tokens that teach; it counts in the denominators anyway."""
        masked = self.mask_truncated_completions and rollout.truncated
        return not masked and ops.trained_tokens(rollout) > 0

    def teaches(self, weights: Sequence[Weight | None]) -> bool:
        """Any advantage but 0 does; with a KL penalty any row does."""
        present = [weight for weight in weights if weight is not None]
        return any(self.beta > 0 or weight.advantage != 0 for weight in present)

    def per_component(self, denominator: float) -> dict[str, float]:
        """The same denominator for each component of the loss."""
        components = ("policy", "kl") if self.beta > 0 else ("policy",)
        return dict.fromkeys(components, denominator)

    def loss_spec(self) -> LossSpec:
        """Name and every knob, defaults too, so that the other side does not fill in its own."""
        return LossSpec(self.name, asdict(self))

    def loss(self, batch: TokenBatch) -> LossResult:
        """The sums at the top of this module. Raises ValueError if beta lacks its reference."""
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        clip = (1 - self.epsilon, 1 + high)
        policy, mask, scales = batch.policy_logprobs_BT, batch.mask_BT, batch.scales_B
        gap = ops.masked_difference(policy, batch.sampling_logprobs_BT.detach(), mask)
        ratio = ops.bounded(gap).exp()
        surrogate = ops.clipped_surrogate(ratio, batch.advantages_B, *clip)
        components = {"policy": -ops.scaled_sum(surrogate, scales, mask)}
        stats = ops.token_stats(batch, ratio, *clip)
        if batch.reference_logprobs_BT is not None:
            kl = ops.k3(policy, batch.reference_logprobs_BT, mask)
            stats["kl"] = kl.detach().sum()
            if self.needs_reference:
                components["kl"] = self.beta * ops.scaled_sum(kl, scales, mask)
        elif self.needs_reference:
            raise ValueError(
                f"{self.name} with beta {self.beta} needs the reference's log-probabilities, but "
                "the batch has none. Fill `Row.reference_logprobs`, or set beta to 0."
            )
        return LossResult(components, stats)
