"""Marks the tokens of a conversation that the assistant wrote. It compares the lengths of renders and never searches for token ids.

For each assistant turn the conversation is rendered twice: up to the turn, as a prompt that asks for it, and up to and including the
turn. The second render starts with the first; the rest is the turn, including its end token. So a turn is trained after exactly the
tokens that the model sees when it is asked for that turn. If a template marks the assistant's words itself (`{% generation %}`), its
marks are used instead. If the prompt contains a turn's first words (a prefill), only the words after them are trained, after the tokens
of that prompt.

Some templates rewrite earlier turns as a conversation grows: they drop thinking, or move a tool list. A later turn then follows other
tokens than an earlier turn was written in, and the two cannot share a row, so a new row starts. If nothing is rewritten, all turns are
in one row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from groupwise.core.errors import TaskError
from groupwise.engine.models.chat_template import (
    PROBE,
    Chat,
    TemplateRefused,
    apply,
    assistant_header,
    prompt_text,
    render,
    template_of,
)
from groupwise.engine.models.control_tokens import break_control_tokens, special_texts
from groupwise.engine.models.tokens import prompt_ids, text_ids

MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
REASONING = {"reasoning_content", "reasoning", "thinking"}
"""Keys of a message that templates read as reasoning."""
MAX_CHARACTERS_IN_MESSAGE = 40
"""Longest excerpt of a text in an error message, in characters."""


@dataclass(frozen=True, slots=True)
class MaskedRow:
    """A token sequence; the mask is 1 for tokens that are trained."""

    ids: tuple[int, ...]
    mask: tuple[int, ...]
    ends: int = 0
    """Number of trained stretches that close with an end token, after which the model stops."""
    stretches: int = 1
    """Number of trained stretches: turns, or one completion."""


def assistant_turns(chat: Chat) -> list[int]:
    """Indices of the assistant's messages."""
    return [n for n, message in enumerate(chat.messages) if message["role"] == "assistant"]


def mask_turns(
    tokenizer: Any, chat: Chat, turns: Sequence[int], prefills: Mapping[int, str] | None = None
) -> list[MaskedRow]:
    """The conversation up to the last of these turns, in as few rows as its template allows, with the turns trained.

    `prefills` maps a turn to its first words if its prompt contains them.

    If the conversation starts with an assistant turn, that turn has no prompt. It is context and not trained, unless the template marks
    the assistant's words. Raises `TemplateRefused` if it is the only turn or the template refuses the messages, and `TaskError` if no
    mask can be right.
    """
    rows: list[MaskedRow] = []
    marked = MARKS.search(template_of(tokenizer, chat))
    for turn in turns if marked else [turn for turn in turns if turn] or turns:
        prefill = (prefills or {}).get(turn)
        row = (
            _rest_of_turn(tokenizer, chat, turn, prefill)
            if prefill
            else _mask_turn(tokenizer, chat, turn)
        )
        if rows and row.ids[: len(rows[-1].ids)] == rows[-1].ids:
            shorter = rows.pop()  # the new row extends it: merge both masks into one row
            rest = (0,) * (len(row.ids) - len(shorter.ids))
            mask = tuple(max(pair) for pair in zip(shorter.mask + rest, row.mask, strict=True))
            ends, stretches = shorter.ends + row.ends, shorter.stretches + row.stretches
            row = MaskedRow(row.ids, mask, ends, stretches)
        rows.append(row)
    return rows


def mask_whole_chat(tokenizer: Any, chat: Chat) -> MaskedRow:
    """The whole conversation, with every token trained."""
    ids = text_ids(tokenizer, _render_turns(tokenizer, chat, len(chat.messages), ask=False))
    return MaskedRow(ids, (1,) * len(ids), ends=_count_end(tokenizer, ids))


def mask_text(tokenizer: Any, text: str) -> MaskedRow:
    """A text with its end token, with every token trained."""
    ids = prompt_ids(tokenizer, _with_end_token(tokenizer, text))
    return MaskedRow(ids, (1,) * len(ids), ends=_count_end(tokenizer, ids))


