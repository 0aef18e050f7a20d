"""Tool calls as each family of models writes them, text that is not a call, and how much of a text is streamed before that is known."""

import json
from pathlib import Path

import pytest

from groupwise.core.types import CallFormat
from groupwise.tasks.openai.tools import (
    call_format_of,
    ends_within_call,
    split_calls,
    streamable_before_calls,
    strict_schema_problem,
)

TEMPLATES = Path(__file__).parents[3] / "fixtures" / "chat_templates"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "pattern": {"$ref": "#/$defs/pattern"}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"pattern": {"type": "string"}},
}


def tool(name, **more):
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **more}}


TOOLS = [tool("add"), tool("look_up")]
ADD, LOOK = ("add", {"a": 1}), ("look_up", {"a": 2})
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
LLAMA = '{"name": "add", "parameters": {"a": 1}}'
LLAMA_TWICE = LLAMA + '; {"name": "look_up", "parameters": {"a": 2}}'
MISTRAL = '[{"name": "add", "arguments": {"a": 1}, "id": "x"}, {"name": "look_up", "arguments": {"a": 2}}]'


def split_text(text, call_format, tools=TOOLS):
    rest, calls = split_calls(text, call_format, tools)
    return rest, [(call.name, call.arguments) for call in calls]


@pytest.mark.parametrize(("call_format", "text", "rest", "calls"), [
    ("hermes", f"I add.\n{HERMES}", "I add.", [ADD]),
    ("llama3_json", LLAMA, "", [ADD]),
    ("llama3_json", f"\n{LLAMA_TWICE}\n", "", [ADD, LOOK]),
    ("llama3_json", f"I add. <|python_tag|>{LLAMA_TWICE}", "I add.", [ADD, LOOK]),
    ("llama3_json", '<|python_tag|>{"name": "other", "parameters": {}}', "", [("other", {})]),
    ("mistral", f"[TOOL_CALLS] {MISTRAL}", "", [ADD, LOOK]),
    ("mistral", MISTRAL, "", [ADD, LOOK]),
    ("mistral", 'I add.[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]look_up[CALL_ID]x1[ARGS]{"a": 2}', "I add.", [ADD, LOOK]),
    ("mistral", 'add{"a": 1}look_up{"a": 2}', "", [ADD, LOOK]),
])  # fmt: skip
def test_calls_of_each_family(call_format, text, rest, calls):
    assert split_text(text, call_format) == (rest, calls)


@pytest.mark.parametrize(("call_format", "text"), [
    ("llama3_json", f"I add. {LLAMA}"), ("llama3_json", LLAMA[:-1]), ("llama3_json", LLAMA + " and so on"),
    ("llama3_json", '{"name": "Ada", "parameters": {}}'), ("llama3_json", '{"a": 1}'), ("llama3_json", "<|python_tag|>print(1)"),
    ("llama3_json", LLAMA.replace("1", "NaN")), ("llama3_json", "[" * 100_000), ("llama3_json", '{"name": "add", "parameters": 1}'),
    ("mistral", "[TOOL_CALLS] []"), ("mistral", "[1, 2]"), ("mistral", f"{MISTRAL} and"), ("mistral", "[TOOL_CALLS]add[ARGS]{"),
    ("mistral", '[{"name": "Ada", "arguments": {}}]'), ("mistral", 'Ada {"a": 1}'), ("mistral", "[TOOL_CALLS]add 1"),
    ("hermes", LLAMA), ("hermes", "<tool_call>{</tool_call>"), ("mistral", MISTRAL.replace("1", '"\\ud800"')),
    *(("hermes", HERMES.replace("1", value)) for value in ("NaN", "-Infinity", "1e999", '"\\ud800"')),
])  # fmt: skip
def test_malformed_tool_calls_stay_text(call_format, text):
    assert split_text(text, call_format) == (text, [])


@pytest.mark.parametrize("call_format", ["hermes", "llama3_json", "mistral"])
@pytest.mark.parametrize("text", [f"I add.\n{HERMES}", f"I add. <|python_tag|>{LLAMA}", LLAMA, f";{LLAMA}", f"a [TOOL_CALLS]{MISTRAL}",
    MISTRAL,
    'add{"a": 1}', "add it up", "[1, 2]", " {", "a < b", "\n", "look", "add"])  # fmt: skip
