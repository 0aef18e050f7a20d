"""Texts that end a completion: they may be spread over several tokens, including tokens without text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from groupwise.core.types import SamplingParams

TOKENS_BEYOND_STOP = 8
"""Tokens without text (half characters, special tokens) that a stop string may be spread over, beside its own."""

INCOMPLETE = "\ufffd"
"""The tokenizer's text for a character of which only some bytes are there yet."""


def ends_with_stop(
    token_ids: Sequence[int], params: SamplingParams, text_of: Callable[[Sequence[int]], str]
) -> bool:
    """True if a stop text ends with the last token; after one that came before `min_tokens` only another occurrence counts."""
    if not params.stop or len(token_ids) < params.min_tokens:
        return False
    reach = max(len(text.encode()) for text in params.stop) + TOKENS_BEYOND_STOP
    tail = text_of(token_ids[-reach:])
    found = [text for text in params.stop if text in tail]
    if not found or not params.min_tokens:
        return bool(found)
    before = text_of(token_ids[-reach:-1]).rstrip(INCOMPLETE)
    return any(tail.rfind(text) + len(text) > len(before) for text in found)
