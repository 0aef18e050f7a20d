"""Control tokens that stand in messages are text: who writes `<|im_end|>` ends no turn, be it a user, a tool or a policy.

A chat template writes control tokens as text, too, and a tokenizer reads both alike. So before a template sees a message, each control
token in it is broken by a character that no text has (`spelled`), and the tokenizer gets what was rendered in the pieces between.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

BREAK = "\ufdd0"
"""A code point that Unicode has set apart for use within programs; it never stands in a text."""
LOOKS_LIKE_CONTROL = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)
"""Of added tokens that are not called special: `<｜User｜>` is one, `<think>` none."""
_PATTERN = "_groupwise_control_tokens"
"""The attribute of a tokenizer that keeps what was found in its tables."""


def special_texts(tokenizer: Any) -> tuple[str, ...]:
    """The texts of all special tokens, end tokens among them."""
    added = tokenizer.added_tokens_decoder.values()
    return (*tokenizer.all_special_tokens, *(token.content for token in added if token.special))


def spelled(tokenizer: Any, value: Any) -> Any:
    """The same, with all control tokens in its texts broken; lists and mappings through and through, but for their keys."""
    pattern = getattr(tokenizer, _PATTERN, None)
    if pattern is None:
        added = (token.content for token in tokenizer.added_tokens_decoder.values())
        texts = {*special_texts(tokenizer), *filter(LOOKS_LIKE_CONTROL.fullmatch, added)}
        longest_first = sorted((text for text in texts if len(text) > 1), key=len, reverse=True)
        pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        setattr(tokenizer, _PATTERN, pattern)
    return _spelled(pattern, value)


def _spelled(pattern: re.Pattern[str], value: Any) -> Any:
    if isinstance(value, str):
        return pattern.sub(lambda found: found[0][0] + BREAK + found[0][1:], value)
    if isinstance(value, Mapping):
        return {
            key: _spelled(pattern, each) for key, each in cast("Mapping[Any, Any]", value).items()
        }
    if isinstance(value, list | tuple):
        return [_spelled(pattern, each) for each in cast("Sequence[Any]", value)]
    return value


def pieces(text: str) -> list[str]:
    """What is tokenised one after the other, so that nothing broken becomes a control token again."""
    return text.split(BREAK)
