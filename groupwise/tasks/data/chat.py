"""Makes prompts from the columns of a dataset, and counts the rows that have none.

A prompt is text, or messages in any form that `messages` reads. Text stays text, unless the config makes it a user message. An
assistant message at the end of a chat is continued, or dropped if it is an answer. Tagged blocks may be removed from the messages
of some roles, a system prompt is added to chats that have none, and more columns may be appended as lines.

A row without a usable prompt is left out and counted by the reason, or refused if the config sets `data.strict`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from groupwise.core.errors import TaskError
from groupwise.core.types import Message, NumberedRow, Prompt, number_of
from groupwise.tasks.data.messages import Unusable, messages_of, named_messages, prompt_of
from groupwise.tasks.data.order import Share

Row = dict[str, Any]

PromptFormat = Literal["text", "chat"]
Prefill = Literal["continue", "drop"]
LESSONS = ("messages", "conversations", "prompt", "completion", "text", "input_ids")
"""The columns that teacher rows are made from."""
MAX_PLACES = 3
"""Most rows that a message names for each reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """Settings for making prompts from rows."""

    format: PromptFormat = "text"
    """Format of a prompt that is given as text: the user's message, or the text unchanged."""
    system_prompt: str | None = None
    lines: tuple[str, ...] = ()
    """Columns that follow the user's text as lines, `name: value`."""
    prefill: Prefill = "continue"
    """Treatment of the assistant's words at the end of a chat."""
    strip_tags: tuple[str, ...] = ()
    strip_roles: tuple[str, ...] = ("assistant",)
    """Roles from whose messages blocks of these tags are removed."""
    drop_duplicates: bool = False


@dataclass(frozen=True, slots=True)
class Account:
    """Counts, by reason, of the rows that were left out or changed."""

    left_out: Mapping[str, int] = field(default_factory=dict[str, int])
    changed: Mapping[str, int] = field(default_factory=dict[str, int])

    def with_prefix(self, name: str) -> Account:
        """The same account, with the name of the set that the rows belong to."""
        return Account(
            {f"{name}: {reason}": count for reason, count in self.left_out.items()},
            {f"{name}: {reason}": count for reason, count in self.changed.items()},
        )

    def __add__(self, other: Account) -> Account:
        return Account(
            dict(Counter(self.left_out) + Counter(other.left_out)),
            dict(Counter(self.changed) + Counter(other.changed)),
        )


class Rows(list[Row]):
    """Usable rows, with an account of the others."""

    def __init__(self, rows: Iterable[Row], account: Account, shares: Sequence[Share] = ()) -> None:
        super().__init__(rows)
        self.account = account
        self.shares = tuple(shares)
        """Shares of an epoch; empty if it has each row once."""


def with_prompts(
    rows: Sequence[Row],
    options: PromptOptions,
    where: str,
    *,
    strict: bool,
    unscorable: Callable[[Row], str | None] = lambda row: None,
) -> Rows:
    """The rows with their column `prompt` as text or chat messages. Raises TaskError if no row is left, or with `strict` if any row
    cannot be used.

    `unscorable` gets a row without its prompt and returns the reason why the rewards cannot score it, or None.
    """

    def prepare_row(row: Row, changes: list[str]) -> Row:
        prompt = _make_prompt(row.get("prompt"), row, options, changes)
        columns = {name: value for name, value in row.items() if name != "prompt"}
        if reason := unscorable(columns):
            raise Unusable(reason)
        return {**row, "prompt": prompt}

    return _make_rows(rows, prepare_row, ("prompt",), options, where, strict=strict)


def prepare_rows(
    rows: Sequence[Row], step: Callable[[Row], Row], where: str, *, strict: bool
) -> Rows:
    """The rows made by a step, which raises Unusable for rows to be left out. Raises TaskError like `with_prompts`."""

    def prepare_row(row: Row, changes: list[str]) -> Row:
        return step(row)

    return _make_rows(rows, prepare_row, (), PromptOptions(), where, strict=strict)


def with_teacher(rows: Sequence[Row], options: PromptOptions, where: str, *, strict: bool) -> Rows:
    """The rows of a teacher with their chats completed: `messages`, or `prompt` with `completion`; other rows are unchanged."""

    def prepare_row(row: Row, changes: list[str]) -> Row:
        row = named_messages(row)
        if row.get("messages") is not None:
            value = row["messages"]
            messages = messages_of(value)
            if not any(message["role"] == "assistant" for message in messages):
                raise Unusable("no message is the assistant's")
            return {**row, "messages": _with_system(messages, options.system_prompt, changes)}
        if lessons and all(row.get(name) is None for name in lessons):
            raise Unusable(f"there is no {' and no '.join(lessons)}")
        if "completion" not in lessons or all(row.get(n) is None for n in ("prompt", "completion")):
            return row
        if row.get("completion") in (None, "", []):
            raise Unusable("the completion is empty")
        return {**row, "prompt": _make_prompt(row.get("prompt"), row, options, changes)}

    lessons = [name for name in LESSONS if any(row.get(name) is not None for row in rows)]
    if options.system_prompt and not {"messages", "prompt"} & set(lessons):
        raise TaskError(
            f"{where}: data.system_prompt has no effect, because no row has a chat (`messages`, or `prompt` with `completion`). It has: "
            f"{', '.join(rows[0]) if rows else 'no rows'}. Leave the key out."
        )
    return _make_rows(rows, prepare_row, LESSONS, options, where, strict=strict)


