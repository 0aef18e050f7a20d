"""From prompts to token ids and from token ids to the text that rewards see.

Text prompts are tokenised as they stand: special tokens in them are parsed, no template is applied, and a beginning-of-sequence
token is added only where the model wants one and the text does not begin with it. Chat prompts go through the chat template
and end where the assistant's answer begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from groupwise.errors import TaskError
from groupwise.types import Message, Prompt

PROBE = "⟦words⟧"
"""Stands for the assistant's words where a render is to show what comes before them."""


def prompt_ids(tokenizer: Any, prompt: Prompt) -> tuple[int, ...]:
    """Token ids of a prompt. Raises `TaskError` if it is empty or there is no template for a chat prompt."""
    ids = _text_ids(tokenizer, prompt) if isinstance(prompt, str) else _chat_ids(tokenizer, prompt)
    if not ids:
        raise TaskError("A prompt has no tokens: an empty text cannot be completed.")
    return tuple(ids)


def completion_text(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """The completion as text, special tokens left out, spaces as they were written."""
    return tokenizer.decode(
        list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


def rendered(tokenizer: Any, ids: Sequence[int]) -> str:
    """A prompt as the model sees it, special tokens included; for people."""
    return tokenizer.decode(list(ids), skip_special_tokens=False)


def refusal(error: Exception, messages: Sequence[Message]) -> str:
    """Why a chat template made no text or no tokens of messages: no valid Unicode, a broken template, or not what it takes."""
    if (odd := _no_unicode(messages)) is not None:
        return (
            f"a message has the character {odd!a}, half of a surrogate pair, which is no valid Unicode. Leave it out, or decode the "
            "text anew where it comes from."
        )
    reason, line = str(error).rstrip(". \n"), getattr(error, "lineno", None)
    if line is not None:  # only errors of its syntax carry one
        return (
            f"the chat template of the model does not parse: {reason} (line {line} of the template). Mend it, or give "
            "another one as model.chat_template."
        )
    roles = ", ".join(str(message.get("role")) for message in messages)
    return (
        f"the chat template of the model refuses messages with the roles {roles}: {reason}. Give messages that it takes "
        "(many know no system role, or want user and assistant in turns), or another template as model.chat_template."
    )


def _no_unicode(messages: Sequence[Message]) -> str | None:
    """The first character that no encoding can write; None where there is none."""
    texts = (str(value) for message in messages for value in message.values())
    return next((char for text in texts for char in text if "\ud800" <= char <= "\udfff"), None)


def unannounced(tokenizer: Any, prompt: Prompt) -> str | None:
    """What to warn of where the chat template does not tell the model that it is its turn; None where it does."""
    if isinstance(prompt, str):
        return None
    header = ""
    with suppress(Exception):  # a template may refuse what was not asked for
        answer = {"role": "assistant", "content": PROBE}
        bare = tokenizer.apply_chat_template(prompt, tokenize=False)
        asked = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        told = tokenizer.apply_chat_template([*prompt, answer], tokenize=False)
        header = told.removeprefix(asked).partition(PROBE)[0] if asked == bare else ""
    if not header.strip():
        return None
    return (
        f"the chat template writes {header!r} before an answer, but not at the end of a prompt, so the model is not told "
        "that it is its turn. Let the template honour add_generation_prompt, or give another one as model.chat_template"
    )


def _text_ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    first: int | None = tokenizer.bos_token_id
    if first is None or ids[:1] == [first] or tokenizer("")["input_ids"][:1] != [first]:
        return ids
    return [first, *ids]


def _chat_ids(tokenizer: Any, messages: list[Message]) -> list[int]:
    if not tokenizer.chat_template:
        raise TaskError(
            "The prompt is a list of chat messages, but the model's tokenizer has no chat template. "
            "Give text prompts, or a template file as model.chat_template."
        )
    try:
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except (
        Exception
    ) as error:  # a template is a program of the model's makers and raises what it likes
        told = refusal(error, messages)
        raise TaskError(told[0].upper() + told[1:]) from error
