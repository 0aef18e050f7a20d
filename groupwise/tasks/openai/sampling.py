"""The sampling settings of one request, in the terms of the sampler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from groupwise.core.types import LogitsProcessing

OrderField = Literal[
    "prompt",
    "prompt_ids",
    "max_tokens",
    "min_tokens",
    "temperature",
    "stop_token_ids",
    "logit_bias",
    "json_schema",
    "tool_calls",
]
"""The fields of a request that an error can name as the cause."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings of one request; None means the run's own setting."""

    temperature: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a completion, in addition to the run's."""
    ignore_eos: bool = False
    """True if the run's own stop tokens do not end a completion."""
    processing: LogitsProcessing | None = None
    """Allowed only if the group is not trained on."""
    top_p: float | None = None
    """Like `top_k` and `min_p`, allowed only if the group is not trained on."""
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    """Replaces the seeds derived from the draw: the same seed gives the same completions for any draw."""
