"""What a completion says, whichever form it comes in: text for string prompts, messages for chat prompts."""

from __future__ import annotations

from groupwise.types import Message, Prompt

CompletionText = str | list[Message]
"""A completion as reward functions get it: text, or the assistant's messages where the prompt is a chat."""


def completion_text(completion: CompletionText) -> str:
    """The text of a completion; of several messages, those of the assistant, one below the other."""
    if isinstance(completion, str):
        return completion
    written = [
        m.get("content") or "" for m in completion if m.get("role", "assistant") == "assistant"
    ]
    return "\n".join(written)


def as_completion(prompt: Prompt, text: str) -> CompletionText:
    """`text` in the form that belongs to the prompt's."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
