"""Conversations through the chat template: where the model continues, and what the template receives in addition to the messages."""

from __future__ import annotations

from typing import Any

import pytest

from groupwise.core.errors import TaskError
from groupwise.engine.models.chat_template import (
    OF_THE_MODEL,
    Chat,
    TemplateRefused,
    prompt_text,
    render,
)
from tests.chat import SPECIAL, chat_tokenizer

PROMPT = [{"role": "user", "content": "1+1?"}]
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}{% endif %}"
)


def with_template(template: str) -> Any:
    made = chat_tokenizer("chatml")
    made.chat_template = template
    return made


def begun(words: str) -> list[dict[str, str]]:
    return [*PROMPT, {"role": "assistant", "content": words}]


@pytest.mark.parametrize("words", ["Let me think.\n<think>", "<think>\n", " 2", "{"])
@pytest.mark.parametrize("family", sorted(SPECIAL))
def test_the_model_continues_with_words_that_the_assistant_has_begun(family, words):
    tokenizer = chat_tokenizer(family)
    text = prompt_text(tokenizer, Chat(begun(words)))
    probe = render(tokenizer, Chat(begun("⟦words⟧")), ask=False).partition("⟦words⟧")[0]
    assert text.endswith(words), "they are neither trimmed nor closed"
    opened = "<think>\n" if family == "deepseek_r1" and "<think>" not in words else ""
    assert text.removesuffix(words) == probe.removesuffix("<think>\n\n</think>\n\n") + opened


@pytest.mark.parametrize(("words", "arguments", "end"), [
    ("<think>\nWell", {}, "assistant\n<think>\nWell"), ("Let me think.\n<think>", {}, "assistant\nLet me think.\n<think>"),
    ("Well", {}, "assistant\n<think>\nWell"), ("Two", {"enable_thinking": False}, "assistant\n<think>\n\n</think>\n\nTwo"),
    ("<think>", {"enable_thinking": False}, "assistant\n<think>"),
])  # fmt: skip
def test_thoughts_are_opened_once(words, arguments, end):
    text = prompt_text(with_template(THINKING), Chat(begun(words), (), arguments))
    assert text.endswith(f"<|im_start|>{end}")
    assert text.count("<|im_start|>") == 2


@pytest.mark.parametrize(
    "opens", ["[THINK]", "◁think▷", "<|begin_of_thought|>", "<|channel|>analysis<|message|>"]
)
def test_thoughts_with_other_marks_are_opened_once(opens):
    tokenizer = with_template(
        "{% for m in messages %}{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}"
        + opens
        + "{% endif %}"
    )
    for words in (opens + "So", "So"):
        assert prompt_text(tokenizer, Chat(begun(words))) == f"1+1?\n{opens}So"


FUNCTION = {"name": "add", "arguments": {"a": "x"}}
CALLED = [
    *PROMPT,
    {"role": "assistant", "tool_calls": [{"type": "function", "function": FUNCTION}]},
]


@pytest.mark.parametrize(("function", "condition"), [
    ("{{ f.name }}({{ f.arguments | tojson }})", "m.tool_calls"), ("{{ f.name }}({{ f.arguments }})", "m.tool_calls"),
    ("{{ f.name + '(' + f.arguments + ')' }}", "m['content'] is none"), ("{{ f.name }}({{ f.arguments | tojson }})", "m.content == none"),
    ("{{ f.name }}({{ f.arguments | tojson }})", "m.content is not defined"),
])  # fmt: skip
def test_tool_calls_reach_templates_as_they_take_them(function, condition):
    tokenizer = with_template(
        "{% for m in messages %}{% if " + condition + " %}{% set f = m.tool_calls[0].function %}"
        + function + "{% else %}{{ m.content + '?' }}{% endif %}{% endfor %}"
    )  # fmt: skip
    as_text = [
        PROMPT[0],
        {**CALLED[1], "tool_calls": [{"function": {**FUNCTION, "arguments": '{"a": "x"}'}}]},
    ]
    for called in (CALLED, as_text):
        assert render(tokenizer, Chat(called), ask=False) == '1+1??add({"a": "x"})'


def test_a_template_without_tool_calls_gets_them_as_text_or_refuses():
    calling = [*PROMPT, {**CALLED[1], "content": "I add."}]
    made = render(
        with_template("{% for m in messages %}{{ m.content }}|{% endfor %}"),
        Chat(calling),
        ask=False,
    )
    assert (
        made == '1+1?|I add.\n<tool_call>\n{"name": "add", "arguments": {"a": "x"}}\n</tool_call>|'
    )
    with pytest.raises(TemplateRefused, match="all tool calls"):
        render(
            with_template("{% for m in messages %}{{ m.role }}{% endfor %}add"),
            Chat(calling),
            ask=False,
        )


@pytest.mark.parametrize(("more", "role"), [("", "system"), ("{# developer #}", "developer")])
def test_a_developer_is_the_system_where_the_template_knows_none(more, role):
    tokenizer = with_template("{% for m in messages %}{{ m.role }}{% endfor %}" + more)
    assert render(tokenizer, Chat([{"role": "developer", "content": "x"}]), ask=False) == role


@pytest.mark.parametrize(("messages", "problem"), [
    *(([*PROMPT, {"role": "assistant", **last}], "no text or calls tools") for last in (
        {"content": ""}, {"content": None}, {"content": "x", "tool_calls": [{}]})),
    ([{"role": "assistant", "content": "Hi"}], "nothing is asked before"), ([], "^The conversation has no message"),
])  # fmt: skip
def test_a_chat_that_cannot_be_continued_is_refused(messages, problem):
    with pytest.raises(TaskError, match=problem):
        prompt_text(chat_tokenizer("chatml"), Chat(messages))


def test_a_template_that_does_not_show_where_the_answer_begins_cannot_continue():
    hidden = with_template("{% for m in messages | reverse %}{{ m.content }}\n{% endfor %}")
    with pytest.raises(TaskError, match="add_generation_prompt"):
        prompt_text(hidden, Chat(begun("x")))


def test_a_row_goes_before_the_model_and_what_no_template_knows_is_an_error():
    tokenizer = with_template(THINKING)
    setattr(tokenizer, OF_THE_MODEL, {"enable_thinking": False})
    assert prompt_text(tokenizer, Chat(PROMPT)).endswith("</think>\n\n")
    assert prompt_text(tokenizer, Chat(PROMPT, (), {"enable_thinking": True})).endswith("<think>\n")
    for own in ("add_generation_prompt", "documents", "tokenizer_kwargs"):
        with pytest.raises(TaskError, match=f"{own}.*for `apply_chat_template`"):
            prompt_text(tokenizer, Chat(PROMPT, (), {own: False}))
    with pytest.raises(TaskError, match="'enable_thoughts'"):
        prompt_text(tokenizer, Chat(PROMPT, (), {"enable_thoughts": True}))


def test_a_conversation_that_the_template_does_not_take_is_distinguished_from_other_mistakes():
    with pytest.raises(TemplateRefused, match="roles user: no user"):
        prompt_text(with_template("{{ raise_exception('no user') }}"), Chat(PROMPT))
    with pytest.raises(TaskError, match="no chat template") as missing:
        prompt_text(with_template(""), Chat(PROMPT))
    assert not isinstance(missing.value, TemplateRefused)
