"""Chat messages from whatever form rows keep them in: dicts, parallel lists, arrays, ShareGPT, parts of text, JSON text.

What can be read in one way alone is read so; for anything else `Unusable` says what is wrong.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

from groupwise.data.template_columns import without_nulls
from groupwise.types import Message, Prompt

ROLES = ("system", "developer", "user", "assistant", "tool")
SHARE_GPT = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "observation": "tool",
    "tool": "tool",
}
"""Names under `from`, and the roles that they are here."""


class NumberedRow(dict[str, Any]):
    """A row that knows its number in the data of its user, from 0, however many were left out before it."""

    def __init__(self, columns: Mapping[str, Any], number: int | None) -> None:
        super().__init__(columns)
        self.number = number


def like(row: Mapping[str, Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """Columns that take the place of a row's, and keep its number."""
    return NumberedRow(columns, getattr(row, "number", None))


def number_of(row: Mapping[str, Any], place: int) -> int:
    """The number of a row in its user's data; its place where nobody numbered it."""
    number = getattr(row, "number", None)
    return place if number is None else number


class Unusable(Exception):
    """A row cannot be used; the text is the reason that it is counted by."""

    message: int | None = None
    """The place of the message that is wrong, from 0; None where no single one is."""


def prompt_of(value: Any) -> Prompt:
    """A prompt as a row gives it: text, or messages where it holds some, also as JSON text. Raises Unusable."""
    if not isinstance(value, str):
        return messages_of(value)
    if not value.strip():
        raise Unusable("the prompt is empty")
    return messages_in(value) or value


def messages_of(value: Any) -> list[Message]:
    """Messages; text is what the user says. Raises Unusable."""
    if isinstance(value, str):
        return messages_in(value) or [{"role": "user", "content": value}]
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, Mapping):
        value = _parallel(cast("Mapping[str, Any]", value))
    if not isinstance(value, list | tuple) or not value:
        raise Unusable(
            "there are no messages" if value in ([], ()) else "it is no text and no messages"
        )
    messages: list[Message] = []
    for place, entry in enumerate(cast("Sequence[Any]", value)):
        try:
            messages.append(message_of(entry))
        except Unusable as reason:
            reason.message = place
            raise
    return messages


def messages_in(text: str) -> list[Message] | None:
    """The messages that a text is the JSON of, or what Python writes for them; None for any other text."""
    if not looks_like_messages(text):
        return None
    for read in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, MemoryError, RecursionError, Unusable):
            return messages_of(read(text.strip()))
    return None


def looks_like_messages(text: str) -> bool:
    """Whether a text begins as messages do that were written as text."""
    begins = "".join(text[:200].split())
    return begins.startswith(
        ('[{"role"', "[{'role'", '[{"content"', "[{'content'", '[{"from"', "[{'from'")
    )


def _parallel(value: Mapping[str, Any]) -> list[Any]:
    """One message, or lists of roles and contents of one length."""
    role, content = value.get("role"), value.get("content")
    if not isinstance(role, list | tuple) or not isinstance(content, list | tuple):
        return [value]
    roles, contents = cast("Sequence[Any]", role), cast("Sequence[Any]", content)
    if len(roles) != len(contents):
        raise Unusable("there are not as many roles as contents")
    return [{"role": one, "content": text} for one, text in zip(roles, contents, strict=True)]


def message_of(value: Any) -> Message:
    """One message with its role, and its text unless it calls tools. Raises Unusable."""
    if not isinstance(value, Mapping):
        raise Unusable("a message is no mapping of role and content")
    message = without_nulls(_from_share_gpt(cast("Mapping[str, Any]", value)))
    role = message.get("role")
    if not isinstance(role, str):
        raise Unusable("a message has no text under `role`")
    if role not in ROLES:
        raise Unusable(f"a message has the role {role!r:.30}; there are {', '.join(ROLES)}")
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [with_arguments(call) for call in calls]
        if "content" not in message:
            return message
    return {**message, "content": _text(message.get("content"))}


def _from_share_gpt(value: Mapping[str, Any]) -> dict[str, Any]:
    message = {str(key): entry for key, entry in value.items()}
    if message.get("role") is not None or not {"from", "value"} <= message.keys():
        return message
    said = message.pop("from")
    if said not in SHARE_GPT:
        raise Unusable(
            f"a message is from {said!r:.30} (ShareGPT); known are {', '.join(SHARE_GPT)}"
        )
    return {"role": SHARE_GPT[said], "content": message.pop("value")} | {
        key: entry for key, entry in message.items() if key != "role"
    }


def with_arguments(call: Any) -> Any:
    """A tool call whose arguments are an object, as templates want them, also where they are given as JSON text."""
    if not isinstance(call, Mapping):
        raise Unusable("a tool call is no mapping of a function and its arguments")
    given = dict(cast("Mapping[str, Any]", call))
    if isinstance(given.get("function"), Mapping):
        return {**given, "function": with_arguments(given["function"])}
    arguments = given.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError):
            parsed: Any = json.loads(arguments)
            if isinstance(parsed, dict):
                given["arguments"] = parsed
    return given


def _text(content: Any) -> str:
    """Text, or parts of which each is text."""
    if isinstance(content, list | tuple):
        parts = [_part(part) for part in cast("Sequence[Any]", content)]
        content = "".join(parts)
    if not isinstance(content, str):
        raise Unusable("a message has no text under `content`")
    return content


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    given = cast("Mapping[str, Any]", part if isinstance(part, Mapping) else {})
    text = given.get("text")
    if given.get("type", "text") != "text" or not isinstance(text, str):
        raise Unusable("a message holds more than text")
    return text


def ends_begun(prompt: Sequence[Message]) -> bool:
    """Whether a prompt ends with words of the assistant, which the completion goes on with."""
    return bool(prompt) and prompt[-1].get("role") == "assistant"


def named_messages(row: dict[str, Any]) -> dict[str, Any]:
    """The row with its conversation under `messages`, also where it keeps it as ShareGPT does, under `conversations`."""
    if row.get("messages") is not None or not isinstance(row.get("conversations"), list | tuple):
        return row
    return like(row, {**row, "messages": row["conversations"]})


def joined(prompt: Sequence[Message], said: Sequence[Message]) -> list[Message]:
    """A conversation, where the first words of the assistant may go on with those that the prompt ends with."""
    if not ends_begun(prompt) or not said:
        return [*prompt, *said]
    *before, begun = prompt
    first, *later = said
    return [*before, {**first, "content": begun["content"] + first["content"]}, *later]