def test_streamed_text_is_a_prefix_of_the_final_text(call_format, text):
    final, _ = split_calls(text, call_format, TOOLS)
    shown = ""
    for end in range(len(text) + 1):
        now = streamable_before_calls(text[:end], (), call_format, TOOLS)
        assert now.startswith(shown)
        assert final.startswith(now)
        shown = now
    assert streamable_before_calls("Some words", ("rds",), call_format, TOOLS) == "Some wo"


def test_a_mark_within_a_string_ends_no_call():
    text = HERMES.replace("1}}", '"</tool_call> <tool_call> \\" {"}}') + HERMES
    call = ("add", {"a": '</tool_call> <tool_call> " {'})
    assert split_text(text, "hermes") == ("", [call, ADD])
    broken = HERMES.replace("1}}", '"never ends}}')
    assert split_text(broken + HERMES, "hermes") == (broken, [ADD])
    assert not split_text("<tool_call>{" + '"a": ' * 20_000, "hermes")[1]


def test_only_tools_that_may_be_called_are_called():
    texts: dict[CallFormat, str] = {"hermes": HERMES, "llama3_json": LLAMA, "mistral": MISTRAL}
    for call_format, text in texts.items():
        assert split_calls(text, call_format, TOOLS, ["look_up"]) == (text, [])
    assert split_calls(HERMES, "hermes", TOOLS, ["add"])[1]


def test_half_a_call_is_seen():
    for rest, is_half in (
        ("", False), ("I add.", False), ("<tool_call>x</tool_call>", False), ('<tool_call>\n{"na', True),
        ("<tool_call>x</tool_call> <tool_call>", True),
    ):  # fmt: skip
        assert ends_within_call(rest, "hermes") is is_half


def test_strict_tools_get_arguments_that_fit():
    strict = [tool("add", strict=True)]
    fits = HERMES.replace("1}}", '1, "pattern": "x"}}')
    assert split_text(fits, "hermes", strict) == ("", [("add", {"a": 1, "pattern": "x"})])
    for wrong in ('"one"', '1, "b": 2', '1, "pattern": 3'):
        text = HERMES.replace("1}}", wrong + "}}")
        assert split_text(text, "hermes", strict) == (text, [])
        assert split_text(text, "hermes")[1]
    assert split_text(LLAMA.replace("1", "1.5"), "llama3_json", strict)[1] == []
    circle = [tool("add", strict=True)]
    circle[0]["function"]["parameters"] = {"$ref": "#"}
    assert split_text(HERMES, "hermes", circle) == (HERMES, [])


def doubling(levels):
    """A schema whose check takes 2 ** levels times as long as that of its last part."""
    both = {f"s{n}": {"allOf": [{"$ref": f"#/$defs/s{n + 1}"}] * 2} for n in range(levels)}
    return {"$ref": "#/$defs/s0", "$defs": {**both, f"s{levels}": {"type": "object"}}}


def test_a_schema_that_cannot_be_checked_is_refused():
    values = {"type": "object", "default": {"pattern": "x"}, "enum": [{"$ref": "x"}]}
    for right in (SCHEMA, {}, values, {"items": {"$ref": "#"}}, doubling(3)):
        assert strict_schema_problem(right) is None
    for wrong in (
        {"type": "strange"},
        {"properties": {"a": {"type": "string", "pattern": "(a+)+"}}},
        {"$ref": "https://example.com/schema"},
        {"items": {"$ref": "#/$defs/none"}},
        {"properties": {f"p{n}": {} for n in range(1001)}},
        doubling(30),
        doubling(5000),
    ):
        assert strict_schema_problem(wrong), json.dumps(wrong)[:200]


LLAMA_32 = (
    """{{- '<|start_header_id|>' + '{"name": "' + tool_call.name + '", ' + '"parameters": ' }}"""
)


def test_the_notation_is_that_of_the_template():
    formats = {path.stem: call_format_of(path.read_text()) for path in TEMPLATES.glob("*.jinja")}
    assert {*formats.values()} == {"hermes"}
    assert formats["qwen3"] == "hermes"
    assert call_format_of("{{ '<|python_tag|>' }}") == call_format_of(LLAMA_32) == "llama3_json"
    assert call_format_of("{{ '[TOOL_CALLS]' }} <tool_call>") == "mistral"
