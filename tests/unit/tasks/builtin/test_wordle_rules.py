"""The rules of Wordle: marks, what they say, what counts as a guess, and the word lists."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.tasks.builtin.wordle_rules import (
    Knowledge,
    answer,
    guess_in,
    marks_of,
    reasoning,
    turns_met,
    words_of,
)

words = st.text("abc", min_size=5, max_size=5)  # few letters, so that they repeat


@pytest.mark.parametrize(
    ("guess", "secret", "marks"),
    [
        ("crane", "crane", "GGGGG"),
        ("moist", "brake", "XXXXX"),
        ("alley", "label", "YYYGX"),
        ("allow", "label", "YYYXX"),
        ("eerie", "steep", "YYXXX"),  # two of three occur
        ("geese", "those", "XXXGG"),  # the green e is the only one
        ("sassy", "glass", "YYXGX"),
        ("speed", "abide", "XXYXY"),
    ],
)
def test_greens_take_their_letters_first_then_yellows_from_left_to_right(guess, secret, marks):
    assert marks_of(guess, secret) == marks


@given(words, words)
def test_letters_are_marked_as_often_as_both_words_have_them(guess, secret):
    marks = marks_of(guess, secret)
    for letter in "abc":
        there = sum(g == letter and m != "X" for g, m in zip(guess, marks, strict=True))
        assert there == min(guess.count(letter), secret.count(letter))
    assert [m == "G" for m in marks] == [g == s for g, s in zip(guess, secret, strict=True)]


@given(words, words, words)
def test_a_turn_allows_the_words_that_would_have_marked_it_so(guess, secret, word):
    marks = marks_of(guess, secret)
    assert Knowledge.of([guess], [marks]).allows(word) == (marks_of(guess, word) == marks)


@given(st.lists(words, min_size=1, max_size=4), words, words)
def test_all_turns_together_allow_what_each_of_them_allows(guesses, secret, word):
    marks = [marks_of(guess, secret) for guess in guesses]
    met = turns_met(word, guesses, marks)
    assert Knowledge.of(guesses, marks).allows(word) == (met == len(guesses))
    assert turns_met(secret, guesses, marks) == len(guesses)


@pytest.mark.parametrize(
    ("text", "guess"),
    [
        ("<think>a</think><guess>crane</guess>", "crane"),
        ("so it is</THINK>\n\n<Guess> CRANE </GUESS> I hope", "crane"),
        ("</think><guess>[crane]</guess>", "crane"),
        ("</think><guess>crane</guess><guess>slate</guess>", "crane"),
        ("<guess>slate</guess></think><guess>crane</guess>", "crane"),
        ("</think><guess>cran</guess> or <guess>crane</guess>", "crane"),
        ("</think><guess>crane</guess></think><guess>slate</guess>", "crane"),
        ("<think>a<guess>crane</guess></think>", None),  # guessed before the closing tag
        ("<guess>crane</guess>", None),
        ("</think>crane", None),
        ("</think><guess>crânes</guess>", None),
        ("</think><guess>c r a n e</guess>", None),
        ("</think><guess>crane", None),
        ("", None),
    ],
)
def test_the_guess_is_the_first_well_formed_one_after_the_closing_tag(text, guess):
    assert guess_in(text) == guess


@given(st.lists(words, max_size=4), words)
def test_the_reasoning_of_the_teacher_is_well_formed_and_true(guesses, secret):
    known = Knowledge.of(guesses, [marks_of(guess, secret) for guess in guesses])
    said = reasoning(known, secret)
    assert guess_in(answer(said, secret)) == secret
    told = re.fullmatch(
        r"Known: ([a-c_ ]+)\.(?: It also has ([a-c, ]+)\.)? A word that fits is .+", said
    )
    unknown = list(secret)
    for place, letter in enumerate(told[1].split()):
        assert letter in ("_", secret[place])
        if letter != "_":
            unknown.remove(letter)
    for letter in (told[2] or "").replace(",", " ").split():
        unknown.remove(letter)  # raises where it does not occur so often


# Word lists


def test_the_words_of_the_package_are_divided_into_three():
    found = words_of(None, None)
    assert (len(found.secrets), len(found.dictionary)) == (877, 5098)
    assert set(found.secrets) <= found.dictionary
    assert all(re.fullmatch("[a-z]{5}", word) for word in found.dictionary)
    parts = [found.of(split, 1) for split in ("train", "validation", "test")]
    assert [len(part) for part in parts] == [703, 87, 87]
    assert sorted(word for part in parts for word in part) == sorted(found.secrets)


def test_own_lists_are_read_and_secrets_are_always_real(tmp_path):
    secrets = tmp_path / "secrets.txt"
    made = [a + b + "xyz" for a in "abcdefgh" for b in "abcdefgh"]
    secrets.write_text("# mine\n" + "\n".join(word.upper() for word in made) + "\n\nAAXYZ  # again")
    found = words_of(str(secrets), None)
    assert found.secrets == tuple(made)
    assert {"aaxyz", "crane"} <= found.dictionary
    real = tmp_path / "real.txt"
    real.write_text("crane\n")
    assert words_of(str(secrets), str(real)).dictionary == {"crane", *made}
