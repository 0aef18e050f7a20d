"""Chat messages from any form that rows store them in: dicts, parallel lists, arrays, ShareGPT, parts of text, JSON text, and a
mapping that has any of these under `messages` or `conversations`.

Only unambiguous input is accepted; anything else raises `Unusable` with the reason.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

from groupwise.api.http.strict_json import NotStrict, parse_inner
from groupwise.api.schemas.template_columns import without_nulls
from groupwise.core.types import Message, Prompt, with_number_of

ROLES = ("system", "developer", "user", "assistant", "tool")
OTHER_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function": "tool",
    "ipython": "tool",
}
"""Names of these roles in ShareGPT, Gemini, OpenAI's older interface and Llama."""

WHOLE = ("messages", "conversations")
"""Names under which a mapping holds a whole conversation."""

_WRITTEN = re.compile(
    r"""\s*(?:\[\s*\{\s*["'](?:role|content|from)["']|\{\s*["'](?:role|messages|conversations)["'])"""
)
"""The beginning of messages that were stored as text, either as JSON or as Python's repr."""


class Unusable(Exception):
    """A row cannot be used; the text is the reason under which it is counted."""

    message: int | None = None
    """Index of the invalid message, from 0; None if it is not a single one."""


def prompt_of(value: Any) -> Prompt:
    """The prompt of a cell: text, or messages if it holds some, also as JSON text. Raises Unusable."""
    if not isinstance(value, str):
        return messages_of(value)
    if not value.strip():
        raise Unusable("the prompt is empty")
    return messages_in(value) or value


def messages_of(value: Any) -> list[Message]:
    """Chat messages; text becomes a user message. Raises Unusable."""
    if isinstance(value, str):
        return messages_in(value) or [{"role": "user", "content": value}]
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, Mapping):
        value = _messages_of_mapping(cast("Mapping[str, Any]", value))
    if isinstance(value, list) and value and all(map(_is_part, cast("list[Any]", value))):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list | tuple) or not value:
        raise Unusable(
            "there are no messages" if value in ([], ()) else "it is no text and no messages"
        )
    messages: list[Message] = []
    for index, entry in enumerate(cast("Sequence[Any]", value)):
        try:
            messages.append(message_of(entry))
        except Unusable as reason:
            reason.message = index
            raise
    return messages


def messages_in(text: str) -> list[Message] | None:
    """The messages stored in a text as JSON or as Python's repr; None for any other text."""
    if not looks_like_messages(text):
        return None
    for read in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, MemoryError, RecursionError, Unusable):
            return messages_of(read(text.strip()))
    return None


def looks_like_messages(text: str) -> bool:
    """True if a text starts like stored messages (see `_WRITTEN`)."""
    return _WRITTEN.match(text) is not None


def _messages_of_mapping(value: Mapping[str, Any]) -> Any:
    """The messages of a mapping: one message, lists of roles and contents of one length, or a conversation and nothing else."""
    entries = {name: entry for name, entry in value.items() if entry is not None}
    if len(entries) == 1 and next(iter(entries)) in WHOLE:
        conversation = next(iter(entries.values()))
        return (
            _messages_of_mapping(cast("Mapping[str, Any]", conversation))
            if isinstance(conversation, Mapping)
            else conversation
        )
    role, content = value.get("role"), value.get("content")
    if not isinstance(role, list | tuple) or not isinstance(content, list | tuple):
        return [value]
    roles, contents = cast("Sequence[Any]", role), cast("Sequence[Any]", content)
    if len(roles) != len(contents):
        raise Unusable("there are not as many roles as contents")
    return [
        {"role": speaker, "content": text} for speaker, text in zip(roles, contents, strict=True)
    ]


def _is_part(entry: Any) -> bool:
    """True for a part of one message's content: it has a type and no role."""
    return isinstance(entry, Mapping) and "type" in entry and not {"role", "from"} & entry.keys()


def message_of(value: Any) -> Message:
    """One message with its role, and its text unless it calls tools. Raises Unusable."""
    if _is_plain(value):
        return dict(cast("dict[str, Any]", value))
    if not isinstance(value, Mapping):
        raise Unusable("a message is not a mapping of role and content")
    message = without_nulls(_with_our_names(cast("Mapping[str, Any]", value)))
    role = message.get("role")
    if not isinstance(role, str):
        raise Unusable("a message has no text under `role`")
    message["role"] = OTHER_ROLES.get(role.lower(), role.lower())
    if message["role"] not in ROLES:
        known_roles = ", ".join((*ROLES, *OTHER_ROLES))
        raise Unusable(f"a message has the role {role!r:.30}; there are {known_roles}")
    if calls := _tool_calls(message):
        message["tool_calls"] = calls
        if "content" not in message:
            return message
    elif message["role"] == "system":
        message.setdefault("content", "")  # an empty text, too, replaces a template's default
    return {**message, "content": _text_content(message.get("content"))}


