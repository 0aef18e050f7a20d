"""Dr. GRPO with smaller negative advantages, and each rollout weighted by a power of its length."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from groupwise.algorithms.advantages import (
    Advantages,
    group_relative,
    scored_members,
    trained_tokens,
)
from groupwise.algorithms.clipped import Clipped
from groupwise.core.types import Group, Rollout


@dataclass(frozen=True, kw_only=True)
class Asymmetric(Clipped):
    negative_weight: float = field(
        default=0.5,
        metadata={"description": "Factor of negative advantages.", "ge": 0.0, "le": 1.0},
    )
    power: float = field(
        default=0.5,
        metadata={"description": "A rollout is divided by its length to the power of this."},
    )

    def advantages(self, groups: Sequence[Group]) -> Advantages:
        """Centred within the group; those below the mean are made smaller. None for members that were not scored."""
        return [
            tuple(
                value if value is None or value > 0 else self.negative_weight * value
                for value in values
            )
            for values in group_relative(groups, "none")
        ]

    def scale(self, rollout: Rollout) -> float:
        """Factor of a rollout's sum over its tokens."""
        return trained_tokens(rollout) ** -self.power

    def denominator(self, groups: Sequence[Group], max_completion_length: int) -> float:
        """What the sums of the whole step are divided by."""
        return float(scored_members(groups))
