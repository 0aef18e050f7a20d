"""PPO's clipped surrogate: min(ratio · A, clip(ratio, 1 − epsilon, 1 + epsilon_high) · A).

Right after publication the ratio is 1 up to the differences between sampler and learner, and the gradient is that of REINFORCE. The clip
stops a token only in the direction that increases the objective: above `1 + epsilon_high` if A > 0, below `1 − epsilon` if A < 0. A token
beyond it keeps its value but has no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from groupwise.algorithms import ops
from groupwise.algorithms.base import Tensor, TokenBatch
from groupwise.algorithms.group_relative import GroupRelative
from groupwise.algorithms.knobs import KnobConflict


@dataclass(frozen=True, slots=True, kw_only=True)
class Clipped(GroupRelative):
    """A ratio for each token, clipped on both sides."""

    epsilon: float = field(
        default=0.2,
        metadata={
            "description": "The ratio is clipped below at 1 - epsilon, PPO's usual value; "
            "1 or more: no clip below. Default 3e-4 for gspo and 2e-3 for luspo, "
            "whose ratios are means; in gmpo the bound is exp(-epsilon), with 0.4.",
            "gt": 0.0,
        },
    )
    epsilon_high: float | None = field(
        default=None,
        metadata={
            "description": "The ratio is clipped above at 1 + epsilon_high; null: the same as "
            "epsilon. A larger value lets unlikely tokens grow faster. Default 0.28 for dapo, 4e-4 "
            "for gspo, 2.5e-3 for luspo, and 4 for cispo, where it caps a weight.",
            "gt": 0.0,
        },
    )
    delta: float | None = field(
        default=None,
        metadata={
            "description": "Two-sided clip: with a negative advantage the ratio is held below this "
            "too, so that no token can dominate a step; above 1 + epsilon_high. null: no such bound.",
            "gt": 1.0,
        },
    )

    @property
    def clip(self) -> tuple[float, float]:
        """The ratios between which a token keeps its gradient."""
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        return 1 - self.epsilon, 1 + high

    def conflicts(self) -> Iterator[KnobConflict]:
        """Also yield a delta that lies within the clip."""
        yield from GroupRelative.conflicts(self)
        if self.delta is not None and self.delta <= self.clip[1]:
            yield KnobConflict(
                f"{self.name}.delta is {self.delta}; it must be above 1 + epsilon_high, which is "
                f"{self.clip[1]:g}.",
                ("delta", "epsilon", "epsilon_high"),
            )

    def surrogate(
        self, batch: TokenBatch, log_ratio_BT: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The clipped surrogate of each token."""
        ratio = ops.bound_log_ratio(self.own_log_ratio(batch, log_ratio_BT)).exp()
        surrogate = ops.clipped_surrogate(ratio, batch.advantages, *self.clip, self.delta)
        detached_ratio = ratio.detach()
        stats = ops.clip_stats(batch, detached_ratio, *self.clip, self.delta)
        return surrogate, {**stats, "ratio": detached_ratio.masked_fill(batch.mask_BT == 0, 0.0)}

    def own_log_ratio(self, batch: TokenBatch, log_ratio_BT: Tensor) -> Tensor:
        """The log-ratio that is clipped: that of each token, unless a subclass overrides this."""
        return log_ratio_BT
