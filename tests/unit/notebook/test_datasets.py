"""Datasets of notebooks: found by name, usable rows counted, and a train and a test part without a common question."""

from __future__ import annotations

import json
from typing import Any, cast

import numpy as np
import pytest

from groupwise.core.errors import TaskError
from groupwise.notebook import datasets
from groupwise.notebook.config import TrainingConfig
from groupwise.notebook.datasets import format_prompt, prepare_datasets, register_dataset
from groupwise.notebook.rewards import create_reward_functions, grades
from groupwise.notebook.rows import kind_of


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(datasets, "_REGISTERED", {})


def questions(rows):
    return [row["question"] for row in rows]


def rows(count):
    return [{"question": f"What is {n}?", "answer": str(n)} for n in range(count)]


def write(path, found):
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return path


def test_parts_are_disjoint_shuffled_by_the_seed_and_of_the_asked_sizes():
    config = TrainingConfig(dataset="arithmetic", dataset_max=50)
    train, test = prepare_datasets(config)
    assert (len(train), len(test)) == (45, 5)
    assert len({*questions(train), *questions(test)}) == 50
    again = prepare_datasets(config)
    assert (list(train), list(test)) == (list(again[0]), list(again[1]))
    register_dataset("numbers", lambda config: rows(50))
    numbers = TrainingConfig(dataset="numbers", train_fraction=0.5)
    one, other = (prepare_datasets(numbers.changed(seed=seed))[0] for seed in (1, 2))
    assert questions(one) != questions(other)
    assert questions(one) != sorted(questions(one))
    assert len(one) == 25
    assert [len(part) for part in prepare_datasets(numbers.changed(dataset_max=2))] == [1, 1]
    found = [
        {row["question"] for part in prepare_datasets(config) for row in part}
        for config in (numbers.changed(dataset_max=20, seed=seed) for seed in (1, 1, 2))
    ]
    assert found[0] == found[1] != found[2], "a sample by the seed"
    assert [len(each) for each in found] == [20] * 3


def test_the_prompt_has_the_question_and_neither_answer_nor_rubric():
    given = [
        {"question": f"Why {n}?", "rubric": "names the cause", "reference": "because"}
        for n in range(4)
    ]
    register_dataset("why", lambda config: given)
    config = TrainingConfig(dataset="why")
    train, _ = prepare_datasets(config)
    [message] = train[0]["prompt"]
    assert message == {"role": "user", "content": format_prompt(train[0]["question"], config)}
    assert message["content"].startswith(config.system_prompt)
    assert "cause" not in message["content"]
    assert "because" not in message["content"]
    assert "names the cause" in format_prompt("Why?", config, rubric="names the cause")


def test_unusable_rows_are_left_out_and_counted():
    twice, empty, bare = {"question": "what is  0?", "answer": "0"}, {"question": " "}, {"question": "x"}  # fmt: skip
    register_dataset("some", lambda config: [*rows(3), twice, empty, bare, cast("Any", 7)])
    train, test = prepare_datasets(TrainingConfig(dataset="some"))
    assert len(train) + len(test) == 3
    assert train.account.left_out == {
        "it is the same as an earlier row": 1,
        "it has no text in the column question": 1,
        "it has neither an answer nor a rubric with a reference": 1,
        "it is int and no row with columns": 1,
    }


def test_a_loader_may_give_both_parts_and_what_they_share_is_tested():
    def load(config):
        return rows(6), [*rows(2), {"question": "What is 99?", "answer": "99"}]

    register_dataset("parts", load)
    train, test = prepare_datasets(TrainingConfig(dataset="parts"))
    assert sorted(questions(test)) == ["What is 0?", "What is 1?", "What is 99?"]
    assert sorted(questions(train)) == [f"What is {n}?" for n in range(2, 6)]
    assert train.account.left_out == {"the test part has the question": 2}
    register_dataset("parts", lambda config: (rows(2), rows(1)))
    train, test = prepare_datasets(TrainingConfig(dataset="parts"))
    assert (questions(train), questions(test)) == (["What is 1?"], ["What is 0?"])
    for given, said in (
        ((rows(3), rows(4)), "stand in the test part"),
        ((rows(3), []), "no usable row"),
    ):
        register_dataset("parts", lambda config, given=given: given)
        with pytest.raises(TaskError, match=said):
            prepare_datasets(TrainingConfig(dataset="parts"))


