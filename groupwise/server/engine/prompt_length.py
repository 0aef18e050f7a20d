"""Refuses prompts that are too long by their characters alone, before they are tokenised.

Tokenising a megabyte takes seconds. No token has more characters than the vocabulary's longest one, so a text with more characters
than `longest prompt × longest token` has too many tokens in any case. The HTTP side checks it first, so such a prompt never reaches the
engine; the engine checks the messages as its chat template reads them, and the text that the template makes of them.
"""

from __future__ import annotations

from typing import Any, cast

from groupwise.core.types import Prompt
from groupwise.server.engine.engine_protocol import WrongOrder

LONG = 1 << 16
"""Characters of a prompt's JSON above which it is rendered and tokenised in a thread, so that other requests go on."""


def texts_of(prompt: Prompt) -> list[str]:
    """The texts of a prompt as a client sent it that are in any case part of it: itself, or what its messages hold, as text or in parts,
    and the names in their calls of tools.
    """
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
        calls = message.get("tool_calls")
        for call in cast("list[Any]", calls) if isinstance(calls, list) else ():
            match call:
                case {"function": {"name": str(name)}} | {"name": str(name)}:
                    texts.append(name)
                case _:
                    pass
    return texts


def check_characters(*texts: str, longest: int, most: int) -> None:
    """Raise WrongOrder if the texts have more than `most` characters together, which `longest` tokens never exceed."""
    if (count := sum(map(len, texts))) > most:
        raise WrongOrder(
            f"The prompt has {count:,} characters, and this run takes at most {longest} tokens (max_prompt_length), which are "
            f"never more than {most:,} characters. Shorten it, or start the run with a higher one.",
            "prompt",
            "prompt_too_long",
        )
