"""Repetition and length: values computed by hand, bounds, and directions."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.algorithms.overlong import punishment
from groupwise.tasks.rewards.shaping import Length, Overlong, Repetition

RIGHT, WRONG = "<answer>3</answer>", "<answer>4</answer>"
TEXTS = st.lists(st.sampled_from(["a", "b", "C", "\n"]), max_size=12).map(" ".join)


def ids(length):
    return [0] * length


def length_of(text, tokens, **parameters):
    (one,) = Length(**parameters)([text], [ids(tokens)], answer=["3"])
    return one


# repetition


@pytest.mark.parametrize(("text", "expected"), [
    ("one two three four", 0.0),
    ("no no no no no no", -0.75),  # four trigrams, one of them new
    ("a b c a b c", -0.25),  # abc bca cab abc
    ("A b c a B c", -0.25), ("so so", 0.0), ("", 0.0),
])  # fmt: skip
def test_the_share_of_repeated_trigrams(text, expected):
    (value,) = Repetition()([text])
    assert (value, math.copysign(1, value)) == (expected, -1 if expected else 1)


@given(TEXTS, st.integers(1, 4))
def test_bounds_case_and_space_of_repetition(text, n):
    (value,) = Repetition(n=n)([text])
    assert -1.0 < value <= 0.0
    assert Repetition(n=n)([f" {text.swapcase()}\n"]) == [value]


# length


@pytest.mark.parametrize(("text", "tokens", "expected"), [
    (RIGHT, 0, 1.0), (RIGHT, 250, 0.75 + 0.25 * 0.5**0.5), (RIGHT, 500, 0.75), (RIGHT, 1000, 0.5),
    (RIGHT, 5000, 0.5), (WRONG, 0, -0.5), (WRONG, 500, -0.25), (WRONG, 1000, 0.0),
    (WRONG, 5000, 0.0), ("3", 0, -0.5), ("<answer></answer>", 0, -0.5),
    ("<answer>3.0</answer>", 0, 1.0),
])  # fmt: skip
def test_the_cosine(text, tokens, expected):
    assert length_of(text, tokens) == pytest.approx(expected)


@given(st.integers(0, 2000), st.integers(0, 2000))
def test_longer_is_worse_when_right_and_better_when_wrong(one, other):
    shorter, longer = sorted((one, other))
    assert 1.0 >= length_of(RIGHT, shorter) >= length_of(RIGHT, longer) >= 0.5
    assert -0.5 <= length_of(WRONG, shorter) <= length_of(WRONG, longer) <= 0.0


# overlong


def test_overlong_by_hand():
    lengths = [0, 80, 85, 90, 100, 150]
    assert Overlong(100)([ids(n) for n in lengths]) == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]


@given(st.integers(1, 500), st.data())
def test_overlong_is_the_punishment_of_dapo(max_length, data):
    cache = data.draw(st.integers(1, max_length))
    length = data.draw(st.integers(0, 600))
    assert Overlong(max_length, cache)([ids(length)]) == [punishment(length, max_length, cache)]


# all of them


@given(st.lists(st.tuples(st.sampled_from([RIGHT, WRONG, "a a a a"]), st.integers(0, 99))))
def test_a_batch_equals_its_rows_one_by_one(rows):
    texts, tokens = [text for text, _ in rows], [ids(length) for _, length in rows]
    assert Repetition()(texts) == [Repetition()([text])[0] for text in texts]
    assert Overlong(50)(tokens) == [Overlong(50)([each])[0] for each in tokens]
    whole = Length(max_length=50)(texts, tokens, answer=["3"] * len(rows))
    assert whole == [length_of(text, length, max_length=50) for text, length in rows]
