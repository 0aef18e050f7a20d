"""LUSPO, length-unbiased sequence policy optimisation: https://arxiv.org/abs/2602.05261.

    loss = 1/N · Σ_i −|o_i| · min(s_i · A_i, clip(s_i, 1 − 2e-3, 1 + 2.5e-3) · A_i),   s_i and A_i of `gspo`

The loss of `gspo`, times the length of the rollout. There a token of a long rollout counts less than one of a short rollout, so answers
become shorter; here each token counts the same. The clip is that of the paper's section 5.1. The loss is that of TRL's `loss_type: luspo`.

Assumes steps of about the same length, since their tokens are summed: the gradient grows with the mean length.

Degenerate cases: those of `gspo`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from groupwise.algorithms.clipped import Clipped
from groupwise.algorithms.gspo import Gspo
from groupwise.algorithms.knobs import metadata_of
from groupwise.core.types import Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Luspo(Gspo):
    """One ratio for a rollout as in `gspo`, and a loss that grows with its length."""

    name: ClassVar[str] = "luspo"

    epsilon: float = field(default=2e-3, metadata=metadata_of(Clipped, "epsilon"))
    epsilon_high: float | None = field(
        default=2.5e-3, metadata=metadata_of(Clipped, "epsilon_high")
    )

    def scale(self, rollout: Rollout) -> float:
        """A sum over the rollout's tokens, which all carry the same value."""
        return 1.0