def test_a_loader_is_given_the_config_and_columns_of_its_own_stay():
    class Mine(TrainingConfig):
        topic: str = "rivers"

    def load(config):
        return [{"question": f"{config.topic} {n}?", "answer": n, "hint": "h"} for n in range(3)]

    register_dataset("topics", load)
    train, _ = prepare_datasets(Mine(dataset="topics", topic="lakes", dataset_max=2))
    assert train[0]["question"].startswith("lakes")
    assert train[0]["hint"] == "h"
    assert len(train) == 1


def test_answers_and_rubrics_are_not_mixed():
    with pytest.raises(TaskError, match="2 have an answer"):
        kind_of([*rows(2), {"question": "b", "rubric": "short", "reference": "r"}])


def test_files_keep_their_other_columns(tmp_path):
    asked = [{"role": "user", "content": "Say it."}]
    given = [
        {"problem": f"{n} + 1?", "answer": n + 1, "level": n, "prompt": asked} for n in range(6)
    ]
    answers = write(tmp_path / "answers.jsonl", given)
    train, test = prepare_datasets(TrainingConfig(dataset=str(answers)))
    found = sorted((*train, *test), key=lambda row: row["level"])
    assert found[2] == {
        "problem": "2 + 1?", "question": "2 + 1?", "answer": "3", "level": 2, "prompt": asked,
    }  # fmt: skip
    solved = [{"problem": f"{n} + 1?", "solution": f"Add. #### {n + 1}"} for n in range(2)]
    train, test = prepare_datasets(TrainingConfig(dataset=str(write(tmp_path / "a.jsonl", solved))))
    assert {row["question"]: row["answer"] for row in (*train, *test)} == {
        "0 + 1?": "1",
        "1 + 1?": "2",
    }
    given = [{"QUERY": f"Why {n}?", "Rubrics": ["a", "b"], "gold": "c"} for n in range(3)]
    train, _ = prepare_datasets(TrainingConfig(dataset=str(write(tmp_path / "r.jsonl", given))))
    assert (train[0]["rubric"], train[0]["reference"]) == ("a\nb", "c")
    row = {"prompt": "Say.", "rubric": "brief", "answer": "d", "question_type": "y"}
    given = [{"question": f"Why {n}?", "response": "c", **row} for n in range(3)]
    rubrics = write(tmp_path / "rubrics.jsonl", given)
    config = TrainingConfig(dataset=str(rubrics))
    train, _ = prepare_datasets(config)
    kept = {name: train[0][name] for name in train[0] if name != "question"}
    assert kept == {**row, "reference": "c", "response": "c"}
    overlap = create_reward_functions(config, train)[1]
    columns = {name: [value] for name, value in kept.items() if name != "prompt"}
    assert overlap(prompts=["Say."], completions=["c"], **columns) == [5.0]


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " What is 1? "}]


def test_a_chat_alone_is_the_prompt_and_what_the_user_says_last_the_question(tmp_path):
    def chats(columns):
        return [
            {"prompt": [*CHAT, {"role": "user", "content": [{"type": "text", "text": f"{n}?"}]}], **columns}
            for n in range(4)
        ]  # fmt: skip

    answers, rubrics = chats({"answer": "1"}), chats({"rubric": "brief", "reference": "r"})
    register_dataset("chats", lambda config: answers)
    files = [
        str(write(tmp_path / f"{n}.jsonl", found)) for n, found in enumerate((answers, rubrics))
    ]
    for name, given in (("chats", answers), *zip(files, (answers, rubrics), strict=True)):
        train, test = prepare_datasets(TrainingConfig(dataset=name))
        found = sorted((*train, *test), key=lambda row: row["question"])
        assert found == [{**row, "question": f"{n}?"} for n, row in enumerate(given)]


