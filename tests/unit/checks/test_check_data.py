"""Datasets and hooks as `groupwise check` sees them."""

from types import SimpleNamespace
from typing import Any

import pytest

from groupwise.checks.check_data import (
    check_dataset,
    check_hooks,
    check_overlap,
    described_columns,
    first_prompts,
    prompt_lengths,
    spread,
    written,
)
from groupwise.data.overlap import same_prompt, same_row
from groupwise.errors import TaskError
from groupwise.tasks.contract import load_task
from groupwise.testing.fakes import FakeTokenizer
from groupwise.types import Example, Prompt

TOKENIZER = FakeTokenizer()


def examples(*prompts: Prompt, **columns: Any) -> list[Example]:
    return [Example(index, prompt, dict(columns)) for index, prompt in enumerate(prompts)]


def findings(
    found: list[Example], tokenizer: Any = None, room: int | None = None, same=same_prompt
):
    return {each.name: each for each in check_dataset("data", found, tokenizer, room, same)}


def task(**hooks: Any):
    return load_task(SimpleNamespace(**hooks))


def test_size_columns_and_lengths_are_told():
    said = findings(examples("ab", "abcd", answer="x"), TOKENIZER)["data"]
    assert said.level == "ok"
    assert said.data["rows"] == 2
    assert said.data["columns"] == {"answer": "text"}
    assert said.data["prompt_length"] == {
        "min": 2, "median": 3, "max": 4, "unit": "tokens", "measured": 2,
    }  # fmt: skip


def test_without_a_tokenizer_lengths_are_in_characters():
    assert prompt_lengths(examples("abc"), None) == ([3], "characters")


def test_a_long_dataset_is_measured_from_end_to_end():
    found = [Example(index, "x" * (1 + index // 2500)) for index in range(5000)]
    lengths, _ = prompt_lengths(found, None)
    assert len(lengths) == 2000
    assert set(lengths) == {1, 2}


def test_prompts_that_do_not_fit_are_a_problem_with_the_key_to_set():
    said = findings(examples("ab", "abcdef"), TOKENIZER, room=4)["data: length"]
    assert said.level == "problem"
    assert "data.max_prompt_length=4" in said.remedy
    assert "data: length" not in findings(examples("ab", "abcd"), TOKENIZER, room=4)


def test_duplicates_are_counted_by_prompt():
    said = findings(examples("a", "b", "a", "a"))["data: duplicates"]
    assert said.level == "warning"
    assert said.data == {"surplus": 2, "most": 3, "rows": [0, 2, 3]}
    assert "data: duplicates" not in findings(examples("a", "b"))


def test_rows_of_an_environment_differ_by_their_columns():
    found = [Example(0, "Guess.", {"secret": 1}), Example(1, "Guess.", {"secret": 2})]
    assert "data: duplicates" in findings(found)
    assert "data: duplicates" not in findings(found, same=same_row)
    assert check_overlap(found[:1], found[1:], same_row).level == "ok"
    assert check_overlap(found, found[1:], same_row).level == "warning"


def test_columns_that_only_some_rows_have_are_named():
    found = [Example(0, "a", {"x": 1, "y": 2}), Example(1, "b", {"x": None})]
    assert findings(found)["data: columns"].data == {"partial": ["y"]}
    assert described_columns(found) == {"x": "number, missing in 1", "y": "number, missing in 1"}


@pytest.mark.parametrize(
    ("value", "kind"),
    [("x", "text"), (True, "yes or no"), (2, "number"), (["a", "b"], "list of text"), ([1, "a"], "list"),
     ({"a": 1}, "mapping"), (b"x", "bytes")],
)  # fmt: skip
def test_columns_are_called_by_what_they_hold(value, kind):
    assert described_columns([Example(0, "p", {"c": value})]) == {"c": kind}


def test_held_out_prompts_that_are_trained_on_are_a_warning():
    train, held = examples("a", "b", "c"), examples("c", "d")
    said = check_overlap(train, held, same_prompt)
    assert (said.level, said.data["shared"]) == ("warning", 1)
    assert check_overlap(train, examples("d"), same_prompt).level == "ok"


def test_overlap_compares_chats_by_their_messages():
    chat = [{"role": "user", "content": "a"}]
    assert check_overlap(examples(chat), examples([dict(chat[0])]), same_prompt).data["shared"] == 1


def test_prompts_are_rendered_with_their_special_tokens():
    from groupwise.models.tiny import tiny_tokenizer

    chat = [{"role": "user", "content": "hi"}]
    assert first_prompts(examples(chat, "x", "y"), tiny_tokenizer(), 2) == [
        "<|user|>hi<|assistant|>",
        "x",
    ]
    assert first_prompts(examples(chat), None, 2) == ["[user] hi"]
    assert written("x") == "x"


def test_spread_takes_rows_from_the_whole():
    assert [each.index for each in spread(examples(*"abcdefgh"), 4)] == [0, 2, 4, 6]
    assert len(spread(examples("a"), 4)) == 1


def test_hooks_are_listed_with_the_verbs_that_they_suffice_for():
    said = check_hooks(task(get_eval_dataset=lambda config: [], get_reward_funcs=lambda config, tokenizer: [],
                            get_rl_dataset=lambda config: []))  # fmt: skip
    assert said.data["verbs"] == ["rl"]
    assert said.data["missing"]["eval"] == ["compute_metrics"]


def test_all_wrong_signatures_are_told_at_once():
    with pytest.raises(TaskError) as refused:
        check_hooks(task(get_rl_dataset=lambda a, b: [], get_reward_funcs=lambda a, b, c: []))
    assert "get_rl_dataset has the wrong" in str(refused.value)
    assert "get_reward_funcs has the wrong" in str(refused.value)


def test_a_task_that_suffices_for_nothing_is_refused():
    with pytest.raises(TaskError, match="has no get_reward_funcs"):
        check_hooks(task(get_rl_dataset=lambda config: []))
