"""Finds out how a chat template takes the tool calls of a conversation, because templates differ.

Most templates take arguments as objects; some fail on these, or write them as Python does, and take JSON text. Some ask if the
content beside a call is none, but transformers takes keys that hold None out of messages: these are changed to ask if it is missing.
Renders of the conversation show which way is right. A template that leaves calls out gets them as text, in the form in
which a model's calls are read: a `<tool_call>` with JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import Any

from groupwise.api.http.strict_json import NotStrict, parse_inner
from groupwise.core.types import Message

PROBE = "probed_call"
"""Placeholder for a function's name, to see if a render contains its call."""

_BLOCKS = re.compile(r"\{[%{](?:(?!\{[%{]).)*?[%}]\}", re.DOTALL)
"""Statements and expressions in a chat template: all that is not copied as it stands."""

_IS_NONE = re.compile(r"(\bis\s+(?:not\s+)?|[=!]=\s*)[nN]one\b")


def written_calls(
    tokenizer: Any, messages: Sequence[Message], template: str, arguments: Mapping[str, Any]
) -> tuple[list[Message], str]:
    """The messages and the template for the first way that renders all calls. Raises what the template raises, or ValueError."""
    functions = [
        call.get("function", call)
        for message in messages
        for call in message.get("tool_calls") or ()
    ]
    taken = (_with_object(each).get("arguments") for each in functions)
    objects = [each for each in taken if isinstance(each, dict)]
    of_absent = _BLOCKS.sub(
        lambda block: _IS_NONE.sub(r"| default(none) \1none", block[0]), template
    )
    ways: list[tuple[list[Message], str]] = []
    problems: list[Exception] = []
    forms = [*product(dict.fromkeys((template, of_absent)), (False, True)), (template, None)]
    for text, as_json in forms:
        given = _with_functions(messages, _with_json_text if as_json else _with_object)
        probe = _with_functions(given, lambda function: {**function, "name": PROBE})
        if as_json is None:
            if ways:
                break
            given, probe = ([_as_text(each) for each in all_of] for all_of in (given, probe))
        try:
            made = tokenizer.apply_chat_template(
                probe, **{**arguments, "chat_template": text}, tokenize=False
            )
            if made.count(PROBE) < len(functions):
                raise ValueError("it does not write all tool calls")
        except Exception as error:  # noqa: BLE001 - a template raises anything; reported if no way is left
            problems.append(error)
            continue
        write = _json if as_json else str
        if as_json is None or as_json == any(
            _json(each) != str(each) and write(each) in made for each in objects
        ):
            return given, text
        ways.append((given, text))
    if not ways:
        raise problems[0]
    return ways[0]


def _as_text(message: Message) -> Message:
    """A message whose calls stand in its content."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    functions = [call.get("function", call) for call in calls]
    calls_text = [
        f"<tool_call>\n{_json({'name': each['name'], 'arguments': each.get('arguments', {})})}\n</tool_call>"
        for each in functions
    ]
    content = "\n".join(filter(None, [message.get("content"), *calls_text]))
    return {
        **{key: value for key, value in message.items() if key != "tool_calls"},
        "content": content,
    }


def _with_functions(
    messages: Sequence[Message], change: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> list[Message]:
    """The messages with each function that they call changed."""

    def changed(call: Mapping[str, Any]) -> Mapping[str, Any]:
        return (
            {**call, "function": change(call["function"])} if "function" in call else change(call)
        )

    return [
        {**message, "tool_calls": list(map(changed, calls))} if calls else message
        for message in messages
        for calls in [message.get("tool_calls")]
    ]


def _with_object(function: Mapping[str, Any]) -> Mapping[str, Any]:
    with suppress(KeyError, AttributeError, NotStrict):
        if isinstance(parsed := parse_inner(function["arguments"]), dict):
            return {**function, "arguments": parsed}
    return function


def _with_json_text(function: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(function.get("arguments"), dict):
        return function
    return {**function, "arguments": _json(function["arguments"])}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
