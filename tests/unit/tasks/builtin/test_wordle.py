"""One turn of Wordle: its rows have no secret in common, and its parts are what the module says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.core.errors import TaskError
from groupwise.core.settings.view import View
from groupwise.tasks.builtin import math, wordle
from groupwise.tasks.builtin.wordle_rules import Knowledge, guess_in, marks_of, words_of
from groupwise.tasks.data.order import Stream
from tests import task_kit
from tests.task_kit import scored

TURNS = {"guesses": ["alley", "metal"], "feedback": ["YYYGX", "XYXYG"], "secret": "label"}
NAMES = ("format", "dictionary", "repeated", "constraints", "all_satisfied", "over_length")


def config(sampler=None, rollout=None, **task):
    sections = {"task": task, "sampler": sampler, "rollout": rollout}
    return View({name: section for name, section in sections.items() if section is not None})


def score(text, columns=TURNS, tokens=1, given=None):
    return scored("wordle", text, columns, given, tokens)


def guessing(word):
    return f"<think>\nLet me see.\n</think>\n<guess>{word}</guess>"


@pytest.fixture(scope="module")
def splits():
    return task_kit.splits(wordle, config())


# Rewards


@pytest.mark.parametrize(
    ("text", "expected", "reward"),
    [
        (guessing("label"), (1, 1, 0, 1, 1, 0), 0.7),
        (guessing("lapel"), (1, 1, 0, 1, 1, 0), 0.7),  # not the secret, but the marks allow it
        (guessing("panel"), (1, 1, 0, 0.5, 0, 0), 0.45),  # lacks the second l of the first turn
        (guessing("about"), (1, 1, 0, 0, 0, 0), 0.4),
        (guessing("alley"), (1, 1, 1, 0, 0, 0), -0.1),
        (guessing("lwael"), (1, 0, 0, 0, 0, 0), 0.2),  # the marks allow it, but it is not a word
        (guessing("labels"), (0, 0, 0, 0, 0, 0), 0),
        ("<think>\n<guess>label</guess>\n</think>", (0, 0, 0, 0, 0, 0), 0),
        ("<guess>label</guess>", (0, 0, 0, 0, 0, 0), 0),
        (guessing("about") + "<guess>label</guess>", (1, 1, 0, 0, 0, 0), 0.4),
        ("", (0, 0, 0, 0, 0, 0), 0),
    ],
)
def test_rewards(text, expected, reward):
    member = score(text)
    assert tuple((part.name, part.value) for part in member.parts) == tuple(
        zip(NAMES, expected, strict=True)
    )
    assert member.reward == pytest.approx(reward)
    assert member.notes == {"extracted_answer": guess_in(text)}


def test_a_guess_is_repeated_whether_it_is_a_real_word_or_not():
    own = {"guesses": ["alley", "abcde"], "feedback": ["YYYGX", "YYXXY"]}
    for word, repeated in (("abcde", 1), ("lwael", 0)):
        parts = [part.value for part in score(guessing(word), own).parts]
        assert parts == [1, 0, repeated, 0, 0, 0]


HUNDRED = {"max_completion_length": 100}
TWO_STAGES = {"type": "two_stage", "max_reasoning_length": 160, "max_answer_length": 40}


@pytest.mark.parametrize(("given", "limit"), [
    (config(sampler=HUNDRED), 75), (config(sampler=HUNDRED, overlong_length=99), 99), (config(sampler=HUNDRED, rollout=TWO_STAGES), 150),
    (config(overlong_length=7), 7), (config(), None),
])  # fmt: skip
def test_over_length_alone_is_taken_from_what_has_no_guess(given, limit):
    for tokens in (limit or 10_000, (limit or 10_000) + 1):
        taken = -0.5 if limit and tokens > limit else 0.0
        assert score("and so on", tokens=tokens, given=given).reward == taken
        right = score(guessing("label"), tokens=tokens, given=given).reward
        assert right == pytest.approx(0.7 + taken)


def test_weights_are_configurable_and_a_limit_that_nothing_exceeds_is_refused():
    weights = {"format": 1.0, "dictionary": 0, "constraints": 2.0, "repeated": -3.0}
    for word, reward in (("panel", 1 + 2 * 0.5), ("alley", 1 - 3), ("label", 1 + 2 + 0.2)):
        member = score(guessing(word), given=config(weights=weights))
        assert member.reward == pytest.approx(reward)
    with pytest.raises(TaskError, match=r"overlong_length is 100.*75"):
        wordle.get_reward_funcs(config(sampler=HUNDRED, overlong_length=100), None)


SECRETS = st.sampled_from(words_of(None, None).secrets)


@given(SECRETS, SECRETS, SECRETS)
def test_no_guess_earns_more_than_one_that_the_marks_allow(secret, earlier, guess):
    turns = {"guesses": [earlier], "feedback": [marks_of(earlier, secret)], "secret": secret}
    real = words_of(None, None).dictionary
    found, best = (
        wordle.judge_guess(guessing(word), turns["guesses"], turns["feedback"], real)
        for word in (guess, secret)
    )
    assert found.all_satisfied == (marks_of(earlier, guess) == turns["feedback"][0])
    for part in ("format", "dictionary", "constraints", "all_satisfied"):
        assert wordle.PARTS[part](found) <= wordle.PARTS[part](best) == 1


# Rows


def test_every_row_is_a_game_under_way_that_its_gold_continues(splits):
    for row in [row for rows in splits for row in rows]:
        assert 1 <= len(row["guesses"]) <= 4
        assert len(set(row["guesses"])) == len(row["guesses"])
        assert row["secret"] not in row["guesses"]
        assert row["feedback"] == [marks_of(guess, row["secret"]) for guess in row["guesses"]]
        gold = guess_in(row["gold_completion"])
        assert gold is not None
        assert Knowledge.of(row["guesses"], row["feedback"]).allows(gold)
        told = row["prompt"][1]["content"]
        assert told.endswith(f"{6 - len(row['guesses'])} guesses left.")
        assert f"\n{row['guesses'][-1]}: " in "\n" + told
    assert {len(row["guesses"]) for row in splits[0]} == {1, 2, 3, 4}
    assert all(row["completion"] == row["gold_completion"] for row in splits[0])
    rows = wordle.get_rl_dataset(config(min_history=5, max_history=5, train_size=20))
    assert {len(row["guesses"]) for row in rows} == {5}
    assert rows[0]["prompt"][1]["content"].endswith("\n1 guess left.")


def test_no_word_is_in_two_splits(splits):
    train, validation, test = (
        {word for row in rows for word in (*row["guesses"], row["secret"])} for rows in splits
    )
    assert train.isdisjoint(validation | test)
    assert validation.isdisjoint(test)


@pytest.mark.parametrize(("task", "times"), [(wordle, 3), (math, 1)])
def test_rows_are_drawn_once_for_all_hooks_and_made_again_for_each(task, times, monkeypatch):
    begun = []
    monkeypatch.setattr(task, "Stream", lambda *key: begun.append(key) or Stream(*key))
    own = config(seed=987, train_size=9)
    task.get_rl_dataset(own)[0]["prompt"].clear()
    assert task_kit.splits(task, own)[0][0]["prompt"]
    assert len(begun) == times


def test_more_rows_than_there_can_be_are_refused(tmp_path):
    file = tmp_path / "few.txt"
    letters = "abcdefghij"
    file.write_text("\n".join(a + b + "xyz" for a in letters[:6] for b in letters))
    with pytest.raises(TaskError, match=r"6 secrets of the test .* 500 "):
        wordle.get_eval_dataset(config(secrets=str(file), max_history=1, eval_size=500))


# Metrics and schema


def test_metrics():
    texts = [guessing("label"), guessing("lapel"), guessing("lwael"), guessing("panel"), "what?"]
    found = wordle.compute_metrics(["?"] * 5, texts, [TURNS] * 5, config(), None)
    assert found["metrics"] == pytest.approx(
        {
            "format_accuracy": 0.8, "dict_accuracy": 0.6, "constraint_accuracy": 0.4, "win_rate": 0.2, "total_samples": 5,
        }
    )  # fmt: skip
    assert found["guesses"] == ["label", "lapel", "lwael", "panel", None]


def test_with_choices_the_secret_is_one_of_the_words_that_are_shown():
    given = config(choices=5, train_size=30)
    for row in wordle.get_sft_dataset(given, None):
        assert row["secret"] in row["choices"]
        assert len({*row["choices"]} - {*row["guesses"]}) == 5
        asked = row["prompt"][1]["content"]
        assert asked.startswith(f"The secret is one of: {', '.join(row['choices'])}.\n")
        assert guess_in(row["completion"]) in row["choices"]
        assert score(row["completion"], row, given=given).reward == pytest.approx(0.7)
