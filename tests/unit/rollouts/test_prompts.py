"""Prompts as token ids: which fit, which are left out, and what is said of those that do not."""

import pytest

from groupwise.errors import TaskError
from groupwise.rollouts.prompts import tokenise
from groupwise.testing.fakes import FakeTokenizer
from groupwise.types import Example

WHERE = "Task t (t.py): get_rl_dataset"


def examples(*lengths: int) -> list[Example]:
    return [Example(index, "a" * length) for index, length in enumerate(lengths)]


def found(given, limit=None, room=100):
    return tokenise(FakeTokenizer(), given, max_prompt_length=limit, room=room, where=WHERE)


def message(*arguments, **more) -> str:
    with pytest.raises(TaskError) as caught:
        found(*arguments, **more)
    return str(caught.value)


def test_examples_and_prompts_stand_beside_each_other():
    prompts = found(examples(3, 5, 1))
    assert [len(ids) for ids in prompts.prompts] == [3, 5, 1]
    assert [example.index for example in prompts.examples] == [0, 1, 2]
    assert (prompts.longest, prompts.dropped) == (5, 0)


def test_prompts_above_the_limit_are_left_out_and_counted():
    prompts = found(examples(3, 8, 5, 9), limit=5)
    assert [example.index for example in prompts.examples] == [0, 2]
    assert [len(ids) for ids in prompts.prompts] == [3, 5]
    assert (prompts.longest, prompts.dropped) == (5, 2)


def test_where_none_is_left_the_message_has_the_numbers():
    said = message(examples(8, 9), limit=5)
    assert said.startswith(f"{WHERE}: all 2 prompts are longer than data.max_prompt_length = 5")
    assert "the shortest has 8, the longest 9" in said


def test_a_prompt_that_the_model_has_no_room_for_is_refused_with_the_remedy():
    said = message(examples(3, 12, 15), room=10)
    assert "2 of 3 prompts do not fit: the longest has 15 tokens" in said
    assert "room for 10" in said
    assert "data.max_prompt_length=10" in said
    assert found(examples(3, 12, 15), limit=10, room=10).dropped == 2


def test_a_completion_that_fills_the_model_alone_is_named():
    said = message(examples(3), room=-5)
    assert "sampler.max_completion_length" in said
    assert "by 6 tokens" in said


def test_examples_stand_beside_their_prompts():
    prompts = found(examples(*range(1, 8)))
    drawn = [prompts.at(index) for index in range(7)]
    assert [example.index for example, _ in drawn] == list(range(7))
    assert all(len(ids) == len(example.prompt) for example, ids in drawn)
