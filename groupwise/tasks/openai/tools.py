"""Tool calls in the text of a completion: how each family of models writes them.

A model that was trained to call tools writes a call in the notation of its family, and its chat template writes earlier calls in the same
one. So the engine reads the notation from the template (`call_format_of`), and `split_calls` reads the calls from a text:

    hermes         <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>      Hermes, Qwen; templates without tools
    llama3_json    <|python_tag|>{"name": "add", "parameters": {"a": 1}}              Llama 3; several are separated by `;`
    mistral        [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]              Mistral; newer: [TOOL_CALLS]add[ARGS]{"a": 1}

The engine leaves these marks in the text of a completion even where they are special tokens. Without a mark, JSON is read as calls only
if it is the whole text and each name is one of the request's tools, so that an answer in JSON stays an answer.

Malformed calls stay text, and so do calls of a tool with `strict: true` whose arguments do not fit its schema. The sampled tokens are
never changed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, cast, get_args
from urllib.parse import unquote

from groupwise.api.http.strict_json import NotStrict, finite, no_constant, refuse_lone_surrogates
from groupwise.core.types import CallFormat
from groupwise.tasks.openai.stop_strings import streamable_prefix
from groupwise.tasks.tools import HermesCalls, ToolCall

FORMATS: tuple[CallFormat, ...] = get_args(CallFormat)
PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS = "[TOOL_CALLS]"
BETWEEN_CALLS = " \n\t\r;"
"""The text between the calls of Llama 3, or before the first."""
MAX_SCHEMAS = 1000
"""Limit on the schemas within the schema of a strict tool, so that checking arguments takes milliseconds."""
NOT_CHECKED = ("pattern", "patternProperties", "$dynamicRef", "$id", "$anchor")
"""Keywords that a strict tool cannot have: a regular expression may take for ever, the others make references hard to follow."""
VALUES = ("enum", "const", "default", "examples")
"""Keywords that hold values, not schemas."""

_DECODER = json.JSONDecoder(parse_constant=no_constant, parse_float=finite)
_MISTRAL_NAME = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*[\w-]+\s*)?(?:\[ARGS\]\s*)?(?=\{)")


def call_format_of(template: str) -> CallFormat:
    """The notation that a chat template uses; `hermes` if it has none, because the system message then describes it to the model."""
    if TOOL_CALLS in template:
        return "mistral"
    if HermesCalls.BEGIN in template:
        return "hermes"
    if PYTHON_TAG in template or (
        '"parameters": ' in template and "<|start_header_id|>" in template
    ):
        return "llama3_json"
    return "hermes"


def split_calls(
    text: str,
    call_format: CallFormat,
    tools: Sequence[Mapping[str, Any]],
    names: Sequence[str] | None = None,
) -> tuple[str, list[ToolCall]]:
    """The text without its valid calls, and these calls. `tools`: schemas of the tools in the request; `names`: those that may be called,
    None: any.
    """
    functions = {tool["function"]["name"]: tool["function"] for tool in tools if "function" in tool}

    def is_valid(call: ToolCall) -> bool:
        if names is not None and call.name not in names:
            return False
        return call.problem is None and fits_strict_schema(call, functions.get(call.name, {}))

    if call_format == "hermes":
        rest, calls = HermesCalls().split(text, is_valid)
        return (rest.rstrip() if calls else text), calls
    marker, parse = _FAMILIES[call_format]
    before, marker_in_text, after = text.partition(marker)
    # With the marker the model says that it calls; without it only the request's own tools are taken for calls.
    calls = parse(after) if marker_in_text else parse(text)
    are_calls = bool(marker_in_text) or all(call.name in functions for call in calls)
    if not calls or not are_calls or not all(map(is_valid, calls)):
        return text, []
    return (before.rstrip() if marker_in_text else ""), calls


def ends_within_call(rest: str, call_format: CallFormat) -> bool:
    """True if the text without its calls ends within another call. Only in Hermes: elsewhere an unfinished call makes all calls text."""
    return (
        call_format == "hermes"
        and "</tool_call>" not in rest.rpartition(HermesCalls.BEGIN)[2]
        and HermesCalls.BEGIN in rest
    )


def streamable_before_calls(
    text: str, stops: Sequence[str], call_format: CallFormat, tools: Sequence[Mapping[str, Any]]
) -> str:
    """The part of an unfinished text that is certain to be no call, nor any part of a stop string."""
    if call_format == "hermes":
        return streamable_prefix(text, (*stops, HermesCalls.BEGIN)).rstrip()
    stripped = text.lstrip(BETWEEN_CALLS if call_format == "llama3_json" else None)
    openings = (
        ["{"] if call_format == "llama3_json" else ["[", *(t["function"]["name"] for t in tools)]
    )
    if any(stripped.startswith(opening) or opening.startswith(stripped) for opening in openings):
        return ""  # it may be a call without a marker
    return streamable_prefix(text, (*stops, _FAMILIES[call_format][0])).rstrip()


def fits_strict_schema(call: ToolCall, function: Mapping[str, Any]) -> bool:
    """True unless the tool is strict and the arguments do not fit its schema, which `strict_schema_problem` has passed."""
    if not function.get("strict"):
        return True
    from jsonschema import Draft202012Validator  # a tenth of a second, for strict tools alone

    validator: Any = Draft202012Validator(function.get("parameters") or {})
    try:
        return bool(validator.is_valid(call.arguments))
    except RecursionError:  # a schema that is itself (`{"$ref": "#"}`) fits nothing
        return False


def strict_schema_problem(schema: Mapping[str, Any]) -> str | None:
    """Why arguments cannot be checked against this schema, for refusals; None if they can."""
    return _schema_problem(json.dumps(schema))


@lru_cache(maxsize=256)  # an agent sends its tools with each request
def _schema_problem(schema_text: str) -> str | None:
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError

    schema = json.loads(schema_text)
    try:
        count = _count_schemas(schema, schema, {})
    except (LookupError, ValueError, RecursionError) as error:
        return f"cannot be checked beside `strict: true`: {str(error).strip(chr(39))[:200]}"
    if count > MAX_SCHEMAS:
        return f"has more than {MAX_SCHEMAS} schemas in it, which is too much to check beside `strict: true`"
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        return f"is not a valid JSON schema: {error.message[:200]}"
    return None


def _count_schemas(schema: Any, root: Any, counts: dict[int, int]) -> int:
    """Number of schemas within a schema, each counted once for each reference to it, because checking arguments takes time in proportion.
    `counts` caches the numbers by identity of the schema. Raises LookupError for a reference that leads nowhere, ValueError for a keyword
    that is not checked.
    """
    if isinstance(schema, list):
        return sum(_count_schemas(entry, root, counts) for entry in cast("list[Any]", schema))
    if not isinstance(schema, dict):
        return 0
    mapping = cast("dict[str, Any]", schema)
    if id(mapping) not in counts:
        counts[id(mapping)] = 0  # a schema within itself costs nothing more
        total = 1
        for keyword, value in mapping.items():
            if keyword in NOT_CHECKED:
                raise ValueError(f"`{keyword}` is not supported; leave it out, or `strict`")
            if keyword == "$ref":
                total += _count_schemas(_resolve(str(value), root), root, counts)
            elif keyword in ("properties", "$defs") and isinstance(value, dict):
                property_schemas = list(cast("dict[str, Any]", value).values())
                total += _count_schemas(property_schemas, root, counts)
            elif keyword not in VALUES:
                total += _count_schemas(value, root, counts)
        counts[id(mapping)] = min(total, MAX_SCHEMAS + 1)
    return counts[id(mapping)]


def _resolve(reference: str, root: Any) -> Any:
    """The schema that `#/$defs/name` refers to."""
    target = root
    if not reference.startswith("#"):
        raise LookupError(
            f"`$ref` is {reference!r:.100}; a schema refers to itself alone (#/$defs/...)"
        )
    for part in filter(None, reference[1:].split("/")):
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if not isinstance(target, dict) or key not in target:
            raise LookupError(f"`$ref` is {reference!r:.100}, which leads nowhere")
        target = cast("dict[str, Any]", target)[key]
    return target


def _llama_calls(text: str) -> list[ToolCall]:
    """Objects with a name and parameters, separated by `;` or white space; [] unless they are the whole text."""
    calls: list[ToolCall] = []
    while text := text.lstrip(BETWEEN_CALLS):
        value, text = _next_json(text)
        call = _call_of(value)
        if call is None:
            return []
        calls.append(call)
    return calls


def _mistral_calls(text: str) -> list[ToolCall]:
    """A list of calls, or names that are followed by arguments; [] unless they are the whole text."""
    if text.lstrip().startswith("["):
        value, rest = _next_json(text.lstrip())
        entries = cast("list[Any]", value) if isinstance(value, list) else []
        calls = [_call_of(entry) for entry in entries]
        return [] if rest.strip() or None in calls else [call for call in calls if call is not None]
    named_calls: list[ToolCall] = []
    while text.strip():
        text = text.lstrip().removeprefix(TOOL_CALLS)
        match = _MISTRAL_NAME.match(text)
        value, text = _next_json(text[match.end() :]) if match else (None, "")
        if match is None or not isinstance(value, dict):
            return []
        named_calls.append(ToolCall(match[1], cast("dict[str, Any]", value)))
    return named_calls


_FAMILIES: Mapping[CallFormat, tuple[str, Callable[[str], list[ToolCall]]]] = {
    "llama3_json": (PYTHON_TAG, _llama_calls),
    "mistral": (TOOL_CALLS, _mistral_calls),
}
"""The marker before calls, and the function that reads what comes after it."""


def _call_of(value: Any) -> ToolCall | None:
    """The call of a JSON object with a name, and with arguments or parameters; None for anything else."""
    if not isinstance(value, dict):
        return None
    call = cast("dict[str, Any]", value)
    arguments = call.get("arguments", call.get("parameters"))
    if not isinstance(call.get("name"), str) or not isinstance(arguments, dict):
        return None
    return ToolCall(call["name"], cast("dict[str, Any]", arguments))


def _next_json(text: str) -> tuple[Any, str]:
    """The JSON value at the start of a text, and the rest; (None, "") if there is none."""
    try:
        value, end = _DECODER.raw_decode(text)
        refuse_lone_surrogates(text[:end].encode(), value)
    except (ValueError, RecursionError, NotStrict):
        return None, ""
    return value, text[end:]
