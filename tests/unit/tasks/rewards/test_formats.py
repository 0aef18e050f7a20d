"""Layouts: which texts have one, which nearly do, and that an empty pair of tags does not count."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.core.reward_call.tags import REASONING
from groupwise.tasks.rewards.formats import (
    MatchFormat,
    SoftFormat,
    StrictFormat,
    ThinkFormat,
    XmlCount,
    without_empty_pairs,
)

STRICT = "<reasoning>\nSix and one.\n</reasoning>\n<answer>\n7\n</answer>"
LOOSE = "Well: <Reasoning>six</Reasoning> so <answer>7</answer> it is"
HOLLOW = "<reasoning> </reasoning><answer>\n</answer>"
NESTED = "<reasoning><answer></answer></reasoning>"
CROSSED = "<reasoning><answer> </reasoning></answer>"
UNSEEN = "<reasoning>\u200b\ufeff</reasoning><answer> \u200c\u200d\u2060</answer>"
REWARDS = (StrictFormat(), SoftFormat(), XmlCount(), MatchFormat())
PIECES = st.lists(
    st.sampled_from([*REASONING.four, *(tag.upper() for tag in REASONING.four), "7", " ", "\n"]),
    max_size=10,
).map("".join)


def value(reward, text):
    (one,) = reward([text])
    return one


@pytest.mark.parametrize(("text", "expected"), [
    (STRICT, 0.5), (STRICT + "\n", 0.5), (STRICT.replace("Six", "Six\n\nlines"), 0.5),
    (" " + STRICT, 0.0), (STRICT + "\n\n", 0.0), (STRICT + " I think", 0.0),
    (STRICT.replace("\n7\n", "7"), 0.0), (STRICT.replace(">\n<answer>", "><answer>"), 0.0),
    (STRICT.replace("7", " "), 0.0), (STRICT.replace("7", "\u200b"), 0.0),
    (STRICT.replace("Six and one.", " "), 0.0), (STRICT.replace("7", "<answer>7"), 0.0),
    (STRICT.upper(), 0.0), (LOOSE, 0.0), ("", 0.0),
])  # fmt: skip
def test_the_strict_layout_is_exact(text, expected):
    assert value(StrictFormat(), text) == expected


@pytest.mark.parametrize(("text", "expected"), [
    (STRICT, 0.5), (LOOSE, 0.5), ("<reasoning></reasoning>" + LOOSE, 0.5),
    ("<answer>7</answer><reasoning>six</reasoning>", 0.0),
    ("<reasoning>six<answer>7</answer></reasoning>", 0.0),
    ("<reasoning>six</reasoning><answer>7", 0.0),
    ("<reasoning>six</reasoning><answer> </answer>", 0.0), (HOLLOW, 0.0), (UNSEEN, 0.0), ("", 0.0),
])  # fmt: skip
def test_the_soft_layout_stands_anywhere(text, expected):
    assert value(SoftFormat(), text) == expected


@pytest.mark.parametrize(("text", "expected"), [
    (LOOSE, 0.5), ("<reasoning>six</reasoning><answer>7", 0.375), ("7</answer>", 0.125),
    (LOOSE + "</answer>", 0.375), ("<reasoning>six</reasoning><answer></answer>", 0.25),
    ("<reasoning>six<answer></answer></reasoning>", 0.25), (NESTED, 0.0), (CROSSED, 0.0),
    (UNSEEN, 0.0), (HOLLOW, 0.0), (HOLLOW + LOOSE, 0.0), ("", 0.0),
])  # fmt: skip
def test_tags_that_occur_once(text, expected):
    assert value(XmlCount(), text) == expected


@pytest.mark.parametrize(("text", "expected"), [
    (LOOSE, 2.0), ("<reasoning>six", 0.5), ("<answer>7</answer>", 0.5),
    ("<reasoning>six</reasoning><answer></answer>", 0.5), ("<answer></answer>", -1.0),
    (NESTED, -1.0), (CROSSED, -1.0), (UNSEEN, -1.0), (HOLLOW, -1.0), ("7</answer>", -1.0),
    ("", -1.0),
])  # fmt: skip
def test_match_format_scores_complete_partial_and_missing_tag_pairs(text, expected):
    assert value(MatchFormat(), text) == expected


@pytest.mark.parametrize(("text", "expected"), [
    ("<think>a\nb</think>\n7", 1.0), ("<think>a</think><answer>7</answer>", 1.0), ("7", 0.0), (" <think>a</think>7", 0.0),
    ("<think>a</think>", 0.0), ("<think>\u200b</think>7", 0.0), ("<think>a<think>b</think>7", 0.0), ("<think>a", 0.0),
])  # fmt: skip
def test_reasoning_first_and_no_answer_tag(text, expected):
    assert value(ThinkFormat(), text) == expected


@given(st.lists(PIECES, min_size=1, max_size=4))
def test_bounds_and_what_does_not_matter(texts):
    strict, soft, count, match = (reward(texts) for reward in REWARDS)
    for text, *values in zip(texts, strict, soft, count, match, strict=True):
        assert 0.0 <= values[0] <= values[1] <= 0.5
        assert 0.0 <= values[2] <= 0.5
        assert values[3] in (2.0, 0.5, -1.0)
        assert (values[3] == 2.0) is (values[1] == 0.5)
        assert values == [value(reward, text) for reward in REWARDS], "each as if alone"
        around = [value(reward, f"\n {text.swapcase()} ") for reward in REWARDS[1:]]
        assert around == values[1:]
        bare = without_empty_pairs(REASONING, text)
        for reward, earned in zip(REWARDS, values, strict=True):
            assert earned <= max(value(reward, bare), 0.0), "an empty pair earns nothing"


@pytest.mark.parametrize("text", [
    "<reasoning>x</reasoning>" * 3000, "<answer>" * 3000 + "</answer>" * 3000,
    "<answer>" + "\u200b" * 20_000,
])  # fmt: skip
def test_long_repetitions_are_read_quickly(text):
    begun = time.thread_time()
    for reward in REWARDS:
        value(reward, text)
    assert time.thread_time() - begun < 2.0


@given(st.sets(st.integers(0, 3)), st.integers(0, 3))
def test_more_right_tags_never_earn_less(there, another):
    def text(tags):
        opened, closed, answered, ended = (
            tag if place in tags else "" for place, tag in enumerate(REASONING.four)
        )
        return f"{opened}six{closed}{answered}7{ended}"

    fewer, more = text(there), text(there | {another})
    for reward in (SoftFormat(), XmlCount(), MatchFormat()):
        assert value(reward, fewer) <= value(reward, more) <= value(reward, LOOSE)
