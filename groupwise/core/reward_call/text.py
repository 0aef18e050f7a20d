"""Gets the text of a completion in either form: text for string prompts, messages for chat prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from groupwise.core.reward_call.tags import Tag, opened_reasoning
from groupwise.core.types import Message, Prompt

CompletionText = str | list[Message]
"""A completion as reward functions receive it: text, or the assistant's messages if the prompt is a chat."""


def completion_text(completion: CompletionText) -> str:
    """The text of a completion; of several messages, the assistant's ones, joined by line breaks."""
    if isinstance(completion, str):
        return completion
    assistants = [m for m in completion if m.get("role", "assistant") == "assistant"]
    texts: list[str] = []
    for message in assistants:
        content: Any = message.get("content")
        if not isinstance(content, str):  # parts, some of them text; None for tool calls
            parts = cast("Sequence[Mapping[str, Any]]", content or ())
            content = "".join(part["text"] for part in parts if part.get("type") == "text")
        texts.append(content)
    return "\n".join(texts)


def completion_texts(
    completions: Sequence[CompletionText], columns: Mapping[str, Any], *reasoning: Tag
) -> list[str]:
    """The texts of completions, with the reasoning that the prompt opened. `columns`: the reward's other arguments (`prompts`, …).

    A prompt, or the text that the chat template adds after it, may end with a reasoning tag that it opens for the assistant (a tag that
    models use, or one of `reasoning`). The end of the prompt from that tag on is then put before the completion.
    """
    texts = [completion_text(completion) for completion in completions]
    prompts = columns.get("prompts") or [""] * len(texts)
    prompts_seen = columns.get("prompts_seen") or prompts
    return [
        (opened_reasoning(prompt, *reasoning) or opened_reasoning(prompt_seen, *reasoning)) + text
        for prompt, prompt_seen, text in zip(prompts, prompts_seen, texts, strict=True)
    ]


def as_completion(prompt: Prompt, text: str) -> CompletionText:
    """`text` in the form that matches the prompt: text, or a list with one message."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
