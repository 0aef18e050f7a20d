"""Dr. GRPO, "GRPO done right": https://arxiv.org/abs/2503.20783, section 3.

    A_i  = r_i − mean(r)
    loss = 1/(N · L) · Σ_i Σ_t [ −min(ratio · A_i, clip(ratio) · A_i) + beta · k3 ]

r are the rewards of a group's scored members, N is the number of scored rollouts of the whole step, and L is max_completion_length, a
constant: each token counts the same, independent of the length of its rollout and the difficulty of its prompt. That removes two biases of
`grpo`: long wrong answers are no longer punished less than short ones, and easy or hopeless prompts no longer count more than the others.

Assumes rewards of a meaningful size (about 1), since nothing divides by their spread; and the same L for the whole run, since halving it
doubles the gradient.

Degenerate cases: equal rewards, and a group of one, give advantage exactly 0. A failed member is in neither mean nor denominator. A masked
truncated member counts in both and has no gradient; so does one without a trained token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from groupwise.algorithms.advantages import Advantages, group_relative, scored_members
from groupwise.algorithms.clipped import Clipped
from groupwise.core.types import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class DrGrpo(Clipped):
    """Centred advantages, sum over tokens, constant normaliser."""

    name: ClassVar[str] = "dr_grpo"

    def advantages(self, groups: Sequence[Group]) -> Advantages:
        """Centred within the group, never scaled."""
        return group_relative(groups, "none")

    def denominator(self, groups: Sequence[Group], max_completion_length: int) -> float:
        """Scored rollouts × max_completion_length. Raises ValueError for a length below 1."""
        if max_completion_length < 1:
            raise ValueError(f"max_completion_length is {max_completion_length}; at least 1 token.")
        return float(scored_members(groups) * max_completion_length)
