"""The grammar of completions that are tool calls, for constrained decoding: in Lark's notation, as llguidance reads it.

Calls stand as the families write them, which is how `groupwise.tasks.openai.tools` reads them again. The arguments of each call are JSON
of its tool's schema; everything around them is fixed. A mark that is a special token of the tokenizer is that token, and text otherwise.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from groupwise.core.types import CallGrammar

NAME = re.compile(r"[\w.-]+")
"""Names that can be written without quotes before their arguments."""


def call_grammar(
    calls: CallGrammar, answer: str | None, special_tokens: Mapping[str, int], options: Any
) -> str:
    """The grammar of one call or more; with `answer`, a JSON schema, also of JSON instead of calls.

    `special_tokens`: ids of the tokenizer's special tokens by their text; `options`: the library's for JSON schemas.
    """

    def mark(text: str) -> str:
        return f"<[{special_tokens[text]}]>" if text in special_tokens else _literal(text)

    def json_of(schema: str) -> str:
        return f"%json {json.dumps({**json.loads(schema), 'x-guidance': options})}"

    more = "" if calls.is_single else "*"
    match calls.call_format:
        case "hermes":
            call = f'{mark("<tool_call>")} "\\n" body "\\n" {mark("</tool_call>")}'
            start = f'{call} ("\\n" {call}){more}' if more else call
        case "llama3_json":
            start = 'body ("; " body)*' if more else "body"
        case "mistral" if _name_stands_alone(calls, special_tokens):
            start = f"({mark('[TOOL_CALLS]')} body)" + ("+" if more else "")
        case "mistral":
            bodies = 'body (", " body)*' if more else "body"
            start = f'{mark("[TOOL_CALLS]")} " [" {bodies} "]"'
    lines = [f"start: calls{' | answer' if answer is not None else ''}", f"calls: {start}"]
    lines.append("body: " + " | ".join(f"body_{index}" for index in range(len(calls.tools))))
    for index, (name, schema) in enumerate(calls.tools):
        if calls.call_format == "mistral" and _name_stands_alone(calls, special_tokens):
            lines.append(f"body_{index}: {_literal(name)} {mark('[ARGS]')} arguments_{index}")
        else:
            key = "parameters" if calls.call_format == "llama3_json" else "arguments"
            opening = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": '
            lines.append(f'body_{index}: {_literal(opening)} arguments_{index} "}}"')
        lines.append(f"arguments_{index}: {json_of(arguments_schema(schema))}")
    if answer is not None:
        lines.append(f"answer: {json_of(answer)}")
    return "\n".join(lines)


def arguments_schema(schema: str) -> str:
    """The schema of a tool's arguments, which are a JSON object, whatever else the tool says of them."""
    return json.dumps({"type": "object", **json.loads(schema)})


def count_schemas(value: Any) -> int:
    """Number of JSON objects within a schema, which the time to compile it depends on."""
    return sum(1 for _ in _objects(value))


def _objects(value: Any) -> Iterator[Any]:
    pending = [value]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            yield node
            pending.extend(node.values())  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
        elif isinstance(node, list):
            pending.extend(node)  # pyright: ignore[reportUnknownArgumentType]


def _name_stands_alone(calls: CallGrammar, special_tokens: Mapping[str, int]) -> bool:
    """True for the newer notation of Mistral, whose tokenizers have a token between name and arguments."""
    return "[ARGS]" in special_tokens and all(NAME.fullmatch(name) for name, _ in calls.tools)


def _literal(text: str) -> str:
    return json.dumps(text)
