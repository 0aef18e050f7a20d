"""Gets the text of a completion in either form: text for string prompts, messages for chat prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from groupwise.core.reward_call.tags import Tag, opened_reasoning
from groupwise.core.types import Message, Prompt

CompletionText = str | list[Message]
"""A completion as reward functions get it: text, or the assistant's messages where the prompt is a chat."""


def completion_text(completion: CompletionText) -> str:
    """The text of a completion; of several messages, those of the assistant, one below the other."""
    if isinstance(completion, str):
        return completion
    assistants = [m for m in completion if m.get("role", "assistant") == "assistant"]
    texts: list[str] = []
    for message in assistants:
        content: Any = message.get("content")
        if not isinstance(content, str):  # parts, some of them text; none if it only calls tools
            parts = cast("Sequence[Mapping[str, Any]]", content or ())
            content = "".join(part["text"] for part in parts if part.get("type") == "text")
        texts.append(content)
    return "\n".join(texts)


def completion_texts(
    completions: Sequence[CompletionText], columns: Mapping[str, Any], *reasoning: Tag
) -> list[str]:
    """The texts of completions as a reward gets them with its other `columns`, `prompts` and `prompts_seen` among these.

    Where a prompt, or what the chat template puts behind it, ends with reasoning that it opens for the assistant (in a tag that models
    use, or one of `reasoning`), its end from that tag on stands before the completion.
    """
    texts = [completion_text(each) for each in completions]
    prompts = columns.get("prompts") or [""] * len(texts)
    seen = columns.get("prompts_seen") or prompts
    return [
        (opened_reasoning(prompt, *reasoning) or opened_reasoning(whole, *reasoning)) + text
        for prompt, whole, text in zip(prompts, seen, texts, strict=True)
    ]


def as_completion(prompt: Prompt, text: str) -> CompletionText:
    """`text` in the form that belongs to the prompt's."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