def mask_completion(
    tokenizer: Any, prompt: str, completion: str, *, train_prompt: bool
) -> MaskedRow:
    """A completion and its end token after a prompt, both text; `train_prompt` trains the prompt too."""
    prompt_tokens = prompt_ids(tokenizer, prompt)
    completion_tokens = _tokens_after(
        tokenizer,
        prompt,
        text_ids(tokenizer, prompt),
        _with_end_token(tokenizer, prompt + completion),
    )
    mask = (int(train_prompt),) * len(prompt_tokens) + (1,) * len(completion_tokens)
    return MaskedRow(
        prompt_tokens + completion_tokens, mask, ends=_count_end(tokenizer, completion_tokens)
    )


def _mask_turn(tokenizer: Any, chat: Chat, turn: int) -> MaskedRow:
    """The conversation up to one assistant turn, with only that turn trained."""
    if MARKS.search(template_of(tokenizer, chat)):
        return _marked_turn(tokenizer, chat, turn)
    if turn == 0:
        raise TemplateRefused(
            "the conversation begins with the assistant, so nothing asks for its first turn. Begin it with a user message, "
            "or leave that turn out."
        )
    asked_text = _render_turns(tokenizer, chat, turn, ask=True)
    full_text = _render_turns(tokenizer, chat, turn + 1, ask=False)
    if not full_text.startswith(asked_text):
        if chat.messages[turn - 1]["role"] == "assistant":
            raise TemplateRefused(
                "two turns of the assistant follow each other, and the chat template renders the first differently before the second. "
                "Make them one turn, or leave one out."
            )
        common = _common_prefix_length(asked_text, full_text)
        raise TaskError(
            f"message {turn} (assistant): the chat template writes the conversation differently once the turn is there. Where "
            f"the prompt goes on with {_short_repr(asked_text[common:])}, it writes {_short_repr(full_text[common:])}, so the model would "
            "be trained after other tokens than it is asked with. Give the row as `prompt` and `completion` texts, give what the template "
            "misses (a thinking model wants the turn's `reasoning_content`), or give as model.chat_template a template that "
            "does not do so, or that marks the assistant's words with {% generation %}."
        )
    if asked_text == _render_turns(tokenizer, chat, turn, ask=False):
        header = assistant_header(tokenizer, replace(chat, messages=chat.messages[:turn])) or ""
        asked_text += header if header.strip() and full_text.startswith(asked_text + header) else ""
    opening = text_ids(tokenizer, asked_text)
    turn_text = _tokens_after(tokenizer, asked_text, opening, full_text)
    stripped = _without_space_after_end(tokenizer, full_text)
    closed = (
        turn_text
        if stripped == full_text
        else _tokens_after(tokenizer, asked_text, opening, stripped)
    )
    end = len(closed) if turn_text[: len(closed)] == closed else len(turn_text)
    mask = (0,) * len(opening) + (1,) * end + (0,) * (len(turn_text) - end)
    return MaskedRow(opening + turn_text, mask, ends=_count_end(tokenizer, turn_text[:end]))


def _rest_of_turn(tokenizer: Any, chat: Chat, turn: int, prefill: str) -> MaskedRow:
    """The conversation up to one assistant turn. The turn is trained after its first words, including the template's end of a turn."""
    messages = [*chat.messages[:turn], {"role": "assistant", "content": prefill}]
    asked_text = prompt_text(tokenizer, replace(chat, messages=messages))
    message = chat.messages[turn]
    if message.keys() & REASONING:
        raise TemplateRefused(
            "the prompt begins a turn whose reasoning is given apart, so which words come first cannot be told. Write the reasoning into "
            "the completion."
        )
    probe = [*chat.messages[:turn], {**message, "content": PROBE}]
    _, marker, end = render(tokenizer, replace(chat, messages=probe), ask=False).rpartition(PROBE)
    if not marker:
        raise TemplateRefused(
            f"the chat template does not write what message {turn} (assistant) says."
        )
    full_text = (
        asked_text + break_control_tokens(tokenizer, message["content"].removeprefix(prefill)) + end
    )
    opening = text_ids(tokenizer, asked_text)
    tail = _tokens_after(
        tokenizer, asked_text, opening, _without_space_after_end(tokenizer, full_text)
    )
    return MaskedRow(
        opening + tail, (0,) * len(opening) + (1,) * len(tail), _count_end(tokenizer, tail)
    )


