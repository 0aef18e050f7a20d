"""Texts compared with texts: which are equal, and which only look so."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.tasks.rewards.matching import Correctness, CorrectnessXml, IntReward, keyword_match

SPACE = st.text(" \n\t", max_size=3)
TEXT = st.text("abAB1 <>/", max_size=12)


def tagged(answer):
    return f"<answer>{answer}</answer>"


# correctness


@pytest.mark.parametrize(
    ("completion", "value"),
    [("Paris", 1.0), (" Paris\n", 1.0), ("paris", 0.0), ("Paris.", 0.0), ("", 0.0)],
)
def test_the_whole_trimmed_completion_is_the_gold_answer(completion, value):
    assert Correctness()([completion], answer=["Paris"]) == [value]


@given(st.text("xyz", min_size=1), SPACE, SPACE)
def test_white_space_around_never_matters(gold, before, after):
    assert Correctness()([before + gold + after], answer=[gold]) == [1.0]
    assert CorrectnessXml()([tagged(before + gold + after)], answer=[gold]) == [2.0]


# correctness_xml, int_reward


@pytest.mark.parametrize(("completion", "value"), [
    (tagged("42"), 2.0), (tagged("\n42\n"), 2.0), (tagged("41") + tagged("42"), 2.0),
    (tagged("42") + tagged("41"), 0.0), (tagged("42") + tagged(""), 0.0),
    ("<ANSWER>42</ANSWER>", 2.0), ("42", 0.0), ("<answer>42", 0.0), ("", 0.0),
])  # fmt: skip
def test_the_last_answer_tag_counts(completion, value):
    assert CorrectnessXml()([completion], answer=["42"]) == [value]


@pytest.mark.parametrize(
    ("answer", "value"),
    [("42", 0.5), (" 42 ", 0.5), ("-42", 0.0), ("4 2", 0.0), ("4.2", 0.0), ("²", 0.0), ("", 0.0)],
)
def test_digits_and_nothing_else(answer, value):
    assert IntReward()([tagged(answer)]) == [value]


# keyword_match


@pytest.mark.parametrize(("keywords", "value"), [
    ("cat, DOG", 1.0), (["cat", "cow"], 0.5), (["cat", "CAT ", "cow"], 0.5), ("cow", 0.0),
    ("", None), (" , ", None), (None, None), ([], None),
])  # fmt: skip
def test_the_share_of_keywords(keywords, value):
    assert keyword_match(["A Cat and a dog."], [keywords]) == [value]


# all of them


@given(st.lists(TEXT, min_size=1, max_size=4))
def test_a_batch_equals_its_rows_one_by_one(texts):
    golds = ["a"] * len(texts)
    for reward in (Correctness(), CorrectnessXml(), IntReward()):
        whole = reward(texts, answer=golds)
        assert whole == [reward([text], answer=["a"])[0] for text in texts]
        assert all(0.0 <= value <= 2.0 for value in whole)


@given(st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=5), st.integers(0, 5))
def test_more_keywords_never_earn_less(keywords, count):
    fewer, more = " ".join(keywords[:count]), " ".join(keywords[: count + 1])
    shares = keyword_match([fewer, more, " ".join(keywords)], [keywords] * 3)
    less, enough, whole = (share for share in shares if share is not None)
    assert 0.0 <= less <= enough <= whole == 1.0