def test_chats_without_a_question_are_left_out(tmp_path):
    given = [{"prompt": each, "answer": 1} for each in (CHAT[:1], CHAT, [], [{"from": "human", "value": "x"}], "a?", "b?")]  # fmt: skip
    file = write(tmp_path / "a.jsonl", given)
    train, test = prepare_datasets(TrainingConfig(dataset=str(file)))
    assert sorted(questions((*train, *test))) == ["What is 1?", "a?", "b?", "x"]
    assert train.account.left_out == {
        "no message of its prompt is the user's": 1,
        "there is no question": 1,
    }


def test_an_answer_is_a_text_or_a_number_for_loaders_and_files(monkeypatch):
    for answer in ({"value": 1}, np.array([1, 2]), ["1", {"value": 1}]):
        given = [*rows(3), {"question": "Which?", "answer": answer}]
        register_dataset("listed", lambda config, given=given: given)
        reading(monkeypatch, given)
        for name in ("listed", "somebody/listed"):
            train, test = prepare_datasets(TrainingConfig(dataset=name))
            assert len(train) + len(test) == 3
            [reason] = train.account.left_out
            assert reason.startswith(
                f"its answer is {'ndarray' if hasattr(answer, 'shape') else 'dict'}"
            )


def test_an_answer_may_have_several_forms(tmp_path):
    given = [{"question": f"{n}?", "answer": [str(n), f"the number {n}"]} for n in range(3)]
    register_dataset("forms", lambda config: given)
    file = write(tmp_path / "a.jsonl", given)
    for name in ("forms", str(file)):
        config = TrainingConfig(dataset=name)
        train, _ = prepare_datasets(config)
        assert train[0]["answer"] in [row["answer"] for row in given]
        right = train[0]["answer"]
        said = [f"<answer>{form}</answer>" for form in (*right, "9")]
        columns = {"answer": [right] * len(said)}
        assert grades(config.tags, said, tolerant=False, **columns) == [1.0, 1.0, 0.0]
    register_dataset("none", lambda config: [*given, {"question": "Which?", "answer": []}])
    train, test = prepare_datasets(TrainingConfig(dataset="none"))
    assert len(train) + len(test) == 3


def test_ambiguous_columns_of_a_file_are_refused(tmp_path):
    file = tmp_path / "pairs.csv"
    file.write_text("prompt,completion\na,b\nc,d\n")
    with pytest.raises(TaskError, match=r"the answer.* prompt, completion"):
        prepare_datasets(TrainingConfig(dataset=str(file)))
    file.write_text("question,answer\na,\nc,\n")
    with pytest.raises(TaskError, match="2 × there is no answer") as told:
        prepare_datasets(TrainingConfig(dataset=str(file)))
    assert "task." not in str(told.value)


def test_openrubrics_takes_the_better_response_as_reference(monkeypatch):
    two = {"response_a": "x", "response_b": "y", "rubric": "r"}
    found = [
        {"instruction": "Why?", "winner": "B", **two},
        {"instruction": "How?", "winner": "response_a", **two},
        {"instruction": "Who?", "response": "z", "rubric": "r"},
    ]
    asked = reading(monkeypatch, found)
    train, test = prepare_datasets(TrainingConfig(openrubrics_max=77))
    assert asked == [("OpenRubrics/OpenRubrics", 77, 42)]
    references = {row["question"]: row["reference"] for row in (*train, *test)}
    assert references == {"Why?": "y", "How?": "x"}
    assert all(row.keys() >= {"prompt", "rubric", "winner", "response_a"} for row in train)
    assert train.account.left_out == {"the reference is missing": 1}
    found = [{"question": f"{n}?", "answer": f"so\n#### {n}", "id": n} for n in range(3)]
    asked = reading(monkeypatch, found)
    train, _ = prepare_datasets(TrainingConfig(dataset="gsm8k", dataset_max=3))
    assert asked == [("openai/gsm8k", "main", "train", 3, 42)]
    assert all(set(row) == {"prompt", "question", "answer", "id"} for row in train)


def reading(monkeypatch, found):
    """These rows stand for those of the hub; what is asked of it."""
    asked = []

    def read(source, *split, limit, seed):
        asked.append((source, *split, limit, seed))
        return found

    monkeypatch.setattr(datasets, "read_source", read)
    return asked
