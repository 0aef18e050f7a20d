"""Tokenizers and chat templates that work, and ones with one fault each."""

from __future__ import annotations

from typing import Any

from groupwise.core.findings import Finding
from groupwise.engine.models.tiny import CHAT_TEMPLATE, tiny_tokenizer
from groupwise.training.checks.doctor_template import (
    answer_end,
    check_tokenizer,
    opening_messages,
    stop_tokens,
)

EOS = 1
LOOP = "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}{% endfor %}"
STRIPS_THOUGHTS = (
    "{% for message in messages %}"
    "{% set kept = message['content'] if loop.last else message['content'].split('</think>')[-1].lstrip() %}"
    "{{ '<|' + message['role'] + '|>' + kept }}{% if message['role'] == 'assistant' %}{{ '<eos>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def tokenizer(template: str | None = CHAT_TEMPLATE, **changes: Any) -> Any:
    made = tiny_tokenizer()
    made.chat_template = template
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def found(made: Any) -> dict[str, Finding]:
    return {finding.name: finding for finding in check_tokenizer(made)}


def test_the_tiny_tokenizer_is_well():
    assert {each.level for each in found(tokenizer()).values()} == {"ok"}


def test_a_generation_prompt_that_an_answer_does_not_begin_with_breaks_the_prefix():
    thinking = CHAT_TEMPLATE.replace("{{ '<|assistant|>' }}", "{{ '<|assistant|><think>' }}")
    said = found(tokenizer(thinking))["template prefix"]
    assert said.level == "warning"
    assert said.data == {"prompt": "<think>", "with_answer": "It makes five.<eos>"}


def test_a_template_that_removes_earlier_thoughts_is_reported():
    said = found(tokenizer(STRIPS_THOUGHTS))
    assert said["template prefix"].level == "ok"
    assert said["earlier turns"].level == "warning"
    (thoughts,) = said["earlier turns"].data["rewritten"]
    assert thoughts.startswith(r"thoughts (from '<think>\nTwo and three.\n</think>")


def test_templates_that_rewrite_earlier_answers_or_do_not_ask_for_one_are_reported():
    kept = "(message['content'] if loop.last else '...')"
    shouting = CHAT_TEMPLATE.replace("message['content']", kept)
    assert "answers" in found(tokenizer(shouting))["earlier turns"].measured
    assert found(tokenizer(LOOP))["generation prompt"].level == "warning"


def test_a_completion_must_end_where_the_template_ends_an_answer_and_at_the_end_of_sequence():
    ended = CHAT_TEMPLATE.replace("<eos>", "<unk>")
    assert answer_end(tokenizer(ended)) == 2
    said = stop_tokens(tokenizer(ended), [EOS], ())
    assert said.level == "problem"
    assert "sampler.stop_token_ids=[2]" in said.remedy
    assert stop_tokens(tokenizer(ended), [EOS, 2], ()).level == "ok"
    said = stop_tokens(tokenizer(None), [5], ())
    assert (said.level, said.data["missing"]) == ("problem", EOS)


def test_a_template_without_a_system_role_is_asked_without():
    made = tokenizer(NO_SYSTEM + CHAT_TEMPLATE)
    assert [message["role"] for message in opening_messages(made)] == ["user"]
    assert {each.level for each in found(made).values()} == {"ok"}


NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
)
