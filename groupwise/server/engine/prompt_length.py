"""Refuses prompts that are too long by their characters alone, before they are tokenised.

Tokenising a megabyte takes seconds. No token has more characters than the vocabulary's longest one, so a text with more characters
than `longest prompt × longest token` has too many tokens in any case. The HTTP side checks it first, so such a prompt never reaches the
engine; the engine checks the messages as its chat template reads them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from groupwise.core.types import Prompt
from groupwise.server.engine.engine_protocol import WrongOrder

LONG = 1 << 16
"""Characters above which a prompt is tokenised in a thread, so that other requests go on."""


def texts_of(prompt: Prompt) -> list[str]:
    """The texts of a prompt as a client sent it: itself, or the contents of its messages, text parts included."""
    if isinstance(prompt, str):
        return [prompt]
    texts: list[str] = []
    for message in prompt:
        content = message.get("content")
        if isinstance(content, str):
            texts.append(content)
        elif isinstance(content, list):
            parts = cast("list[dict[str, Any]]", content)
            texts += [part["text"] for part in parts if isinstance(part.get("text"), str)]
    return texts


def count_characters(texts: Iterable[str], longest: int, most: int) -> int:
    """The number of characters. Raises WrongOrder if it is above `most`, which `longest` tokens never exceed."""
    count = sum(map(len, texts))
    if count > most:
        raise WrongOrder(
            f"The prompt has {count:,} characters, and this run takes at most {longest} tokens (max_prompt_length), which are "
            f"never more than {most:,} characters. Shorten it, or start the run with a higher one.",
            "prompt",
            "prompt_too_long",
        )
    return count
