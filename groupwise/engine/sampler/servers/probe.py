"""Checks that a server serves the policy: it completes a few fixed prompts, and its tokens' probabilities must match those computed here.

A server that lists the right adapter name may still have another base, not apply the adapter, or return log-probabilities at another
temperature. Engines round differently, so an exact comparison is impossible. But if two explanations differ by more than the noise, the
answers are close to only one of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Protocol

from groupwise.core.errors import PolicyMismatchError
from groupwise.core.types import RouterShape, SamplingParams

Answer = tuple[Sequence[int], Sequence[int]]
"""A prompt's tokens, and those that followed."""
TEXTS = (
    "The capital of France is",
    "def add(a, b):\n    return",
    "Question: What is 17 + 25?\nAnswer:",
    "1, 2, 3, 4,",
)
PARAMS = SamplingParams(max_tokens=16, temperature=0.7)
"""Without stop tokens, so that the number of tokens is fixed; the temperature is not 1, so that log-probabilities at 1 can be detected."""
SEED = 20
NEGLIGIBLE = 1e-3
"""Difference in nats (root mean square) that needs no explanation."""
CLEARLY = 4.0
"""Factor by which another explanation must be closer."""

NOT_APPLIED = "the adapter"
NOT_PROCESSED = "the temperature"


class LocalPolicy(Protocol):
    """The published weights, as this program has them: their log-probabilities, and what servers need to take them over.

    `groupwise.engine.sampler.servers.local_policy.TorchPolicy` has them in this process.
    """

    @property
    def vocabulary(self) -> int: ...
    @property
    def rank(self) -> int | None: ...
    @property
    def adapts_experts(self) -> bool: ...
    def router_shape(self) -> RouterShape: ...
    def write_by_expert(self, folder: str) -> None: ...
    def read(self, folder: str) -> None: ...
    def fingerprint(self) -> str: ...
    def give_back_memory(self) -> None: ...
    def weight_info(self) -> Mapping[str, Any]: ...
    def ipc_handles(self) -> Mapping[str, Any]: ...
    def pickled_tensors(self) -> str: ...
    def open_group(self, server: str) -> str: ...
    def join_group(self, server: str, world: int, timeout: float) -> None: ...
    def broadcast_weights(self, server: str, timeout: float) -> None: ...
    def close_group(self, server: str) -> None: ...
    def logprobs(
        self,
        answers: Sequence[Answer],
        temperatures: Sequence[float],
        plain: bool = False,
    ) -> list[list[float]]: ...


def check_logprobs(
    server: str,
    name: str,
    answered: Sequence[float],
    expected: Sequence[float],
    alternatives: Mapping[str, Sequence[float]],
    tolerance: float,
) -> None:
    """Raise `PolicyMismatchError` unless the server's log-probabilities match those of the weights here.

    All are of the same tokens, in nats. `alternatives`: expected values if the server left out the step in the key (`NOT_APPLIED`,
    `NOT_PROCESSED`). `tolerance`: the largest accepted mean difference.
    """
    distance = _distance(answered, expected)
    if distance > NEGLIGIBLE:
        for lacking, values in alternatives.items():
            if CLEARLY * _distance(answered, values) < distance:
                raise PolicyMismatchError(
                    f"{server} answers for {name} as the base does without any adapter, so nothing that is learnt would be sampled. "
                    "Start it with --enable-lora and a --max-lora-rank of at least lora.r, and see whether it adapts the layers in "
                    "lora.target_modules."
                    if lacking == NOT_APPLIED
                    else f"{server} gives log-probabilities at temperature 1, whatever it samples at, so ratios would be wrong. Start "
                    "vLLM with --logprobs-mode processed_logprobs, SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB."
                )
    gap = fmean(abs(a - b) for a, b in zip(answered, expected, strict=True))
    if not gap <= tolerance:
        raise PolicyMismatchError(
            f"{server} serves other weights under the name {name} than the learner has: the log-probabilities of {len(answered)} tokens of "
            f"fixed prompts differ by {gap:.3g} nats on average, where sampler.logprob_tolerance is {tolerance:g}. Has it the same base, "
            "revision and number format as model.name?"
        )


def _distance(first: Sequence[float], second: Sequence[float]) -> float:
    return math.sqrt(fmean((a - b) ** 2 for a, b in zip(first, second, strict=True)))
