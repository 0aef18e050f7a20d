"""SFT rows in any of the common forms, as checked examples.

    messages                   a conversation; also with `tools` and `chat_template_kwargs`
    prompt, completion         both text, or both messages, or messages and a text
    text                       (or the column that `dataset_text_field` names) trained whole
    input_ids, labels          tokens; labels -100 are not trained (or `completion_mask`, `assistant_masks`; without: trained whole)

A formatting function turns rows of any other form into text or messages first. A row is read in the first form whose columns it
has: tokens, then messages, prompt and completion, text. Tokenisation happens elsewhere, where the tokenizer is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from groupwise.api.schemas.template_columns import ARGUMENTS, for_template
from groupwise.core.errors import TaskError
from groupwise.core.types import Example, Message, Prompt, number_of
from groupwise.tasks.data.examples import checked_prompt
from groupwise.tasks.data.messages import (
    Unusable,
    begun_words,
    join_conversation,
    messages_in,
    messages_of,
    named_messages,
)

IGNORED = -100
"""Label of a token that is not trained."""

MASKS = ("completion_mask", "assistant_masks")
HOLDING = "`messages`, `prompt` and `completion`, `text`, or `input_ids`"
"""The columns that a row must have, for messages."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Chat messages; the assistant's are trained."""

    messages: tuple[Message, ...]
    completion_start: int = 0
    """Index of the first message after the prompt: assistant turns before it are not trained."""
    tools: tuple[Any, ...] = ()
    template_kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    prefill: str = ""
    """The start of the message at `completion_start` that belongs to the prompt and is not trained."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A text to be written after a prompt text."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class PlainText:
    """A text that is trained whole."""

    text: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids and a mask of the trained ones (1), as given by the dataset."""

    ids: tuple[int, ...]
    mask: tuple[int, ...]


Content = Conversation | Completion | PlainText | Tokens


@dataclass(frozen=True, slots=True)
class TeacherExample:
    """One row of a teacher."""

    example: Example
    """The example for the record: the text before the first trained word, and the other columns."""
    content: Content


def teacher_example(
    index: int, row: Mapping[str, Any], *, text_field: str, where: str
) -> TeacherExample:
    """The example made of a row. Raises TaskError with a message that starts with `where` and names the row."""
    location = f"{where}: row {number_of(row, index)}"
    row = named_messages(dict(row))
    match _form_of_row(row, text_field):
        case "tokens":
            content, used_columns = (
                tokens_of(row, location),
                {"input_ids", "labels", "attention_mask", *MASKS},
            )
        case "messages":
            chat = _make_conversation(
                _parse_messages(row["messages"], location, "messages"), 0, row, location
            )
            content, used_columns = (
                chat,
                {"messages", "conversations", "tools", "chat_template_kwargs"},
            )
        case "completion":
            content, used_columns = _completion_content(row, location), {
                "prompt", "completion", "tools", "chat_template_kwargs",
            }  # fmt: skip
        case "text":
            content, used_columns = (
                PlainText(_require_text(row[text_field], location, text_field)),
                {text_field},
            )
        case _:
            raise TaskError(_no_form_message(row, text_field, location))
    if not isinstance(content, Conversation) and row.get(ARGUMENTS):
        raise TaskError(
            f"{location}: `{ARGUMENTS}` has no effect on a row that is not a conversation: no chat template is applied to it. Leave it out."
        )
    extra_columns = {name: value for name, value in row.items() if name not in used_columns}
    return TeacherExample(Example(index, _prompt_of(content), extra_columns), content)


def has_form(row: Mapping[str, Any], text_field: str) -> bool:
    """True if a row has one of the forms, so no formatting function is needed."""
    return _form_of_row(named_messages(dict(row)), text_field) is not None


# --- forms ---------------------------------------------------------------------------------------


def _form_of_row(row: Mapping[str, Any], text_field: str) -> str | None:
    columns = {name for name, value in row.items() if value is not None}
    for form, needed in {
        "tokens": {"input_ids"},
        "messages": {"messages"},
        "completion": {"prompt", "completion"},
        "text": {text_field},
    }.items():
        if needed <= columns:
            return form
    return None


def _completion_content(row: Mapping[str, Any], where: str) -> Content:
    prompt, completion = checked_prompt(row["prompt"], where), row["completion"]
    if isinstance(completion, str):
        completion = messages_in(completion) or _require_text(completion, where, "completion")
    if isinstance(prompt, str):
        if not isinstance(completion, str):
            value = row["completion"]
            kind = "JSON text of messages" if isinstance(value, str) else type(value).__name__
            raise TaskError(
                f"{where}: `prompt` is text, but `completion` is {kind}. Give both as text or both as chat messages; "
                "data.prompt_format: chat makes the prompt what a user says."
            )
        return Completion(prompt, completion)
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    answer = _parse_messages(completion, where, "completion")
    prefix = begun_words(prompt, answer)
    chat = _make_conversation(
        join_conversation(prompt, answer), len(prompt) - (prefix is not None), row, where
    )
    return replace(chat, prefill=prefix or "")


