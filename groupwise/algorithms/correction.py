"""Importance weights between sampler and learner.

The sampling and the training engine compute slightly different probabilities from the same weights, so samples are not quite on policy.
The correction multiplies the surrogate of each token by a detached weight, exp(proximal − sampling log-probability); the proximal
log-probabilities are the learner's at the start of the step. The ratio that is clipped then covers only the updates.

    token_*      one weight for each token: little variance, a small bias
    sequence_*   one weight for the rollout with all its rows, the product of its tokens' weights: no bias, much variance
    *_truncate   weights above the cap become the cap (https://fengyao.notion.site/off-policy-rl)
    *_mask       weights above the cap become 0, and the token or rollout is left out

Weights below the floor are treated in the same way: they become the floor, or 0. token_mask with both bounds is IcePop
(https://arxiv.org/abs/2510.18855; https://arxiv.org/abs/2512.16144, equation 1). These are the modes of TRL's
`vllm_importance_sampling_mode`; its default is sequence_mask with a cap of 3 and no floor.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from groupwise.algorithms import ops
from groupwise.algorithms.base import SiblingSums, Tensor

Correction: TypeAlias = Literal[
    "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
]


def importance_weights(
    proximal_BT: Tensor,
    sampling_BT: Tensor,
    mask_BT: Tensor,
    mode: Correction,
    bounds: tuple[float, float],
    others: SiblingSums | None = None,
) -> tuple[Tensor, Tensor]:
    """The weight of each token, and True where one of the bounds (floor, cap) changed it; 1 and False outside the mask."""
    gap_BT = ops.masked_difference(proximal_BT.detach(), sampling_BT.detach(), mask_BT)
    if mode.startswith("sequence"):
        gap_B1 = gap_BT.sum(-1, keepdim=True)
        if others is not None:
            gap_B1 = gap_B1 + others.log_weights_B.unsqueeze(-1)
        gap_BT = gap_B1.expand_as(gap_BT).masked_fill(mask_BT == 0, 0.0)
    weights_BT = ops.bound_log_ratio(gap_BT).exp()
    beyond_BT = ((weights_BT < bounds[0]) | (weights_BT > bounds[1])) & (mask_BT != 0)
    if mode.endswith("mask"):
        return weights_BT.masked_fill(beyond_BT, 0.0), beyond_BT
    bounded_BT = weights_BT.clamp(*bounds)
    return bounded_BT.masked_fill(mask_BT == 0, 1.0), beyond_BT
