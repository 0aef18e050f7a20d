"""What requests mean; what is refused by name is in tests/unit/server/openai/test_routes.py, with the answers."""

import pytest
from pydantic import ValidationError

from groupwise.wire.openai import ChatRequest, TextRequest

HELLO = [{"role": "user", "content": "hello"}]


def chat(**more):
    return ChatRequest.model_validate({"model": "latest", "messages": HELLO, **more})


def text(**more):
    return TextRequest.model_validate({"model": "latest", "prompt": "a", **more})


def test_messages_become_what_templates_take():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {
            "role": "developer",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
        {"role": "user", "content": "c", "name": "me"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "content": "d", "tool_call_id": "1"},
    ]
    plain = [message.plain() for message in chat(messages=messages).messages]
    assert plain == [
        {"role": "system", "content": "ab"},
        {"role": "user", "content": "c", "name": "me"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "d", "tool_call_id": "1"},
    ]


@pytest.mark.parametrize(
    ("given", "stops"), [(None, None), ("a", ("a",)), (["a", "b"], ("a", "b")), ([], ())]
)
def test_stops(given, stops):
    assert chat(stop=given).stops == stops


def test_only_what_restricts_is_a_restriction():
    assert text(top_p=1, top_k=-1, min_p=0).restrictions == {}
    assert text(top_p=0.5, top_k=3, min_p=0.1).restrictions == {
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.1,
    }


def test_both_names_of_the_longest_completion():
    assert chat(max_tokens=5).longest == chat(max_completion_tokens=5).longest == 5
    assert chat(max_tokens=5, max_completion_tokens=5).longest == 5
    with pytest.raises(ValidationError, match="give one of the two"):
        chat(max_tokens=5, max_completion_tokens=6)


@pytest.mark.parametrize("metadata", [{"a" * 65: "b"}, {"a": "b" * 513}])
def test_metadata_has_openais_limits(metadata):
    with pytest.raises(ValidationError, match="above 64 characters, or a value above 512"):
        chat(metadata=metadata)
    assert chat(metadata={"a" * 64: "b" * 512})


@pytest.mark.parametrize("name", ["store", "stream", "n", "temperature"])
def test_null_is_as_good_as_nothing(name):
    null, without = chat(**{name: None}), chat()
    assert null.model_dump() == without.model_dump()
    assert null.choices == 1


def test_log_probabilities_are_asked_for_in_two_ways():
    assert chat(logprobs=True).wants_logprobs
    assert text(logprobs=0).wants_logprobs
    assert not chat(logprobs=False).wants_logprobs
    assert not text().wants_logprobs
