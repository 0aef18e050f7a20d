"""Supervised fine-tuning as a loss for the same learner: the teacher's tokens become more likely.

    sft = −Σ_rows scale · Σ_tokens log-probability

It has no knobs. With scale 1 and the number of trained tokens as the denominator it is the mean cross-entropy per token (nats). Advantages
and sampling log-probabilities are ignored. Without a trained token the sums are 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from groupwise.algorithms import ops
from groupwise.algorithms.base import LossDefaults, LossResult, TokenBatch
from groupwise.core.types import LossSpec


@dataclass(frozen=True, slots=True)
class Sft(LossDefaults):
    """The cross-entropy of the trained tokens, as a sum."""

    name: ClassVar[str] = "sft"

    @property
    def needs_accuracy(self) -> bool:
        """True: the share of the teacher's tokens that the model finds most likely is a usual metric of supervised training."""
        return True

    def loss_spec(self) -> LossSpec:
        """The name alone; there are no knobs."""
        return LossSpec(self.name)

    def loss(self, batch: TokenBatch) -> LossResult:
        """The sum at the top of this module, as the component `sft`."""
        logprobs = batch.policy_logprobs_BT
        component = -ops.scaled_sum(logprobs, batch.scales_B, batch.mask_BT)
        stats = ops.token_stats(batch)
        if batch.right_BT is not None:
            stats["right"] = batch.right_BT.masked_fill(batch.mask_BT == 0, 0)
        return LossResult({self.name: component}, ops.sum_stats(stats, logprobs))