def _is_plain(value: Any) -> bool:
    """True for a message as most are: a known role and a text, in a dict of nothing else."""
    if not isinstance(value, dict):
        return False
    message = cast("dict[str, Any]", value)
    return (
        len(message) == 2 and message.get("role") in ROLES and type(message.get("content")) is str
    )


def _tool_calls(message: dict[str, Any]) -> list[Any]:
    """Takes the calls out of a message: its `tool_calls`, or the `function_call` of OpenAI's older format."""
    calls = message.pop("tool_calls", None)
    if isinstance(calls, str):
        calls = _of_json(calls)
    if not calls and (older := message.pop("function_call", None)):
        calls = [{"type": "function", "function": older}]
    if not calls:
        return []
    if not isinstance(calls, list):
        raise Unusable("the tool calls of a message are not a list")
    return [with_arguments(call) for call in cast("list[Any]", calls)]


def _with_our_names(value: Mapping[str, Any]) -> dict[str, Any]:
    """A message of ShareGPT, which has `from` and `value`, with `role` and `content`; any other as it is."""
    message = {str(key): entry for key, entry in value.items()}
    if message.get("role") is not None or not {"from", "value"} <= message.keys():
        return message
    renamed = {"role": message.pop("from"), "content": message.pop("value")}
    return {**message, **renamed}


def with_arguments(call: Any) -> Any:
    """A tool call whose arguments are an object, as templates need them, even if they were given as JSON text."""
    if not isinstance(call, Mapping):
        raise Unusable("a tool call is not a mapping of a function and its arguments")
    tool_call = dict(cast("Mapping[str, Any]", call))
    if isinstance(tool_call.get("function"), Mapping):
        return {**tool_call, "function": with_arguments(tool_call["function"])}
    arguments = tool_call.get("arguments")
    if isinstance(arguments, str) and isinstance(parsed := _of_json(arguments), dict):
        tool_call["arguments"] = parsed
    if not isinstance(tool_call.get("name"), str):
        raise Unusable("a tool call does not name its function")
    return tool_call


def _of_json(text: str) -> Any:
    """The parsed value if a text is JSON; otherwise the text itself."""
    with suppress(NotStrict):
        return parse_inner(text)
    return text


def _text_content(content: Any) -> str:
    """True for text, or a list of parts that are all text."""
    if isinstance(content, Mapping):
        content = [content]
    if isinstance(content, list | tuple):
        parts = [_text_of_part(part) for part in cast("Sequence[Any]", content)]
        content = "".join(parts)
    if not isinstance(content, str):
        raise Unusable("a message has no text under `content`")
    return content


def _text_of_part(part: Any) -> str:
    if isinstance(part, str):
        return part
    fields = cast("Mapping[str, Any]", part if isinstance(part, Mapping) else {})
    text = fields.get("text")
    if fields.get("type", "text") != "text" or not isinstance(text, str):
        raise Unusable("a message holds more than text")
    return text


def ends_begun(prompt: Sequence[Message]) -> bool:
    """True if a prompt ends with words of the assistant, which the completion continues."""
    return bool(prompt) and prompt[-1].get("role") == "assistant"


def named_messages(row: dict[str, Any]) -> dict[str, Any]:
    """The row with its conversation under `messages`, also if it is stored in ShareGPT's form under `conversations`."""
    conversation = row.get("conversations")
    if row.get("messages") is not None or conversation is None:
        return row
    if isinstance(conversation, str) and not looks_like_messages(conversation):
        return row
    return with_number_of(row, {**row, "messages": conversation})


def join_conversation(prompt: Sequence[Message], completion: Sequence[Message]) -> list[Message]:
    """A conversation. The first assistant words of the completion may continue those at the end of the prompt."""
    prefix = begun_words(prompt, completion)
    if prefix is None:
        return [*prompt, *completion]
    first, *rest = completion
    return [*prompt[:-1], {**first, "content": prefix + first.get("content", "")}, *rest]


def begun_words(prompt: Sequence[Message], completion: Sequence[Message]) -> str | None:
    """The assistant's words at the end of a prompt that `completion` continues; None if there are none, or they end in a call."""
    if not ends_begun(prompt) or prompt[-1].get("tool_calls"):
        return None
    return (
        prompt[-1].get("content", "")
        if completion and completion[0].get("role") == "assistant"
        else None
    )
