"""Rules that all samplers share, without torch: the random number that decides a member's next token, the texts that end a completion,
and errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields

from groupwise.core.errors import NonFiniteError, PolicyMismatchError, RunError, UsageError
from groupwise.core.types import GroupRequest, Policy, SamplingParams

MASK = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits: the splitmix64 finaliser over the seed and the counter (Steele et al. 2014)."""
    z = (seed + (position + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return ((z ^ (z >> 31)) >> 11) / (1 << 53)


TOKENS_BEYOND_STOP = 8
"""Tokens without text (parts of a character, special tokens) that a stop string may contain in addition to its own."""

INCOMPLETE = "\ufffd"
"""The tokenizer's text for a character of which some bytes are still missing."""


def ends_with_stop(
    token_ids: Sequence[int], params: SamplingParams, text_of: Callable[[Sequence[int]], str]
) -> bool:
    """True if the last token completes a stop text; one completed before `min_tokens` does not count.

    A stop text may be spread over several tokens, including tokens without text.
    """
    if not params.stop or len(token_ids) < params.min_tokens:
        return False
    reach = max(len(text.encode()) for text in params.stop) + TOKENS_BEYOND_STOP
    tail = text_of(token_ids[-reach:])
    matches = [text for text in params.stop if text in tail]
    if not matches or not params.min_tokens:
        return bool(matches)
    earlier_text = text_of(token_ids[-reach:-1]).rstrip(INCOMPLETE)
    return any(tail.rfind(text) + len(text) > len(earlier_text) for text in matches)


def refuse_misfit(request: GroupRequest, key_length: int) -> None:
    """Raise `RunError` for an empty prompt or completion, or if both together exceed the sampler's key length."""
    if not request.prompt_ids or request.params.max_tokens < 1:
        raise RunError(
            f"A prompt of {len(request.prompt_ids)} tokens and a completion of at most "
            f"{request.params.max_tokens}; both need at least one."
        )
    needed = len(request.prompt_ids) + request.params.max_tokens
    if needed > key_length:
        raise RunError(
            f"A prompt of {len(request.prompt_ids)} tokens with {request.params.max_tokens} new ones needs "
            f"{needed} positions, but the sampler was laid out for {key_length}."
        )


def refuse_long_prompt(prompt_ids: Sequence[int], key_length: int) -> None:
    """Raise `RunError` for an empty prompt, or one that exceeds the sampler's key length by itself."""
    if not 1 <= len(prompt_ids) <= key_length:
        raise RunError(
            f"A prompt of {len(prompt_ids)} tokens; it needs at least one, and the sampler was laid out for {key_length}."
        )


def refuse_changed_draws(request: GroupRequest, engine: str) -> None:
    """Raise `UsageError` for what only some samplers have: changed logits, and the most probable tokens in addition to the drawn one."""
    processing = request.params.processing
    changes = [] if processing is None else [
        field.name for field in fields(processing) if getattr(processing, field.name) != field.default
    ]  # fmt: skip
    if request.top_logprobs:
        changes.append("top_logprobs")
    if changes:
        raise UsageError(
            f"{', '.join(changes)} is not supported by {engine}, which draws from the model's own logits and gives the log-probability of "
            "the drawn token alone. Leave it out, or sample with sampler.engine torch or vllm."
        )


def refuse_other_weights(policy: Policy, fingerprint: str) -> None:
    """Raise `PolicyMismatchError` if the loaded weights have another fingerprint than the published ones."""
    if fingerprint != policy.fingerprint:
        raise PolicyMismatchError(
            f"{policy.run}@{policy.version} was published with the fingerprint {policy.fingerprint}, but the files in "
            f"{policy.path} have {fingerprint}. Someone else wrote there, or the disk is damaged."
        )


def not_finite(version: int) -> NonFiniteError:
    """The error for logits that are NaN or infinite."""
    return NonFiniteError(
        f"The model's logits are not finite (policy version {version}), so nothing can be drawn from them. "
        "Lower the learning rate (training.learning_rate), or try model.dtype=float32."
    )
