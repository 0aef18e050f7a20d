"""The built-in task: its splits are disjoint and reproducible, and only sorting earns its rewards."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.tasks.builtin import sort_words
from groupwise.tasks.builtin.sort_words import WORDS
from tests.task_kit import config, earned, scored, splits

FULL = {"quickstart": 1.0, "classic": 12.11}


def total(text, words, preset) -> float:
    return earned("sort_words", text, {"words": words, "answer": ""}, config(preset=preset))


def sets(rows):
    return [frozenset(row["words"]) for row in rows]


@pytest.mark.parametrize(
    "own", [{}, {"words": 2}, {"min_words": 2, "max_words": 5}, {"preset": "classic", "seed": 5}]
)
def test_no_set_of_words_occurs_twice(own):
    train, validation, held_out = splits(sort_words, config(**own))
    assert (len(train), len(validation), len(held_out)) == (2000, 128, 128)
    assert len(set(sets(train) + sets(validation) + sets(held_out))) == 2256


def test_no_word_is_part_of_another():
    assert len(set(WORDS)) == len(WORDS) > 100
    assert all(word.isascii() and word.islower() and word.isalpha() for word in WORDS)
    assert not [(a, b) for a in WORDS for b in WORDS if a != b and a in b]


def separated(words, preset):
    return {"quickstart": ", ", "classic": "\n"}[preset].join(words)


word_lists = st.lists(st.sampled_from(WORDS), min_size=2, max_size=5, unique=True)


@given(word_lists, st.sampled_from(["quickstart", "classic"]), st.data())
def test_only_the_gold_answer_earns_full_marks(words, preset, data):
    other = data.draw(st.lists(st.sampled_from(words), max_size=6))
    reward = total(separated(other, preset), words, preset)
    if other == sorted(words):
        assert reward == pytest.approx(FULL[preset])
    else:
        assert reward < FULL[preset] - 1e-9


@given(word_lists, st.sampled_from(["quickstart", "classic"]), st.data())
def test_repeating_a_word_earns_nothing(words, preset, data):
    written = data.draw(st.lists(st.sampled_from(words), min_size=1, max_size=5, unique=True))
    again = data.draw(st.sampled_from(written))
    once = total(separated(written, preset), words, preset)
    twice = total(separated([*written, again], preset), words, preset)
    assert twice <= once + 1e-12


def test_two_right_words_of_five_do_not_earn_the_full_ten():
    row = {"words": ["zebra", "yellow", "apple", "banana", "cabin"]}
    found = scored("sort_words", "apple\nbanana", row, config(preset="classic"))
    names = ("contained_ignoring_case", "contained", "begins_line", "belongs", "ascending")
    values = (0.4, 0.4, 0.4, 1.0, 0.1)  # one pair of ten
    assert {part.name: part.value for part in found.parts} == pytest.approx(
        dict(zip(names, values, strict=True))
    )


WORDS_3 = ["tiger", "apple", "river"]


@pytest.mark.parametrize(("text", "reward"), [
    ("apple, river, tiger", 1.0), ("  Apple, RIVER,tiger.\nThese are sorted.", 1.0), ("apple, tiger, river", 0.3 + 0.7 / 3),
    ("river, tiger, apple", 0.3), ("apple, river", 0.3 * 2 / 3), ("apple, river, tiger, apple", 0.3 * 3 / 4),
    ("Sure: apple, river, tiger", 0.3 * 3 / 4), ("Sure!\napple, river, tiger", 0.0), ("", 0.0),
])  # fmt: skip
def test_quickstart_rewards(text, reward):
    assert total(text, WORDS_3, "quickstart") == pytest.approx(reward)


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("apple\nriver\ntiger", 12.11),
        ("Apple\nRiver\nTiger", 0.01),
        ("apple river tiger", 0.11 + 1 / 3 + 1 + 10),
        ("the apple", 0.11 / 3 + 1 / 2),
        ("applerivertiger", 0.11),  # all contained, and no pair of words
        ("tigers apple river", 0.11 + 2 / 3 + 10 / 3),
        ("tigers apple2 river, tiger", 0.11 + 3 / 4 + 10),
        ("", 0.0),
    ],
)
def test_classic_rewards(text, reward):
    assert total(text, WORDS_3, "classic") == pytest.approx(reward)


def test_metrics():
    rows = [{"words": WORDS_3}] * 4
    texts = ["apple, river, tiger", "river, apple, tiger", "apple", "nothing at all"]
    found = sort_words.compute_metrics(["p"] * 4, texts, rows, config(), None)
    assert found["correct"] == [True, False, False, False]
    expected = (1.0 + (0.3 + 0.7 / 3) + 0.1 + 0.0) / 4
    assert found["metrics"] == pytest.approx(
        {"accuracy": 0.25, "permutation_accuracy": 0.5, "reward": expected}
    )
