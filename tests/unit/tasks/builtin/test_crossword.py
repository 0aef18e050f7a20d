"""Crossword clues: the bundled set is sound, splits share neither answers nor clues, and unusable rows are counted."""

import json
from collections import Counter
from functools import partial

import pytest

from groupwise.core.errors import TaskError
from groupwise.tasks.builtin import crossword
from groupwise.tasks.builtin.crossword import INCLUDED
from groupwise.tasks.contract import check_reward_columns, load_task
from groupwise.tasks.rewards.crossword import letters
from tests import task_kit
from tests.task_kit import config, earned, jsonl


def splits(**task):
    return task_kit.splits(crossword, config(**task))


def reward(text, row):
    return earned("crossword", text, {"prompt": [], **row})


@pytest.fixture
def source(tmp_path):
    """A function that writes rows into a file and gives its name."""
    return partial(jsonl, tmp_path / "clues.jsonl")


def many(count):
    """Rows with answers that are all different words of letters."""
    names = ["".join("ABCDEFGHIJ"[int(digit)] for digit in f"{n:04}") for n in range(count)]
    return [{"clue": f"Clue number {name}s", "answer": f"X{name}"} for name in names]


TINY = {"eval_size": 2, "validation_size": 2}


# The set that comes with the package


def test_included_clues_are_sound():
    rows = [json.loads(line) for line in INCLUDED.read_text().splitlines()]
    assert len(rows) == 185
    assert len({row["clue"] for row in rows}) == len(rows)
    for row in rows:
        assert row["answer"] == row["answer"].upper()
        assert row["enumeration"] == crossword._letter_counts(row["answer"])
        assert letters(row["answer"]) not in letters(row["clue"])
    answers = Counter(row["answer"] for row in rows)
    assert [answer for answer, count in answers.items() if count > 1][:2] == ["ELEPHANT", "BAT"]


# Splits


@pytest.mark.parametrize("seed", range(5))
def test_no_answer_and_no_clue_is_in_two_splits(seed):
    kinds = splits(seed=seed)
    for key in ("answer", "clue"):
        seen = [{row[key] for row in rows} for rows in kinds]
        assert seen[0].isdisjoint(seen[1] | seen[2])
        assert seen[1].isdisjoint(seen[2])


def test_answers_that_differ_in_their_writing_only_stay_together(source):
    forms = ["Crème", "CREME", "creme ", "C-R-E-M-E"]
    rows = [{"clue": f"Clue {n}", "answer": form} for n, form in enumerate(forms)] + many(8)
    for seed in range(6):
        kinds = splits(source=source(rows), seed=seed, **TINY)
        held = [sum(letters(row["answer"]) == "CREME" for row in rows) for rows in kinds]
        assert sum(count > 0 for count in held) <= 1


def test_a_clue_with_several_answers_is_in_one_split_alone(source):
    rows = many(40)
    for row in rows[:20]:
        row["clue"] = "Anything"
    train, validation, test = splits(source=source(rows), eval_size=10, validation_size=5)
    where = [any(row["clue"] == "Anything" for row in each) for each in (train, validation, test)]
    assert where == [False, False, True]
    reason = "another split has the clue, with another answer"
    left = 20 - sum(row["clue"] == "Anything" for row in test)
    assert train.account.left_out == {reason: left}
    assert test.account.left_out == {}


# Sources


@pytest.mark.parametrize(("given", "clue", "enumeration"), [
    ({"answer": "NEW YORK"}, "Big city", "3,4"), ({"answer": "Half-moon"}, "Big city", "4-4"), ({"answer": "O'Hara"}, "Big city", "5"),
    ({"answer": "Château"}, "Big city", "7"), ({"clue": "Big city (3,4)", "answer": "NEW YORK"}, "Big city", "3,4"),
    ({"clue": "Big city ( 7 )", "answer": "NEWYORK"}, "Big city", "7"),
    ({"clue": "Film of (1984)", "answer": "AMADEUS"}, "Film of (1984)", "7"),
    ({"clue": "Big city (3, 4)", "answer": "NEW YORK"}, "Big city", "3, 4"),
    ({"clue": "City (of apples)", "answer": "NEWYORK"}, "City (of apples)", "7"),
    ({"clue": "Big city (7)", "answer": "NEWYORK", "enumeration": "3,4"}, "Big city", "3,4"),
    ({"answer": "NEWYORK", "enumeration": "(3,4)"}, "Big city", "3,4"), ({"answer": "NEWYORK", "enumeration": 7}, "Big city", "7"),
    ({"answer": "NEWYORK", "enumeration": 7.0}, "Big city", "7"), ({"answer": "NEWYORK", "enumeration": [3, 4]}, "Big city", "3,4"),
    ({"answer": "NEWYORK", "enumeration": float("nan")}, "Big city", "7"), ({"answer": "NEWYORK", "enumeration": None}, "Big city", "7"),
])  # fmt: skip
def test_enumerations(given, clue, enumeration):
    row = crossword._clue_row({"clue": "Big city", **given})
    assert (row["clue"], row["enumeration"]) == (clue, enumeration)
    assert [message["content"] for message in row["prompt"]] == [
        crossword.INSTRUCTION,
        f"{clue} ({enumeration})",
    ]