def _marked_turn(tokenizer: Any, chat: Chat, turn: int) -> MaskedRow:
    """The turn as the template marks it. Marks of earlier turns are ignored: those turns have their own rows, or are merged later."""
    messages = list(chat.messages[: turn + 1])
    if break_control_tokens(tokenizer, messages) != messages:
        raise TemplateRefused(
            "a message holds a control token of the model, which would be read as one: the tokens of templates with {% generation %} marks "
            "are made by transformers. Leave it out, or give a template without marks as model.chat_template."
        )
    marked = apply(
        tokenizer,
        replace(chat, messages=messages),
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    ids, marks = tuple(marked["input_ids"]), marked["assistant_masks"]
    earlier = text_ids(tokenizer, _render_turns(tokenizer, chat, turn, ask=False)) if turn else ()
    start = _common_prefix_length(ids, earlier)
    mask = tuple(mark if index >= start else 0 for index, mark in enumerate(marks))
    if not any(mask):
        raise TaskError(
            f"the chat template has {{% generation %}} marks, but marks nothing of message {turn}. Fix the template, or give "
            "one as model.chat_template."
        )
    last = max(index for index, mark in enumerate(mask) if mark)
    return MaskedRow(ids, mask, ends=_count_end(tokenizer, ids[: last + 1]))


def _render_turns(tokenizer: Any, chat: Chat, count: int, *, ask: bool) -> str:
    """The first `count` messages as text; `ask` adds the assistant header, after which the model answers."""
    return render(tokenizer, replace(chat, messages=chat.messages[:count]), ask=ask)


def _tokens_after(
    tokenizer: Any, prefix: str, opening: tuple[int, ...], text: str
) -> tuple[int, ...]:
    """The tokens of `text` after `prefix`, whose tokens are `opening`.

    If tokenising the whole text would merge characters across the border, the two parts are tokenised separately, because the model is
    prompted with the tokens of `prefix`.
    """
    ids = text_ids(tokenizer, text)
    if ids[: len(opening)] == opening:
        return ids[len(opening) :]
    tail = text_ids(tokenizer, text[len(prefix) :])
    if tokenizer.decode([*opening, *tail]) != tokenizer.decode(list(ids)):
        raise TaskError(
            f"the text {_short_repr(text[len(prefix) :])} cannot be tokenised separately from the text before it, "
            f"{_short_repr(prefix[-MAX_CHARACTERS_IN_MESSAGE:])}: the parts make another text. Let the completion begin with a "
            "space or a line break."
        )
    return tail


def _without_space_after_end(tokenizer: Any, text: str) -> str:
    """Remove the line break that templates write after an end token. The model stops at the token, so it never writes the break."""
    stripped = text.rstrip()
    return stripped if stripped.endswith(special_texts(tokenizer)) else text


def _with_end_token(tokenizer: Any, text: str) -> str:
    """The text with the model's end token exactly once."""
    end = tokenizer.eos_token
    return text if end is None or text.endswith(end) else text + end


def _count_end(tokenizer: Any, ids: Sequence[int]) -> int:
    """1 if the last of these tokens is one that can end a text, else 0."""
    ends = tokenizer.convert_tokens_to_ids(list(special_texts(tokenizer)))
    return int(bool(ids) and ids[-1] in ends)


def _common_prefix_length(first: Sequence[object], second: Sequence[object]) -> int:
    """Length of the common prefix of two sequences."""
    pairs = zip(first, second, strict=False)
    differences = (index for index, (one, other) in enumerate(pairs) if one != other)
    return next(differences, min(len(first), len(second)))


def _short_repr(text: str) -> str:
    return repr(
        text[:MAX_CHARACTERS_IN_MESSAGE] + ("…" if len(text) > MAX_CHARACTERS_IN_MESSAGE else "")
    )
