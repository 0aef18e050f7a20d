"""From prompts to token ids and from token ids to the text that rewards see.

Text prompts are tokenised as they stand: special tokens in them are parsed, no template is applied, and a beginning-of-sequence
token is added only where the model wants one and the text does not begin with it. Chat prompts go through the chat template
and end where the assistant's answer begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from groupwise.errors import TaskError
from groupwise.types import Message, Prompt


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


def rendered(tokenizer: Any, prompt: Prompt) -> str:
    """The prompt as the model sees it, special tokens included; for people."""
    return tokenizer.decode(list(prompt_ids(tokenizer, prompt)), skip_special_tokens=False)


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
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise TaskError(
            f"The chat template of the model refuses a prompt with the roles {roles}: {error}\n"
            "Give messages that it takes (many know no system role, or want user and assistant in turns), or another "
            "template as model.chat_template."
        ) from error