def _make_rows(
    rows: Sequence[Row],
    make: Callable[[Row, list[str]], Row],
    identity: Sequence[str],
    options: PromptOptions,
    where: str,
    *,
    strict: bool,
) -> Rows:
    """Applies `make` to each row. Rows are duplicates if their columns `identity` are equal."""
    usable: list[Row] = []
    unusable: dict[str, list[int]] = {}
    change_counts: Counter[str] = Counter()
    seen: set[str] = set()
    for position, row in enumerate(rows):
        index = number_of(row, position)
        changes: list[str] = []
        try:
            new_row = NumberedRow(make(row, changes), index)
            if options.drop_duplicates:
                key = key_of(new_row, identity)
                if key in seen:
                    raise Unusable("the same as an earlier row (data.drop_duplicates)")
                seen.add(key)
        except Unusable as reason:
            unusable.setdefault(str(reason), []).append(index)
        else:
            usable.append(new_row)
            change_counts.update(set(changes))
    if unusable and (strict or not usable):
        total = len(rows)
        refuse = strict and bool(usable)
        count = sum(map(len, unusable.values()))
        verdict = "cannot be used, and data.strict is true" if refuse else "can be used"
        headline = (
            f"{count} of {total} rows {verdict}" if refuse else f"none of {total} rows {verdict}"
        )
        lines = [
            f"  {len(indices)} × {reason} ({_row_numbers_text(indices)})"
            for reason, indices in unusable.items()
        ]
        remedy = (
            "Fix them, or set data.strict to false to leave them out."
            if refuse
            else "Check data.prompt_column and data.columns: they name the columns that are read."
        )
        raise TaskError("\n".join([f"{where}: {headline}:", *lines, remedy]))
    left_out = {reason: len(indices) for reason, indices in unusable.items()}
    return Rows(usable, Account(left_out, dict(change_counts)))


def key_of(row: Row, columns: Sequence[str]) -> str:
    """Equal for rows with the same content in these columns; in all columns, if these are empty."""
    values = {name: row[name] for name in columns if row.get(name) is not None}
    return json.dumps(values or row, sort_keys=True, default=str)


def _row_numbers_text(indices: Sequence[int]) -> str:
    text = ", ".join(map(str, indices[:MAX_PLACES]))
    ellipsis = " …" if len(indices) > MAX_PLACES else ""
    return f"row{'s' if len(indices) > 1 else ''} {text}{ellipsis}"


# --- one prompt ----------------------------------------------------------------------------------


def _make_prompt(value: Any, row: Row, options: PromptOptions, changes: list[str]) -> Prompt:
    if value is None:
        raise Unusable("there is no prompt")
    prompt = prompt_of(value)
    if isinstance(prompt, str):
        if options.format == "text":
            if options.system_prompt:
                raise TaskError(
                    "data.system_prompt has no effect on prompts that are text. Set data.prompt_format to chat, which makes them what a "
                    "user says, or leave data.system_prompt out."
                )
            return _with_lines(prompt, row, options.lines)
        prompt = [{"role": "user", "content": prompt}]
    elif isinstance(value, str):
        changes.append("messages were read from text")
    messages = _up_to_the_question(_strip_blocks(prompt, options, changes), options, changes)
    last_user = max(index for index, message in enumerate(messages) if message["role"] == "user")
    messages[last_user] = {
        **messages[last_user],
        "content": _with_lines(messages[last_user]["content"], row, options.lines),
    }
    return _with_system(messages, options.system_prompt, changes)


def _strip_blocks(
    messages: Sequence[Message], options: PromptOptions, changes: list[str]
) -> list[Message]:
    """Removes blocks of the config's `strip_tags` from messages of its `strip_roles`."""
    stripped: list[Message] = []
    for message in messages:
        content = message.get("content", "")
        text = (
            without_blocks(content, options.strip_tags)
            if message["role"] in options.strip_roles
            else content
        )
        if text != content:
            changes.append(
                f"blocks were taken out of what the {message['role']} says (data.strip_tags)"
            )
        stripped.append(message if text == content else {**message, "content": text})
    return stripped


def without_blocks(text: str, tags: Sequence[str]) -> str:
    """The text without `<tag>…</tag>`, ignoring case; trimmed if something was removed."""
    remaining = text
    for tag in tags:
        name = re.escape(tag)
        remaining = re.sub(rf"<{name}>.*?</{name}>", "", remaining, flags=re.IGNORECASE | re.DOTALL)
    return text if remaining == text else remaining.strip()


def _up_to_the_question(
    messages: list[Message], options: PromptOptions, changes: list[str]
) -> list[Message]:
    """The messages up to the question, or up to the assistant's words that the answer starts with."""
    if not any(message["role"] == "user" for message in messages):
        raise Unusable("no message is the user's")
    remaining = list(messages)
    while remaining[-1]["role"] == "assistant" and (
        options.prefill == "drop" or not remaining[-1].get("content", "").strip()
    ):
        remaining.pop()
    if len(remaining) < len(messages):
        changes.append("turns of the assistant at the end were left out")
    if remaining[-1]["role"] == "assistant":
        changes.append(
            "the completion goes on with what the assistant says at the end (data.prefill)"
        )
    elif remaining[-1]["role"] not in ("user", "tool"):
        raise Unusable("the messages do not end with the user")
    elif not remaining[-1]["content"].strip():
        raise Unusable("the prompt is empty")
    return remaining


def _with_lines(text: str, row: Row, columns: Sequence[str]) -> str:
    lines = [f"{name}: {row[name]}" for name in columns if row.get(name) not in (None, "")]
    return "\n".join([text, *lines])


def _with_system(
    messages: list[Message], system_prompt: str | None, changes: list[str]
) -> list[Message]:
    system_messages = [m for m in messages if m["role"] in ("system", "developer")]
    if not system_prompt or any(m["content"].strip() for m in system_messages):
        return messages
    changes.append("the system prompt was prepended (data.system_prompt)")
    return [
        {"role": "system", "content": system_prompt},
        *(m for m in messages if m not in system_messages),
    ]
