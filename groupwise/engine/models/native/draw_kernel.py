"""Draws a token for each row of float32 logits in two passes over them, compiled for the CPU by numba.

The first pass finds the highest logit, the second sums the exponentials of each block; only the block with the token is looked at again.
Torch's operations take six passes, and keep the exponentials of the whole vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from groupwise.engine.models.native.kernel_cache import kernel
from groupwise.engine.models.native.kernels import (
    ANY_ORDER,
    LOWEST,
    ROUNDING_KEPT,
    Array,
    exp,
    highest_score,
)


@kernel(ROUNDING_KEPT)
def _weight(logit: Any, divisor: Any, peak: Any) -> Any:
    """`exp(logit / divisor − peak)`, and exactly 0 where that is no normal float32; NaN stays NaN."""
    distance = logit / divisor - peak
    return np.float32(0.0) if distance < LOWEST else exp(distance)


@kernel(ANY_ORDER)
def _sum_of_weights(logits_B: Array, divisor: Any, peak: Any) -> Any:
    total = np.float32(0.0)
    for b in range(logits_B.shape[0]):
        total += _weight(logits_B[b], divisor, peak)
    return total


@kernel(ROUNDING_KEPT, cached=True)
def draw(
    logits_SV: Array,
    divisors_S: Array,
    uniforms_S: Array,
    block: int,
    tokens_S: Array,
    logprobs_S: Array,
) -> None:
    """Write the token that inverts the cumulative distribution of each row at its uniform number, and its log-probability.

    `uniforms_S` is float64, and so far below 1 that a product with it is smaller than the other factor. NaN or infinite logits give a
    log-probability of NaN.
    """
    vocabulary = logits_SV.shape[1]
    blocks = (vocabulary + block - 1) // block
    cumulative_K = np.empty(blocks, np.float64)
    for s in range(logits_SV.shape[0]):
        logits_V, divisor = logits_SV[s], divisors_S[s]
        peak = highest_score(logits_V) / divisor
        total = 0.0
        for k in range(blocks):
            total += _sum_of_weights(logits_V[k * block : (k + 1) * block], divisor, peak)
            cumulative_K[k] = total
        target = uniforms_S[s] * total
        k = min(np.searchsorted(cumulative_K, target, side="right"), blocks - 1)
        logits_B = logits_V[k * block : (k + 1) * block]
        inside = cumulative_K[k - 1] if k else 0.0
        token = k * block
        for b in range(logits_B.shape[0]):
            weight = np.float64(_weight(logits_B[b], divisor, peak))
            inside += weight
            if weight > 0.0:
                token = k * block + b
                if inside > target:
                    break
        tokens_S[s] = token
        logprobs_S[s] = logits_V[token] / divisor - peak - np.float32(np.log(total))
