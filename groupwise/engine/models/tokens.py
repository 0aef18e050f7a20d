"""Converts prompts to token ids, and token ids to the text that rewards receive.

Text prompts are tokenised unchanged: special tokens in them are parsed, no template is applied, and a beginning-of-sequence token is added
only if the model uses one and the text does not start with it. Chat prompts go through the chat template and end at the point where the
model continues (see `chat_template`); special tokens in their messages are plain text (see `control_tokens`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from groupwise.core.errors import TaskError
from groupwise.core.types import Prompt
from groupwise.engine.models.chat_template import Chat, TemplateRefused, prompt_text, refusal
from groupwise.engine.models.control_tokens import pieces


def prompt_ids(
    tokenizer: Any,
    prompt: Prompt,
    tools: Sequence[Any] = (),
    template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[int, ...]:
    """Token ids of a prompt. Raises `TaskError` if it is empty, or if it is a chat and there is no template.

    A chat's template also receives `tools` and `template_kwargs`; for a text prompt they are refused.
    """
    if isinstance(prompt, str):
        if tools or template_kwargs:
            raise TaskError(
                f"The row gives {'tools' if tools else 'chat_template_kwargs'} to the chat template, but its prompt is text, to which no "
                "template is applied. Give the prompt as a list of chat messages, or leave the column out."
            )
        ids = text_ids(tokenizer, prompt)
        bos: int | None = tokenizer.bos_token_id
        if bos is not None and ids[:1] != (bos,):
            adds_first = tokenizer("")["input_ids"][:1] == [bos]
            ids = (bos, *ids) if adds_first else ids
    else:
        chat = Chat(prompt, tools, template_kwargs or {})
        text = prompt_text(tokenizer, chat)
        try:
            ids = text_ids(tokenizer, text)
        except TypeError as error:  # invalid Unicode
            raise TemplateRefused(refusal(error, chat.messages)) from error
    if not ids:
        raise TaskError("A prompt has no tokens: an empty text cannot be completed.")
    return ids


def text_ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Token ids of a text. Special tokens in it are parsed, except those that `break_control_tokens` has broken; none is added."""
    return tuple(
        token
        for piece in pieces(text)
        for token in tokenizer(piece, add_special_tokens=False)["input_ids"]
    )


def completion_text(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """The completion as text, without special tokens, with spaces unchanged."""
    return tokenizer.decode(
        list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


def render_prompt(tokenizer: Any, ids: Sequence[int]) -> str:
    """A prompt as the model sees it, including special tokens; for display."""
    return tokenizer.decode(list(ids), skip_special_tokens=False)
