"""One place that knows both forms of a completion."""

import pytest

from groupwise.core.reward_call.text import as_completion, completion_text, completion_texts


@pytest.mark.parametrize("prompt", ["text", [{"role": "user", "content": "x"}]])
def test_round_trip(prompt):
    completion = as_completion(prompt, "answer")
    assert isinstance(completion, str) is isinstance(prompt, str)
    assert completion_text(completion) == "answer"


def test_only_the_assistant_is_read():
    messages = [
        {"role": "assistant", "content": "one"},
        {"role": "tool", "content": "noise"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"content": "two"},
    ]
    assert completion_text(messages) == "one\n\ntwo"


def test_content_in_parts_is_its_text():
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    assert completion_text([{"role": "assistant", "content": parts}]) == "ab"


def test_reasoning_that_a_prompt_begins_stands_before_the_completion():
    prefill = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "<think>"}]
    texts = completion_texts(["a", "b"], {"prompts": [prefill, "Why?"]})
    assert texts == ["<think>a", "b"]
    seen = {"prompts": [prefill, "Why?"], "prompts_seen": ["…<think>", "…<|assistant|><think>\n"]}
    assert completion_texts(["a", "b"], seen) == ["<think>a", "<think>\nb"]
    assert completion_texts(["a"], {}) == ["a"]
