"""Determines in which form a chat template accepts the tool calls of a conversation, because templates differ.

Most templates take arguments as objects. Some fail on objects, or write them in Python's syntax, and need JSON text. Some test
whether the content next to a call is none, but transformers removes keys whose value is None; their text is changed to test for a missing
key. Trial renders of the conversation show which form works. If a template omits calls, they are written into the message as text, in
the form in which a model's calls are parsed: a `<tool_call>` with JSON.
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
"""Placeholder for a function's name, used to see whether a render contains the call."""

_BLOCKS = re.compile(r"\{[%{](?:(?!\{[%{]).)*?[%}]\}", re.DOTALL)
"""Matches statements and expressions in a chat template: everything that is not copied verbatim."""

_IS_NONE = re.compile(r"(\bis\s+(?:not\s+)?|[=!]=\s*)[nN]one\b")


def written_calls(
    tokenizer: Any, messages: Sequence[Message], template: str, arguments: Mapping[str, Any]
) -> tuple[list[Message], str]:
    """The messages and the template in the first form that renders all calls. Raises the template's error, or ValueError."""
    functions = [
        call.get("function", call)
        for message in messages
        for call in message.get("tool_calls") or ()
    ]
    taken = (_with_object(function).get("arguments") for function in functions)
    objects = [value for value in taken if isinstance(value, dict)]
    of_absent = _BLOCKS.sub(
        lambda block: _IS_NONE.sub(r"| default(none) \1none", block[0]), template
    )
    ways: list[tuple[list[Message], str]] = []
    problems: list[Exception] = []
    forms = [*product(dict.fromkeys((template, of_absent)), (False, True)), (template, None)]
    for text, as_json in forms:
        candidate = _with_functions(messages, _with_json_text if as_json else _with_object)
        probe = _with_functions(candidate, lambda function: {**function, "name": PROBE})
        if as_json is None:
            if ways:
                break
            candidate, probe = (
                [calls_as_text(message) for message in group] for group in (candidate, probe)
            )
        try:
            rendered = tokenizer.apply_chat_template(
                probe, **{**arguments, "chat_template": text}, tokenize=False
            )
            if rendered.count(PROBE) < len(functions):
                raise ValueError("it does not write all tool calls")
        except Exception as error:  # noqa: BLE001 - a template may raise anything; reported if no form works
            problems.append(error)
            continue
        write = _dump_json if as_json else str
        if as_json is None or as_json == any(
            _dump_json(value) != str(value) and write(value) in rendered for value in objects
        ):
            return candidate, text
        ways.append((candidate, text))
    if not ways:
        raise problems[0]
    return ways[0]


def calls_as_text(message: Message) -> Message:
    """The message with its calls written as text in its content."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    functions = [call.get("function", call) for call in calls]
    calls_text = [
        f"<tool_call>\n{_dump_json({'name': function['name'], 'arguments': function.get('arguments', {})})}\n</tool_call>"
        for function in functions
    ]
    content = "\n".join(filter(None, [message.get("content"), *calls_text]))
    return {
        **{key: value for key, value in message.items() if key != "tool_calls"},
        "content": content,
    }


def _with_functions(
    messages: Sequence[Message], change: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> list[Message]:
    """The messages with `change` applied to each called function."""

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
    return {**function, "arguments": _dump_json(function["arguments"])}


def _dump_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