def test_rows_that_cannot_be_used_are_counted_or_refused(source):
    good = many(6)
    bad = [
        {"clue": "", "answer": "ABC"}, {"clue": "(3)", "answer": "ABC"}, {"clue": "Missing"},
        {"clue": "Number", "answer": 7}, {"clue": "Catch", "answer": "CATCH 22"},
        {"clue": "Foreign", "answer": "ябл"}, {"clue": "A Greek letter, too", "answer": "CAT κ"},
        {"clue": "A share, too", "answer": "ONE ½"}, {"clue": "Wrong (4)", "answer": "ABC"},
        {"clue": good[0]["clue"].upper(), "answer": good[0]["answer"].lower()},
    ]  # fmt: skip
    spec = source([*good, *bad])
    train = crossword.get_rl_dataset(config(source=spec, **TINY))
    task = load_task("crossword")
    rows = task.rl_examples(config(source=spec, **TINY))
    check_reward_columns(task, task.rubric(config(), None), rows, in_workers=False)
    assert train.account.left_out == {
        "the clue is empty or missing": 1, "the clue is empty": 1, "the answer is empty or missing": 1, "the answer is not text": 1,
        "the answer is not made of letters A–Z": 4, "the enumeration does not fit the answer": 1,
        "it is the same as an earlier row": 1,
    }  # fmt: skip
    with pytest.raises(TaskError, match="row 6: the clue"):
        crossword.get_rl_dataset(config(source=spec, strict=True, **TINY))


# Rewards


def test_metrics():
    row = {"clue": "Big city", "answer": "NEW YORK", "enumeration": "3,4"}
    texts = [
        "<answer>New York</answer>", "<answer>Chicago</answer>", "<answer>Rome</answer>", "NEW YORK",
    ]  # fmt: skip
    found = crossword.compute_metrics(["p"] * 4, texts, [row] * 4, config(), None)
    assert found["correct"] == [True, False, False, False]
    assert found["metrics"] == {"accuracy": 0.25, "length_accuracy": 0.5, "answered": 0.75}


@pytest.mark.parametrize("text", ["CAT", "cat", "CAT 5", "CAT κ", "C-A-T!", "½ CAT", "CATS", ""])
def test_the_accuracy_is_that_of_the_reward(text):
    row = {"clue": "Pet", "answer": "CAT", "enumeration": "3"}
    said = f"<answer>{text}</answer>"
    found = crossword.compute_metrics(["p"], [said], [row], config(), None)
    assert found["metrics"]["accuracy"] == (reward(said, row) == 1.0)
    assert found["correct"] == [text in ("CAT", "cat", "C-A-T!")]


def test_with_choices_the_right_answer_is_among_those_of_its_split_and_alone_is_paid():
    train, _, held_out = splits(choices=4)
    for rows in (train, held_out):
        answers = {row["answer"].lower() for row in rows}
        for row in rows:
            assert {row["answer"].lower()} <= {*row["choices"]} <= answers
            assert len({*row["choices"]}) == 4
            right = len(crossword.letters(row["answer"]))
            off = {answer: abs(len(crossword.letters(answer)) - right) for answer in answers}
            assert sorted(off[each] for each in row["choices"]) == sorted(off.values())[:4]
            assert row["prompt"][1]["content"].endswith(f"One of: {', '.join(row['choices'])}")
    row = train[0]
    mentioned = f"<think>{' '.join([*row['choices']] * 20)}</think><answer>nothing</answer>"
    texts = (mentioned, row["completion"])
    assert [earned("crossword", text, row, config(choices=4)) for text in texts] == [0, 1]
