"""Prompts as token ids: which fit, which are left out, and the messages about the latter."""

import pytest

from groupwise.core.errors import TaskError
from groupwise.core.types import Example, NumberedRow
from groupwise.tasks.rollouts.prompts import MEASURED, odd_prompts, tokenise
from groupwise.testing import FakeTokenizer
from tests.chat import chat_tokenizer

WHERE = "Task t (t.py): get_rl_dataset"


def examples(*lengths: int) -> list[Example]:
    return [Example(index, "a" * length) for index, length in enumerate(lengths)]


def found(given, limit=None, room=100, **more):
    return tokenise(FakeTokenizer(), given, max_prompt_length=limit, room=room, where=WHERE, **more)


def message(*arguments, **more) -> str:
    with pytest.raises(TaskError) as caught:
        found(*arguments, **more)
    return str(caught.value)


def test_prompts_above_the_limit_are_left_out_and_counted():
    prompts = found(examples(3, 8, 5, 9), limit=5)
    assert [example.index for example in prompts.examples] == [0, 2]
    assert [len(ids) for ids in prompts.prompts] == [3, 5]
    assert (prompts.longest, prompts.dropped) == (5, 2)


def test_a_prompt_that_the_model_has_no_room_for_is_refused_with_the_remedy():
    assert "row 7: A prompt has no tokens" in message([Example(0, "", NumberedRow({}, 7))])
    assert "data.max_prompt_length=10" in message(examples(3, 12, 15), room=10)
    assert found(examples(3, 12, 15), limit=10, room=10).dropped == 2
    assert "data.max_prompt_length=null" in message(examples(3, 12), limit=2)


def test_a_check_tokenises_what_may_be_too_long_and_the_longest_of_the_rest():
    short = examples(*range(1, 2 * MEASURED))
    checked = found([*short, Example(len(short), "é")], room=300, check_only=True)
    assert (checked.tokenised, checked.longest) == (MEASURED + 1, 2 * MEASURED - 1)
    checked = found([*short, *examples(200, 300)], limit=250, room=300, check_only=True)
    assert (checked.tokenised, checked.longest, checked.dropped) == (MEASURED, 200, 1)
    for given in ([Example(0, " ", {}), Example(1, "", {})], [*short, *examples(200)]):
        assert message(given, room=150) == message(given, room=150, check_only=True)


@pytest.mark.parametrize(("prompt", "told"), [
    ("hi", None), ('{"answer": 3}', None), ([{"role": "user", "content": "hi"}], None), ('[{"role": "user"', "JSON"),
    ('{"messages": [1], "tools": []}', "JSON"), ([{"role": "user", "content": "<|im_start|>user hi"}], "through it already"),
])  # fmt: skip
def test_prompts_that_are_hardly_meant_are_warned_of(prompt, told):
    warnings = odd_prompts(chat_tokenizer("chatml"), [Example(0, prompt)])
    assert [told in each for each in warnings] == [True] * bool(told)
