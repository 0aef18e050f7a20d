"""Crossword answers by their letters: where they are, how long the text is, and that digits count as no letters."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.core.reward_call.tags import THINK
from groupwise.tasks.rewards.crossword import (
    CrosswordAccuracy,
    PureAccuracy,
    length_ramp,
    letters,
    occurs,
)

WORDS = st.text("abcde", min_size=1, max_size=6)


def padded(text, words):
    """`text` with as many words in all."""
    return " ".join([text, *["hm"] * (words - len(text.split()))])


def value(reward, text, gold, **columns):
    (one,) = reward([text], answer=[gold], **columns)
    return one


@pytest.mark.parametrize(("text", "expected"), [
    ("Crème & Co.", "CREMEANDCO"), ("naïve", "NAIVE"), ("l’été", "LETE"), ("ﬁne", "FINE"),
    ("R2-D2", "RD"), ("Кот", ""), ("", ""),
])  # fmt: skip
def test_letters_are_the_same_however_they_are_written(text, expected):
    assert letters(text) == expected


@pytest.mark.parametrize(("gold", "text", "contained"), [
    ("cat", "A CAT sat", "any contiguous word"), ("cat", "concatenate", "any contiguous"),
    ("cat", "c-a-t", "any"), ("cat", "it is a, trust me", ""), ("cat", "topic at", "any"),
    ("cat", "cat5 (cat)", "any contiguous word"), ("cat", "the cäts", "any contiguous"),
    ("ice cream", "an ice-cream!", "any contiguous word"),
    ("ice cream", "ICECREAM", "any contiguous word"),
    ("ice cream", "nice creams", "any contiguous"), ("ice cream", "icecreams", "any contiguous"),
    ("don't", "DON’T", "any contiguous word"), ("R & B", "r and b", "any contiguous word"),
    ("R&B", "r and b", "any contiguous word"), ("R&B", "R & B", "any contiguous word"),
    ("R&B", "(R&B)", "any contiguous word"), ("R and B", "R&B", "any contiguous word"),
    ("æon", "AEON", "any contiguous word"), ("cat", "", ""),
])  # fmt: skip
def test_where_a_gold_answer_stands(gold, text, contained):
    modes = ("any", "contiguous", "word")
    assert [mode for mode in modes if occurs(gold, text, mode)] == contained.split()


@pytest.mark.parametrize("reward", [CrosswordAccuracy(), PureAccuracy()])
@pytest.mark.parametrize("gold", ["3", "catch 22", "Кот", "x²", "--", "cat Кот"])
def test_a_gold_answer_of_other_than_plain_letters_is_refused(reward, gold):
    for text in ("<answer>3</answer>", "<answer>4</answer>", ""):
        with pytest.raises(ValueError, match="by its letters"):
            value(reward, text, gold)
    with pytest.raises(ValueError, match="take math_answer"):
        reward.check_row({"answer": ["cat", gold]})


TAGS = {
    "<THINK>a</think><answer>b</answer>": 1.0, "<think>a</think>": 0.5, "<think>a</think><answer></answer>": 0.5,
    "<think><answer></answer></think>": 0.0, "<think>a</think><answer>\u200b</answer>": 0.5, "<think>a</think><answer>": 0.75,
    "<answer> </answer>": 0.0,
}  # fmt: skip
"""The share of the four tags that are present. A pair with nothing between its tags does not count."""


def test_occurrence_alone_or_scaled_by_tags_and_length():
    scaled = CrosswordAccuracy(scaled=True)
    whole = padded("<think>a cat</think><answer>cat</answer>", 80)
    assert value(CrosswordAccuracy(), "cat", "cat") == 1.0
    assert value(CrosswordAccuracy(), "dog", "cat") == 0.0
    for words, earned in ((80, 0.5), (36, 0.1), (25, 0.0)):
        text = padded("<think>a cat</think>", words)
        assert value(scaled, text, "cat") == pytest.approx(earned)
    assert value(scaled, whole, "dog") == 0.0
    for tags, share in TAGS.items():
        assert value(scaled, padded(f"{tags} cat", 80), "cat") == share, tags


def test_a_gold_answer_within_another_word_is_none_in_the_mode_word():
    assert value(CrosswordAccuracy(mode="word"), "concatenate", "cat") == 0.0


@pytest.mark.parametrize(("text", "expected"), [
    ("<think>hm</think><answer>C.A.T!</answer>", 1.0),  # 1, however little is thought
    ("<answer>dog</answer><answer>cat</answer>", 1.0), ("<answer>c1a2t 99</answer>", 0.0), ("<answer>cat кот</answer>", 0.02 * 0.5),
    ("<answer>cat dog</answer>", 0.02 * 0.5), ("<answer>cat</answer><answer>dog</answer>", 0.02 * 0.5),
    ("<think>a cat?</think><answer>dog</answer>", 0.02), ("<think>a cat?</think><answer></answer>", 0.01),
    ("<think>concatenate</think><answer>dog</answer>", 0.0), (padded("<think>a cat?</think><answer>dog</answer>", 80), 0.02 + 0.25),
    (padded("<think>concatenate</think><answer>dog</answer>", 80), 0.25), ("cat", 0.0), ("<answer></answer>", 0.0),
])  # fmt: skip
def test_pure_accuracy_adds_up(text, expected):
    assert value(PureAccuracy(), text, "cat") == pytest.approx(expected)


@pytest.mark.parametrize("said", ["(3,5)", [3, 5], 8, "8", 8.0, None])
def test_the_expected_length_must_be_met(said):
    golds = [["ice cream", "gelato"]]
    answers = ["<answer>ice cream</answer>", "<answer>gelato</answer>"]
    values = [PureAccuracy()([a], answer=golds, enumeration=[said])[0] for a in answers]
    assert [round(each) for each in values] == ([1, 0] if said is not None else [1, 1])


@pytest.mark.parametrize("column", ["enumeration", "lengths", "expected_len", "n_letters"])
def test_each_row_has_its_own_expected_length(column):
    golds, texts = [["ice cream", "gelato"]] * 2, ["<answer>ice cream</answer>"] * 2
    for lengths in ([8, 6], [6, 8]):
        columns: dict[str, Any] = {column: lengths}
        values = PureAccuracy()(texts, answer=golds, **columns)
        assert values == pytest.approx([1.0 if each == 8 else 0.01 for each in lengths])


def test_an_expected_length_that_no_gold_answer_has_is_refused():
    with pytest.raises(ValueError, match=r"4 letters.* 'cat' has 3"):
        value(PureAccuracy(), "<answer>cat</answer>", "cat", n_letters=[4])
    with pytest.raises(ValueError, match="asks for 4 letters"):
        PureAccuracy().check_row({"answer": "cat", "enumeration": "(4)"})


TEXTS = st.lists(
    st.sampled_from(
        ["cat", "dog", "concatenate", "&", "\n", "hm " * 30, "<answer>cat</answer>", *THINK.four]
    ),
    max_size=6,
).map(" ".join)
REWARDS = (CrosswordAccuracy(), CrosswordAccuracy(scaled=True, mode="word"), PureAccuracy())


@given(st.lists(TEXTS, min_size=1, max_size=4))
def test_bounds_case_space_and_batches(texts):
    golds = ["cat"] * len(texts)
    for reward in REWARDS:
        values = reward(texts, answer=golds)
        assert all(0.0 <= each <= 1.0 for each in values)
        assert values == [value(reward, text, "cat") for text in texts]
        assert values == reward([f"\n{text.swapcase()} " for text in texts], answer=golds)


@given(WORDS, st.sampled_from(["", "a cat", "<answer>cat</answer>", "& <answer> 5"]))
def test_the_gold_answer_earns_the_maximum(gold, reasoning):
    text = f"<think>hm {reasoning}</think><answer>{gold}</answer>"
    assert value(PureAccuracy(), text, gold) == 1.0
    assert value(CrosswordAccuracy(scaled=True), padded(text, 80), gold) == 1.0


@pytest.mark.parametrize(
    ("words", "ramp"), [(0, 0.0), (25, 0.0), (26, 1 / 55), (36, 0.2), (80, 1.0), (500, 1.0)]
)
def test_the_ramp(words, ramp):
    assert length_ramp("hm " * words, 25, 80) == pytest.approx(ramp, abs=1e-12)


@given(WORDS, TEXTS)
def test_each_mode_is_stricter_than_the_one_before(gold, text):
    loose, inside, alone = (occurs(gold, text, mode) for mode in ("any", "contiguous", "word"))
    assert loose >= inside >= alone
