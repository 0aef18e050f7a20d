"""Datasets and hooks as `groupwise check` sees them."""

from typing import Any

from groupwise.core.types import Example, NumberedRow, Prompt
from groupwise.tasks.data.overlap import same_prompt, same_row
from groupwise.testing import FakeTokenizer
from groupwise.training.checks.check_data import (
    check_dataset,
    check_overlap,
    first_prompts,
    prompt_as_text,
)

TOKENIZER = FakeTokenizer()


def examples(*prompts: Prompt, **columns: Any) -> list[Example]:
    """Rows that a task has taken from others, which come after 900 that it left out."""
    return [
        Example(index, prompt, NumberedRow(columns, 900 + index))
        for index, prompt in enumerate(prompts)
    ]


def findings(
    found: list[Example], tokenizer: Any = None, room: int | None = None, same=same_prompt
):
    return {each.name: each for each in check_dataset("data", found, tokenizer, room, same)}


def test_prompts_that_do_not_fit_are_a_problem_with_the_key_to_set():
    said = findings(examples("ab", "abcdef"), TOKENIZER, room=4)["data: length"]
    assert said.level == "problem"
    assert "data.max_prompt_length=4" in said.remedy
    assert "data: length" not in findings(examples("ab", "abcd"), TOKENIZER, room=4)
    none = findings(examples("ab"), TOKENIZER, room=0)["data: length"]
    assert "max_prompt_length" not in none.remedy, "which the config would refuse"


def test_duplicates_are_counted_by_prompt():
    said = findings(examples("a", "b", "a", "a"))["data: duplicates"]
    assert said.level == "warning"
    assert said.data == {"surplus": 2, "most": 3, "rows": [0, 2, 3]}
    assert 'the most frequent one, "a", occurs 3 times (rows 0, 2, 3)' in said.measured
    assert "data: duplicates" not in findings(examples("a", "b"))


def test_rows_of_an_environment_differ_by_their_columns():
    found = [Example(0, "Guess.", {"secret": 1}), Example(1, "Guess.", {"secret": 2})]
    assert "data: duplicates" in findings(found)
    assert "data: duplicates" not in findings(found, same=same_row)
    assert check_overlap(found[:1], found[1:], same_row).level == "ok"
    assert check_overlap(found, found[1:], same_row).level == "warning"


def test_held_out_prompts_that_are_trained_on_are_a_warning():
    train, held = examples("a", "b", "c"), examples("c", "d")
    said = check_overlap(train, held, same_prompt)
    assert (said.level, said.data["shared"]) == ("warning", 1)
    assert '("c", held-out row 0, for example)' in said.measured
    assert check_overlap(train, examples("d"), same_prompt).level == "ok"


def test_prompts_are_rendered_with_their_special_tokens():
    from groupwise.engine.models.tiny import tiny_tokenizer

    chat = [{"role": "user", "content": "hi"}]
    assert first_prompts(examples(chat, "x", "y"), tiny_tokenizer(), 2) == [
        "<|user|>hi<|assistant|>",
        "x",
    ]
    assert first_prompts(examples(chat), None, 2) == ["[user] hi"]
    assert prompt_as_text("x") == "x"
