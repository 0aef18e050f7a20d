"""The forms in which rows keep messages, and what is not a message."""

from __future__ import annotations

import json

import numpy as np
import pytest

from groupwise.tasks.data.messages import (
    Unusable,
    join_conversation,
    message_of,
    messages_of,
    prompt_of,
)

PROMPT = [{"role": "user", "content": "hi"}]
BOTH = [*PROMPT, {"role": "assistant", "content": "ho"}]


@pytest.mark.parametrize("form", [
    PROMPT, tuple(PROMPT), PROMPT[0], {"role": ["user"], "content": ["hi"]}, np.array(PROMPT, dtype=object),
    json.dumps(PROMPT), json.dumps(PROMPT, indent=2), repr(PROMPT), [{"from": "human", "value": "hi"}],
    json.dumps([{"from": "human", "value": "hi"}]),
    [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}],
    [{"role": "user", "content": "hi", "tool_calls": None, "name": None}], [{"role": "User", "content": "hi", "tool_calls": []}],
    json.dumps(PROMPT[0]), json.dumps({"messages": PROMPT, "id": None}), {"messages": {"role": ["user"], "content": ["hi"]}},
    repr({"conversations": [{"from": "human", "value": "hi"}]}), [{"type": "text", "text": "hi"}],
    {"role": "user", "content": {"type": "text", "text": "hi"}},
], ids=lambda form: str(form)[:40])  # fmt: skip
def test_forms_that_can_be_read_in_one_way(form):
    assert prompt_of(form) == PROMPT
    assert messages_of(form) == PROMPT


@pytest.mark.parametrize("text", [
    "hi", "[1, 2]", '[{"role": "user"}]', '[{"role": "user", "content": "hi"}', "[{'role': os.getcwd(), 'content': 'x'}]",
    '{"role": "admin", "content": "hi"}', '{"messages": [], "tools": []}', "Read [{'role': 'user', 'content': 'hi'}].",
])  # fmt: skip
def test_other_text_is_text(text):
    assert prompt_of(text) == text
    assert messages_of(text) == [{"role": "user", "content": text}]


def test_roles_of_others_are_ours():
    told = [{"from": who, "value": "x"} for who in ("system", "human", "gpt", "observation")]
    told += [{"role": who, "content": "x"} for who in ("model", "function", "ipython", "developer")]
    assert [each["role"] for each in messages_of(told)] == [
        "system", "user", "assistant", "tool", "assistant", "tool", "tool", "developer",
    ]  # fmt: skip
    with pytest.raises(Unusable, match=r"'bing'; there are system, .*, model"):
        messages_of([{"from": "bing", "value": "x"}])
    assert message_of({"role": "system", "content": None}) == {"role": "system", "content": ""}


def test_arguments_of_tool_calls_are_objects_and_padding_is_gone_at_every_depth():
    call = {
        "type": "function",
        "id": None,
        "function": {"name": "f", "arguments": '{"a": null, "b": 1}'},
    }
    padded = {"role": "assistant", "content": None, "tool_calls": [call], "name": None}
    assert message_of(padded) == {
        "role": "assistant",
        "tool_calls": [
            {"type": "function", "function": {"name": "f", "arguments": {"a": None, "b": 1}}}
        ],
    }
    older = {"role": "assistant", "function_call": call["function"]}
    for same in ({**padded, "tool_calls": json.dumps([call])}, older):
        assert message_of(same)["tool_calls"][0]["function"]["arguments"] == {"a": None, "b": 1}
    table = {"name": "f", "arguments": {"a": None, "b": {"c": None, "d": 2}}}
    assert message_of({"role": "assistant", "tool_calls": [{"function": table}]})["tool_calls"] == [
        {"function": {"name": "f", "arguments": {"b": {"d": 2}}}}
    ]
    assert message_of({**padded, "tool_calls": [{"name": "f", "arguments": "no JSON"}]})[
        "tool_calls"
    ] == [{"name": "f", "arguments": "no JSON"}]


@pytest.mark.parametrize(("value", "told"), [
    (None, "no text and no messages"), (3, "no text and no messages"), ([], "no messages"), ("  ", "empty"), (["hi"], "not a mapping"),
    ([{"content": "hi"}], "under `role`"), ([{"role": "asistant", "content": "hi"}], "'asistant'"), ([{"role": "user"}], "no text"),
    ([{"role": "user", "content": [{"type": "image"}]}], "more than text"), ({"role": ["user"], "content": []}, "as many roles"),
])  # fmt: skip
def test_invalid_messages_are_refused_with_the_reason(value, told):
    with pytest.raises(Unusable, match=told):
        prompt_of(value)


def test_words_that_are_begun_and_their_end_are_one_message():
    assert join_conversation(PROMPT, BOTH[1:]) == BOTH
    end = [{"role": "assistant", "content": "!"}, *PROMPT]
    assert join_conversation(BOTH, end) == [
        *PROMPT,
        {"role": "assistant", "content": "ho!"},
        *PROMPT,
    ]
    calls = {"role": "assistant", "tool_calls": [{"name": "f"}]}
    assert join_conversation(BOTH, [calls]) == [*PROMPT, {**calls, "content": "ho"}]
    for prompt, said in ((BOTH, BOTH), ([*PROMPT, calls], BOTH[1:])):
        assert join_conversation(prompt, said) == [*prompt, *said], "nothing is gone on with"
