"""What requests mean; what is refused by name is in tests/unit/server/openai/test_routes.py, with the answers."""

import pytest
from pydantic import ValidationError

from groupwise.api.schemas.openai import ChatRequest, TextRequest

HELLO = [{"role": "user", "content": "hello"}]


def chat(**more):
    return ChatRequest.model_validate({"model": "latest", "messages": HELLO, **more})


def text(**more):
    return TextRequest.model_validate({"model": "latest", "prompt": "a", **more})


def test_messages_become_what_templates_take():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    pieces = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    result = {"role": "tool", "content": "d", "tool_call_id": "1"}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    named = {"role": "user", "content": "c", "name": "me"}
    messages = [
        {"role": "developer", "content": pieces},
        named,
        {**called, "refusal": None, "annotations": [], "audio": None, "function_call": None},
        result,
    ]
    thought = {"role": "assistant", "content": "e", "reasoning_content": "f"}
    refused = {"role": "assistant", "content": None, "refusal": "no"}
    others = [message.plain() for message in chat(messages=[thought, refused]).messages]
    assert others == [thought, {"role": "assistant", "content": "no"}]
    plain = [message.plain() for message in chat(messages=messages).messages]
    assert plain == [{"role": "developer", "content": "ab"}, named, called, result]


def test_values_derived_from_request_fields():
    stops = [chat(stop=given).stops for given in (None, "a", ["a", "b"], [])]
    assert stops == [None, ("a",), ("a", "b"), ()]
    assert text(top_p=1, top_k=-1, min_p=0).restrictions == {}
    restricted = {"top_p": 0.5, "top_k": 3, "min_p": 0.1}
    assert text(**restricted).restrictions == restricted
    assert chat(max_tokens=5).longest == chat(max_completion_tokens=5).longest == 5
    assert chat(max_tokens=5, max_completion_tokens=5).longest == 5
    asked = chat(logprobs=True), text(logprobs=0), chat(logprobs=False), text()
    assert [each.wants_logprobs for each in asked] == [True, True, False, False]
    assert chat(metadata={"a" * 64: "b" * 512})
    for name in ("store", "stream", "n", "temperature"):
        assert chat(**{name: None}).model_dump() == chat().model_dump()
    wrong = {"metadata": {"a" * 65: "b"}}, {"metadata": {"a": "b" * 513}}
    for given in (*wrong, {"max_tokens": 5, "max_completion_tokens": 6}):
        with pytest.raises(ValidationError):
            chat(**given)
