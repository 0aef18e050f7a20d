"""Reward functions called by hand: flat and nested completions, columns with an entry for each prompt."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.core.reward_call.request import ScoreRequest
from groupwise.tasks.rewards.nesting import accept_nested
from groupwise.tasks.rewards.rubric import Rubric


def lengths(prompts, completions, answer, bonus=0):
    """By hand: length of the text, 100 for the right answer."""
    return [
        len(text) + 100 * (text == gold) + len(prompt) * bonus
        for prompt, text, gold in zip(prompts, completions, answer, strict=True)
    ]


scored = accept_nested(lengths, "lengths")


@pytest.mark.parametrize(
    ("prompts", "completions", "answer", "found"),
    [
        (["p", "qq"], [["a", "bbb"], ["cc"]], ["bbb", "x"], [[11, 113], [22]]),
        (["p", "p"], ["a", "bb"], ["a", "a"], [111, 12]),
        (["p", "qq"], ["a", "b", "c", "d"], ["b", "c"], [11, 111, 121, 21]),
        (["p"], [["a", "bb"]], ["x", "bb"], [[11, 112]]),
    ],
    ids=["nested", "flat", "flat with fewer prompts", "an entry for each completion"],
)
def test_rewards_are_nested_as_completions_are(prompts, completions, answer, found):
    assert scored(prompts, completions, answer=answer, bonus=10) == found


def test_chats_are_no_nesting_but_lists_of_chats_are():
    def said(completions):
        return [chat[0]["content"] for chat in completions]

    chat = [{"role": "assistant", "content": "hi"}]
    other = [{"role": "assistant", "content": "ho"}]
    assert accept_nested(said, "said")(completions=[chat, other]) == ["hi", "ho"]
    assert accept_nested(said, "said")(completions=[[chat, other], [other]]) == [
        ["hi", "ho"],
        ["ho"],
    ]


def test_async_functions_stay_async_and_token_ids_are_nested_too():
    async def counts(completions, completion_ids):
        await asyncio.sleep(0)
        return [len(ids) for ids in completion_ids]

    nested = {"completions": [["a", "b"], []], "completion_ids": [[[1], [1, 2]], []]}
    assert asyncio.run(accept_nested(counts, "c")(**nested)) == [[1, 2], []]


class Watchful:
    stateful = True

    def __call__(self, completions, completion_ids, hint):
        return [len(ids) + len(h) for ids, h in zip(completion_ids, hint, strict=True)]


def test_a_run_gives_it_what_the_function_names():
    rubric = Rubric([accept_nested(Watchful(), "w")])
    request = ScoreRequest(0, ["p"] * 2, ["a", "b"], [[1], [2, 3]], {"hint": ["", "h"]}, 0, 1)
    found = asyncio.run(rubric.score(request))
    assert [member.reward for member in found.members] == [1.0, 3.0]


@settings(max_examples=40)
@given(st.lists(st.lists(st.text("ab", max_size=3), min_size=1), min_size=1))
def test_nested_is_flat(completions):
    prompts = [f"p{number}" * number for number in range(len(completions))]
    answers = [members[0] for members in completions]
    flat = lengths(
        [p for p, members in zip(prompts, completions, strict=True) for _ in members],
        [text for members in completions for text in members],
        [a for a, members in zip(answers, completions, strict=True) for _ in members],
        bonus=3,
    )
    nested = scored(prompts=prompts, completions=completions, answer=answers, bonus=3)
    assert [value for members in nested for value in members] == flat
    assert [len(members) for members in nested] == [len(members) for members in completions]