def _make_conversation(
    messages: Sequence[Message], begins: int, row: Mapping[str, Any], where: str
) -> Conversation:
    if not any(message["role"] == "assistant" for message in messages[begins:]):
        roles = ", ".join(message["role"] for message in messages[begins:])
        raise TaskError(
            f"{where}: no message is the assistant's, so nothing is trained; the roles are: {roles}. "
            'Its messages have the role "assistant".'
        )
    template_options = for_template(row, where)
    return Conversation(tuple(messages), begins, template_options.tools, template_options.arguments)


def _parse_messages(value: Any, where: str, name: str) -> list[Message]:
    try:
        return messages_of(value)
    except Unusable as reason:
        message_number = "" if reason.message is None else f", message {reason.message}"
        raise TaskError(
            f"{where}{message_number}: `{name}` cannot be used: {reason}. Expected a list of chat messages such "
            'as [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}].'
        ) from reason


def _require_text(value: Any, where: str, name: str) -> str:
    if isinstance(value, str) and value:
        return value
    kind = "empty" if value in ("", [], ()) else type(value).__name__
    raise TaskError(f"{where}: `{name}` is {kind}. Expected text.")


def tokens_of(row: Mapping[str, Any], where: str) -> Tokens:
    """The tokens of a row: `input_ids` with `labels`, with a mask or with neither; lists, arrays or tensors."""
    ids = _parse_integers(row["input_ids"], where, "input_ids")
    if row.get("labels") is not None:
        labels = _parse_integers(row["labels"], where, "labels")
        tokens = _check_mask(Tokens(ids, tuple(int(label != IGNORED) for label in labels)), where)
        for index, (token, label) in enumerate(zip(ids, labels, strict=True)):
            if label not in (token, IGNORED):
                raise TaskError(
                    f"{where}: the label of token {index} is {label}, the token {token}. A label is its own token, or {IGNORED} "
                    "where the token is not trained; labels are not shifted."
                )
    else:
        mask = next((row[name] for name in MASKS if row.get(name) is not None), [1] * len(ids))
        tokens = _check_mask(Tokens(ids, _parse_integers(mask, where, "completion_mask")), where)
    attention_mask = row.get("attention_mask")
    if attention_mask is None:
        return tokens
    attention = _parse_integers(attention_mask, where, "attention_mask")
    if len(attention) != len(tokens.ids):
        raise TaskError(
            f"{where}: there are {len(tokens.ids)} input_ids, but {len(attention)} entries in attention_mask."
        )
    indices = [index for index, mark in enumerate(attention) if mark]
    return Tokens(
        tuple(tokens.ids[index] for index in indices),
        tuple(tokens.mask[index] for index in indices),
    )


def _check_mask(tokens: Tokens, where: str) -> Tokens:
    if len(tokens.mask) != len(tokens.ids):
        raise TaskError(
            f"{where}: there are {len(tokens.ids)} input_ids, but {len(tokens.mask)} labels or mask entries."
        )
    return Tokens(tokens.ids, tuple(int(bool(mark)) for mark in tokens.mask))


def _parse_integers(value: Any, where: str, name: str) -> tuple[int, ...]:
    """The whole numbers of a list, array or tensor; a batch of one row is unpacked."""
    plain = value.tolist() if hasattr(value, "tolist") else value
    if (
        isinstance(plain, list)
        and len(cast("list[Any]", plain)) == 1
        and isinstance(plain[0], list)
    ):
        plain = cast("list[Any]", plain[0])
    if isinstance(plain, list | tuple):
        entries = cast("Sequence[Any]", plain)
        if all(isinstance(entry, int) for entry in entries):
            return tuple(int(entry) for entry in entries)
    raise TaskError(f"{where}: `{name}` is {plain!r:.60}. Expected a list of whole numbers.")


def _no_form_message(row: Mapping[str, Any], text_field: str, where: str) -> str:
    names = ", ".join(row) or "none"
    if "prompt" in row or "completion" in row:
        missing = "completion" if "prompt" in row else "prompt"
        return f"{where} has no column `{missing}`, which belongs to `prompt` and `completion`. It has: {names}."
    field_hint = "" if text_field == "text" else f" (data.dataset_text_field is {text_field!r})"
    return (
        f"{where} has none of the forms of a teacher's row: {HOLDING}{field_hint}. It has the columns: {names}. Rename them, "
        "name the column of the text in data.dataset_text_field, or make text or messages of them in get_sft_formatting_func."
    )


def _prompt_of(content: Content) -> Prompt:
    """The text before the first trained word; empty if everything is trained, or only tokens are known."""
    match content:
        case Completion(prompt=prompt):
            return prompt
        case Conversation(messages=messages, completion_start=begins, prefill=prefill):
            replies = (
                n for n, m in enumerate(messages) if n >= begins and m["role"] == "assistant"
            )
            context = list(messages[: next(replies)])
            return [*context, {"role": "assistant", "content": prefill}] if prefill else context
        case _:
            return ""
