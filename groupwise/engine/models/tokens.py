"""Converts prompts to token ids, and token ids to the text that rewards receive.

Text prompts are tokenised unchanged: special tokens in them are parsed, no template is applied, and a beginning-of-sequence token is added
only if the model uses one and the text does not start with it. Chat prompts go through the chat template and end at the point where the
model continues (see `chat_template`); special tokens in their messages are plain text (see `control_tokens`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from groupwise.core.errors import TaskError
from groupwise.core.types import Prompt
from groupwise.engine.models.chat_template import Chat, TemplateRefused, prompt_text, refusal
from groupwise.engine.models.control_tokens import pieces

CALL_MARKERS = (
    *("<tool_call>", "</tool_call>"),  # Hermes, Qwen
    "<|python_tag|>",  # Llama 3
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),  # Mistral
)
"""Texts of tokens around tool calls."""


def prompt_ids(
    tokenizer: Any,
    prompt: Prompt,
    tools: Sequence[Any] = (),
    template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[int, ...]:
    """Token ids of a prompt. Raises `TaskError` if it is empty, or if it is a chat and there is no template.

    A chat's template also receives `tools` and `template_kwargs`; for a text prompt they are refused.
    """
    text = rendered_prompt(tokenizer, prompt, tools, template_kwargs)
    return rendered_ids(tokenizer, prompt, text)


def rendered_prompt(
    tokenizer: Any,
    prompt: Prompt,
    tools: Sequence[Any] = (),
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The text of a prompt: its own, or what the template writes for a chat. Arguments and errors as in `prompt_ids`."""
    if not isinstance(prompt, str):
        return prompt_text(tokenizer, Chat(prompt, tools, template_kwargs or {}))
    if tools or template_kwargs:
        raise TaskError(
            f"The row gives {'tools' if tools else 'chat_template_kwargs'} to the chat template, but its prompt is text, to which no "
            "template is applied. Give the prompt as a list of chat messages, or leave the column out."
        )
    return prompt


def rendered_ids(tokenizer: Any, prompt: Prompt, text: str) -> tuple[int, ...]:
    """Token ids of a prompt with this text, as `rendered_prompt` returned it. Raises `TaskError` if there are none."""
    try:
        ids = text_ids(tokenizer, text)
    except TypeError as error:  # invalid Unicode
        if isinstance(prompt, str):
            raise
        raise TemplateRefused(refusal(error, prompt)) from error
    bos: int | None = tokenizer.bos_token_id if isinstance(prompt, str) else None
    if bos is not None and ids[:1] != (bos,):
        adds_first = tokenizer("")["input_ids"][:1] == [bos]
        ids = (bos, *ids) if adds_first else ids
    if not ids:
        raise TaskError("A prompt has no tokens: an empty text cannot be completed.")
    return ids


def text_ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Token ids of a text. Special tokens in it are parsed, except those that `break_control_tokens` has broken; none is added."""
    ids: list[int] = []
    for piece in pieces(text):
        ids += tokenizer(piece, add_special_tokens=False)["input_ids"]
    return tuple(ids)


def completion_text(
    tokenizer: Any, token_ids: Sequence[int], keep: frozenset[int] = frozenset()
) -> str:
    """The completion as text, without special tokens other than those in `keep`, with spaces unchanged."""
    if keep.isdisjoint(token_ids):
        return tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
    texts: list[str] = []
    for kept, run in groupby(token_ids, keep.__contains__):
        texts.append((render_prompt if kept else completion_text)(tokenizer, list(run)))
    return "".join(texts)


def call_markers(tokenizer: Any) -> frozenset[int]:
    """The special tokens with which a model begins or divides tool calls; other models write them as ordinary text."""
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(id for id, token in added if token.special and token.content in CALL_MARKERS)


def render_prompt(tokenizer: Any, ids: Sequence[int]) -> str:
    """A prompt as the model sees it, including special tokens; for display."""
    return tokenizer.decode(list(ids), skip_special_tokens=False)
