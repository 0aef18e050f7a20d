"""Computes with rows of logits over the vocabulary, compiled for the CPU by numba: draws of the sampler, and numbers of the learner.

A row is read two or three times. Torch's operations take six to ten passes, and hold float32 copies of the logits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from groupwise.engine.models.native.facts import VOCABULARY_BLOCK
from groupwise.engine.models.native.kernel_cache import kernel
from groupwise.engine.models.native.kernels import (
    ANY_ORDER,
    LOWEST,
    ROUNDING_KEPT,
    Array,
    exp,
    highest_score,
    store,
    to_float32,
)


@kernel(ROUNDING_KEPT)
def _weight(logit: Any, highest: Any, divisor: Any) -> Any:
    """`exp((logit − highest) / divisor)`, and exactly 0 where that is not a normal float32; NaN stays NaN."""
    distance = (logit - highest) / divisor
    return np.float32(0.0) if distance < LOWEST else exp(distance)


@kernel(ANY_ORDER)
def _sum_of_weights(logits_B: Array, highest: Any, divisor: Any) -> Any:
    total = np.float32(0.0)
    for b in range(logits_B.shape[0]):
        total += _weight(logits_B[b], highest, divisor)
    return total


@kernel(ROUNDING_KEPT)
def _token_at(logits_V: Array, highest: Any, divisor: Any, cumulative_K: Array, target: Any) -> Any:
    """The token at which the cumulative weight exceeds the target; `cumulative_K` has it after each block."""
    k = min(np.searchsorted(cumulative_K, target, side="right"), len(cumulative_K) - 1)
    logits_B = logits_V[k * VOCABULARY_BLOCK : (k + 1) * VOCABULARY_BLOCK]
    inside = cumulative_K[k - 1] if k else 0.0
    token = k * VOCABULARY_BLOCK
    for b in range(logits_B.shape[0]):
        weight = np.float64(_weight(logits_B[b], highest, divisor))
        inside += weight
        if weight > 0.0:
            token = k * VOCABULARY_BLOCK + b
            if inside > target:
                break
    return token


@kernel(ROUNDING_KEPT)
def _first_of(logits_V: Array, highest: Any, start: Any) -> Any:
    """The first token from `start` on with the highest logit."""
    token = start
    while token < logits_V.shape[0] - 1 and to_float32(logits_V[token]) != highest:
        token += 1
    return token


@kernel(ROUNDING_KEPT, cached=True)
def draw(
    logits_SV: Array,
    temperatures_S: Array,
    uniforms_S: Array,
    tokens_S: Array,
    logprobs_S: Array,
) -> None:
    """Write the token that inverts the cumulative distribution of each row at its uniform number, and its log-probability.

    A temperature of 0 takes the most probable token, with its log-probability at temperature 1.
    `uniforms_S` is float64, and so far below 1 that a product with it is smaller than the other factor. NaN or infinite logits give a
    log-probability of NaN.
    """
    vocabulary = logits_SV.shape[1]
    blocks = (vocabulary + VOCABULARY_BLOCK - 1) // VOCABULARY_BLOCK
    cumulative_K = np.empty(blocks, np.float64)
    for s in range(logits_SV.shape[0]):
        logits_V, temperature = logits_SV[s], temperatures_S[s]
        divisor = temperature if temperature > 0 else np.float32(1.0)
        highest = highest_score(logits_V)
        total = 0.0
        for k in range(blocks):
            total += _sum_of_weights(
                logits_V[k * VOCABULARY_BLOCK : (k + 1) * VOCABULARY_BLOCK], highest, divisor
            )
            cumulative_K[k] = total
        if temperature > 0:
            token = _token_at(logits_V, highest, divisor, cumulative_K, uniforms_S[s] * total)
        else:
            token = _first_of(logits_V, highest, 0)
        tokens_S[s] = token
        logprobs_S[s] = (logits_V[token] - highest) / divisor - np.float32(np.log(total))


@kernel(ANY_ORDER)
def _write_weights(logits_V: Array, highest: Any, temperature: Any, weights_V: Array) -> Any:
    """Write `exp(z)` with `z = (logit − highest) / temperature`; returns the sums of `exp(z)` and of `z exp(z)`."""
    total, weighted = np.float32(0.0), np.float32(0.0)
    for v in range(logits_V.shape[0]):
        z = (to_float32(logits_V[v]) - highest) / temperature
        weight = np.float32(0.0) if z < LOWEST else exp(z)
        z = LOWEST if z < LOWEST else z  # noqa: FURB136
        weights_V[v] = weight
        total += weight
        weighted += weight * z
    return total, weighted


@kernel(ROUNDING_KEPT, cached=True)
def head_numbers(
    logits_CV: Array,
    temperatures_C: Array,
    targets_C: Array,
    gradient: bool,
    entropy_CV: Array,
    normalisers_C: Array,
    entropies_C: Array,
    likeliest_C: Array,
) -> None:
    """See `triton_kernels.head_numbers`. `targets_C` and `entropy_CV` have no rows where they are not wanted."""
    vocabulary = logits_CV.shape[1]
    weights_V = np.empty(vocabulary, np.float32)
    for c in range(logits_CV.shape[0]):
        logits_V, temperature = logits_CV[c], temperatures_C[c]
        highest, first = np.float32(-np.inf), 0
        for start in range(0, vocabulary, VOCABULARY_BLOCK):
            score = highest_score(logits_V[start : start + VOCABULARY_BLOCK])
            if score > highest:
                highest, first = score, start
        likeliest_C[c] = _first_of(logits_V, highest, first)
        total, weighted = _write_weights(logits_V, highest, temperature, weights_V)
        log_total, inverse = np.log(total), np.float32(1.0) / total
        entropy = log_total - weighted * inverse
        normalisers_C[c], entropies_C[c] = highest / temperature + log_total, entropy
        if entropy_CV.shape[0]:
            entropy_V = entropy_CV[c]
            for v in range(vocabulary):
                z = (to_float32(logits_V[v]) - highest) / temperature
                z = LOWEST if z < LOWEST else z  # noqa: FURB136
                store(entropy_V, v, weights_V[v] * inverse * (z - log_total + entropy))
        if gradient:
            for v in range(vocabulary):
                store(logits_V, v, weights_V[v] * inverse)
            if targets_C.shape[0]:
                target = targets_C[c]
                store(logits_V, target, weights_V[target] * inverse - np.float32(1.0))
