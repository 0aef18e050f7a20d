"""Texts compared with texts: what is equal, what only looks so."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.rewards.matching import Correctness, CorrectnessXml, IntReward, keyword_match

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


def test_any_accepted_form_and_the_given_column():
    assert Correctness()(["NYC"], answer=[["New York", "NYC"]]) == [1.0]
    assert Correctness("capital")(["Rome"], answer=["Paris"], capital=["Rome"]) == [1.0]
    assert Correctness()([[{"role": "assistant", "content": "4"}]], answer=[4]) == [1.0]
    assert CorrectnessXml(right=1.0)([tagged("7")], answer=["so <answer>7</answer>"]) == [1.0]
    assert IntReward(right=0.25)([tagged("1")]) == [0.25]


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


def test_tags_are_text_whatever_signs_are_in_them():
    reward = CorrectnessXml(answer_tag="a.c*")
    assert reward(["<a.c*>1</a.c*>", "<abcc>1</abcc>"], answer=["1", "1"]) == [2.0, 0.0]
    with pytest.raises(ValueError, match="without brackets"):
        IntReward(answer_tag="<answer>")


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


def test_keywords_of_another_kind_are_refused():
    with pytest.raises(ValueError, match="expected a list, or text with commas"):
        keyword_match(["x"], [3])


@given(st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=5), st.integers(0, 5))
def test_more_keywords_never_earn_less(keywords, count):
    fewer, more = " ".join(keywords[:count]), " ".join(keywords[: count + 1])
    shares = keyword_match([fewer, more, " ".join(keywords)], [keywords] * 3)
    less, enough, whole = (share for share in shares if share is not None)
    assert 0.0 <= less <= enough <= whole == 1.0


# all of them


@given(st.lists(TEXT, min_size=1, max_size=4))
def test_a_batch_equals_its_rows_one_by_one(texts):
    golds = ["a"] * len(texts)
    for reward in (Correctness(), CorrectnessXml(), IntReward()):
        whole = reward(texts, answer=golds)
        assert whole == [reward([text], answer=["a"])[0] for text in texts]
        assert all(0.0 <= value <= 2.0 for value in whole)
