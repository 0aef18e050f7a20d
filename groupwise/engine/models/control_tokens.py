"""Treats control tokens in messages as text: a user, a tool or a policy that writes `<|im_end|>` does not end a turn.

A chat template writes control tokens as text as well, and a tokenizer cannot tell the two apart. So before a template receives a message,
each control token in it is broken by a character that occurs in no text (`break_control_tokens`). The tokenizer then gets the rendered
text in pieces, split at these characters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

BREAK = "\ufdd0"
"""A Unicode noncharacter, reserved for internal use by programs; it occurs in no text."""
LOOKS_LIKE_CONTROL = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)
"""Matches control tokens among added tokens that are not marked special: `<｜User｜>` is one, `<think>` is not."""
OF_TOOLS = ("tool", "function", "ipython")
"""Roles of messages written by tools."""
_PATTERNS = "_groupwise_control_tokens"
"""Attribute of a tokenizer that caches the control tokens found for its template."""


def special_texts(tokenizer: Any) -> tuple[str, ...]:
    """The texts of all special tokens, including end tokens."""
    added = tokenizer.added_tokens_decoder.values()
    return (*tokenizer.all_special_tokens, *(token.content for token in added if token.special))


def break_control_tokens(tokenizer: Any, value: Any, *, of_tool: bool = False) -> Any:
    """The value with all control tokens in its texts broken, at any depth of lists and mappings.

    `of_tool`: in a tool's output every token that the template writes is broken, such as `</tool_response>`; other texts may use
    `<think>`.
    """
    patterns = getattr(tokenizer, _PATTERNS, None)
    if patterns is None or patterns[0] != tokenizer.chat_template:
        added = [token.content for token in tokenizer.added_tokens_decoder.values()]
        control = {*special_texts(tokenizer), *filter(LOOKS_LIKE_CONTROL.fullmatch, added)}
        written = {text for text in added if text.strip() and text in str(tokenizer.chat_template)}
        patterns = (tokenizer.chat_template, _any_of(control), _any_of(control | written))
        setattr(tokenizer, _PATTERNS, patterns)
    return _break_texts(patterns[2 if of_tool else 1], value)


def _any_of(texts: set[str]) -> re.Pattern[str]:
    longest_first = sorted((text for text in texts if len(text) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _break_texts(pattern: re.Pattern[str], value: Any) -> Any:
    if isinstance(value, str):
        return pattern.sub(lambda match: match[0][0] + BREAK + match[0][1:], value)
    if isinstance(value, Mapping):
        return {
            _break_texts(pattern, key): _break_texts(pattern, item)
            for key, item in cast("Mapping[Any, Any]", value).items()
        }
    if isinstance(value, list | tuple):
        return [_break_texts(pattern, item) for item in cast("Sequence[Any]", value)]
    return value


def pieces(text: str) -> list[str]:
    """Split a text at its breaks. Each part is tokenised by itself, so that no broken control token becomes one again."""
    return text.split(BREAK)
