"""Wordle as a game: what the environment says, what a transcript earns, and games that a solver won."""

import pytest

from groupwise.core.settings.view import View
from groupwise.tasks.builtin import wordle_game
from groupwise.tasks.builtin.wordle_game import Game, GameResult, play_messages
from groupwise.tasks.builtin.wordle_rules import words_of
from groupwise.tasks.contract import load_task
from tests.task_kit import scored, splits

REAL = words_of(None, None).dictionary
NAMES = ("won", "format", "dictionary", "repeated", "constraints", "all_satisfied")


def config(**task):
    return View({"task": task, "rollout": {"type": "environment"}})


def guessing(word):
    return f"<think>\nLet me see.\n</think>\n<guess>{word}</guess>"


def transcript(*turns):
    """What rewards get: the assistant's turns with the environment's answers between them."""
    said = [({"role": "assistant", "content": t}, {"role": "user", "content": "…"}) for t in turns]
    return [message for pair in said for message in pair]


def score(completion, given=None):
    return scored("wordle_game", completion, {"secret": "label"}, given)


# The environment


def game(secret="label"):
    made = wordle_game.get_environment(config())()
    made.reset(secret)
    return made


def test_a_game_that_is_won():
    playing = game()
    said = [playing.step(guessing(word)) for word in ("alley", "metal", "LABEL")]
    assert [step.observation for step in said] == [
        "alley: a Y, l Y, l Y, e G, y X\n5 guesses left.",
        "metal: m X, e Y, t X, a Y, l G\n4 guesses left.",
        "label: l G, a G, b G, e G, l G\n3 guesses left.",
    ]
    assert [step.done for step in said] == [False, False, True]
    assert playing.won


def test_every_turn_is_used_up_and_the_sixth_is_the_last():
    playing = game()
    turns = ["label", guessing("abcde"), *[guessing("alley")] * 4]
    said = [playing.step(text) for text in turns]
    assert "no guess of five" in str(said[0].observation)
    assert "abcde is not in" in str(said[1].observation)
    assert [step.done for step in said] == [False] * 5 + [True]
    assert not playing.won
    assert (playing.guesses, playing.marks) == (["alley"] * 4, ["YYYGX"] * 4)


# Rewards


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([guessing("label")], (1, 1, 1, 0, 1, 1)),
        ([guessing("alley"), guessing("lapel"), guessing("label")], (1, 1, 1, 0, 1, 1)),
        # lapel is allowed; panel only by the second turn, alley again by none
        (
            [guessing(word) for word in ("alley", "metal", "panel", "alley")],
            (0, 1, 1, 0.25, (1 + 0 + 0.5 + 0) / 4, 0.25),
        ),
        (["label", guessing("abcde")], (0, 0.5, 0, 0, 0, 0)),
        # the second abcde is a repetition, though it got no marks
        ([guessing("abcde"), guessing("vwxyz"), guessing("abcde")], (0, 1, 0, 1 / 3, 0, 0)),
        ([], (0, 0, 0, 0, 0, 0)),
    ],
)
def test_parts_of_a_game(turns, expected):
    member = score(transcript(*turns))
    assert tuple(part.name for part in member.parts) == NAMES
    assert tuple(part.value for part in member.parts) == pytest.approx(expected)
    weights = (1.0, 0.2, 0.2, -0.5, 0.1, 0.2)
    total = sum(weight * value for weight, value in zip(weights, expected, strict=True))
    assert member.reward == pytest.approx(total)
    own = score(transcript(*turns), given=config(weights={"won": 5.0, "all_satisfied": 0}))
    assert own.reward == pytest.approx(total + 4 * expected[0] - 0.2 * expected[5])


def test_messages_after_the_end_of_a_game_do_not_count():
    won = [guessing("label"), "and on"]
    lost = [guessing("alley")] * 6 + [guessing("label")]
    assert play_messages(transcript(*won), "label", REAL).verdicts == (
        play_messages(transcript(*won[:1]), "label", REAL).verdicts
    )
    assert not play_messages(transcript(*lost), "label", REAL).won


def test_environment_and_rewards_see_the_same_game():
    turns = [guessing(word) for word in ("alley", "wrong", "lapel", "label")]
    playing = game()
    for text in turns:
        playing.step(text)
    assert play_messages(transcript(*turns), "label", REAL) == GameResult(
        True, tuple(playing.verdicts)
    )


# Metrics


def test_metrics_read_the_turns_of_whole_games():
    games = [
        transcript(guessing("alley"), guessing("label")),
        transcript("no", guessing("abcde"), *[guessing("alley")] * 4),
    ]
    task = load_task("wordle_game")
    found = task.compute_metrics(
        ["?"] * 2, games, [{"secret": "label"}] * 2, config(), tokenizer=None
    )
    assert found["metrics"] == pytest.approx(
        {
            "win_rate": 0.5,
            "mean_guesses": (2 + 7) / 2,
            "format_accuracy": 7 / 8,
            "dict_accuracy": 6 / 8,
            # both of the first game, and the first word of the second
            "constraint_accuracy": 3 / 8,
            "total_samples": 2,
        }
    )
    assert found["guesses"] == [["alley", "label"], [None, "abcde", *["alley"] * 4]]


# Rows


def test_the_teacher_wins_by_the_rules_with_words_of_its_split():
    train, validation, test = splits(wordle_game, config())
    secrets = [row["secret"] for row in (*train, *validation, *test)]
    assert sorted(secrets) == sorted(words_of(None, None).secrets)
    for rows in (train, validation):
        pool = {row["secret"] for row in rows}
        for row in rows:
            completion = row["completion"]
            assert completion[-1]["role"] == "assistant"
            outcome = play_messages(completion, row["secret"], REAL)
            assert outcome.won
            assert all(verdict.all_satisfied for verdict in outcome.verdicts)
            assert {verdict.guess for verdict in outcome.verdicts} <= pool
            replayed = Game(REAL)
            replayed.reset(row["secret"])
            for own, told in zip(completion[::2], [*completion[1::2], None], strict=True):
                step = replayed.step(own["content"])
                assert told is None or told == {"role": "user", "content": step.observation}


def test_small_games_have_fewer_guesses_among_words_that_are_shown():
    given = config(choices=4, guesses=2)
    for row in wordle_game.get_sft_dataset(given, None)[:30]:
        told, asked = (message["content"] for message in row["prompt"])
        assert "in two guesses" in told
        assert asked == f"The secret is one of: {', '.join(row['choices'])}.\n2 guesses left."
        outcome = play_messages(row["completion"], row["secret"], REAL, 2)
        assert outcome.won
        assert all(verdict.all_satisfied for verdict in outcome.verdicts)
    playing = wordle_game.get_environment(given)()
    playing.reset("label")
    assert [playing.step(guessing(word)).done for word in ("metal", "later")] == [False, True]
    assert (
        play_messages(transcript(*map(guessing, ("metal", "later"))), "label", REAL, 2).turns_needed
        == 3
    )
