"""Questions with rubrics: the format of their sets, and that repeating a rubric earns nothing."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from groupwise.core.errors import TaskError
from groupwise.core.types import Example
from groupwise.tasks.builtin import rubric_answers
from groupwise.tasks.builtin.rubric_answers import CRITERION, rubric_text
from groupwise.tasks.rewards.overlap import words
from groupwise.training.checks.check_gold import echo
from tests.task_kit import config, earned, jsonl

QUESTION = {"question": "Why?", "rubric": "because; reasons", "reference": "Because of reasons."}


def written(folder: Path, rows: list[dict[str, Any]]) -> str:
    return jsonl(folder / "questions.jsonl", rows)


def numbered(count: int, **columns: Any) -> list[dict[str, Any]]:
    return [{**QUESTION, "question": f"Why {number}?", **columns} for number in range(count)]


SPLITS = {"train_size": None, "validation_size": 1, "eval_size": 1}


def test_prompt_has_the_question_and_not_the_rubric() -> None:
    rows = rubric_answers.get_rl_dataset(config())
    assert len(rows) == 55
    told, asked = rows[0]["prompt"]
    assert told["role"] == "system"
    assert asked == {"role": "user", "content": rows[0]["question"]}
    assert not any(row["rubric"] in json.dumps(row["prompt"]) for row in rows)


# Echoes


def mean_share(rows: list[dict[str, Any]], text_of: Any) -> float:
    return fmean(earned("rubric_answers", text_of(row), row) for row in rows) / 15.0


def prompt_of(row: dict[str, Any]) -> str:
    return echo(Example(0, row["prompt"], {}))


def test_repeating_the_prompt_earns_little() -> None:
    rows = rubric_answers.get_rl_dataset(config())
    assert mean_share(rows, prompt_of) < 0.15
    assert mean_share(rows, lambda row: row["reference"]) == pytest.approx(1.0)


def test_the_rubric_in_the_prompt_is_warned_about_and_not_paid_for_when_copied() -> None:
    with pytest.warns(UserWarning, match=r"task\.rubric_in_prompt"):
        rows = rubric_answers.get_rl_dataset(config(rubric_in_prompt=True))
    assert all(row["rubric"] in prompt_of(row) for row in rows)
    assert mean_share(rows, prompt_of) < 0.15
    hidden = rubric_answers.get_rl_dataset(config())
    assert mean_share(hidden, lambda row: row["rubric"]) > 0.65
    assert mean_share(rows, lambda row: row["reference"]) == pytest.approx(1.0)
    for joint, step in ((" ", 1), (" ", -1), (" x ", 1)):
        assert mean_share(rows, lambda row: joint.join(words(row["rubric"])[::step])) < 0.2  # noqa: B023


# What sets look like


@pytest.mark.parametrize(("rubric", "text"), [
    (" names Jupiter ", "names Jupiter"), (["names Jupiter", "gas giant"], "names Jupiter\ngas giant"),
    ([{"title": "Name", "description": "names Jupiter", "weight": 5}], "names Jupiter"),
    ([{"criterion": "gas giant", "points": 3}], "gas giant"), ('["one", "two"]', "one\ntwo"),
    ("[sic] one", "[sic] one"),
])  # fmt: skip
def test_rubrics_come_as_text_lists_and_records(rubric: Any, text: str) -> None:
    assert rubric_text(rubric) == text


PROMPT = [{"role": "system", "content": "s"}, {"role": "user", "content": "Why?"}]


@pytest.mark.parametrize(("names", "row"), [
    ({}, {"instruction": "Why?", "grading_rubric": "r", "response": "a"}),
    ({}, {"query": "Why?", "rubrics": ["r"], "reference_answer": "a", "score": 3}),
    ({}, {"student_input": "Why?", "rubric_text": "r", "reference_response": "a"}),
    ({"question": "q", "reference": "best"}, {"q": "Why?", "rubric": "r", "best": "a"}),
    ({}, {"prompt": PROMPT, "rubric": "r", "reference": [{"role": "assistant", "content": "a"}]}),
])  # fmt: skip
def test_columns_go_by_their_usual_names(
    names: dict[str, str], row: dict[str, Any], tmp_path: Path
) -> None:
    question = next(
        name for name in ("q", "instruction", "query", "student_input", "prompt") if name in row
    )
    rows = [row]
    for number in (1, 2):
        asked = row[question]
        more = (
            f"{number}?" if isinstance(asked, str) else [{"role": "user", "content": f"{number}?"}]
        )
        rows.append({**row, question: more})
    own = config(source=written(tmp_path, rows), columns=names, **SPLITS)
    found = [*rubric_answers.get_rl_dataset(own), *rubric_answers.get_eval_dataset(own)]
    assert {each["question"] for each in found} <= {"Why?", "1?", "2?"}
    assert {(each["rubric"], each["reference"]) for each in found} == {("r", "a")}
    assert {each.get("score") for each in found} == {row.get("score")}


def test_rows_that_cannot_be_used_are_counted_or_refused(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "a"}]
    bad = [
        {**QUESTION, "question": None},
        {**QUESTION, "question": " "},
        {**QUESTION, "question": "a", "rubric": ""},
        {**QUESTION, "question": "b", "rubric": None},
        {**QUESTION, "question": "c", "rubric": 7},
        {**QUESTION, "question": "d", "rubric": [{"x": 1}]},
        {**QUESTION, "question": "e", "reference": asked},
        {**QUESTION, "question": " why  0? "},
    ]
    source = written(tmp_path, [*numbered(4), *bad])
    own = config(source=source, **SPLITS)
    left_out = {
        "the question is missing": 1,
        "the question is empty": 1,
        "the rubric is empty": 1,
        "the rubric is missing": 1,
        "the rubric cannot be read: int is not a rubric": 1,
        f"the rubric cannot be read: a criterion has none of {', '.join(CRITERION)}, but x": 1,
        "the reference is neither text nor messages of which one has the role assistant": 1,
        "it is the same as an earlier row": 1,
    }
    for rows, count in (
        (rubric_answers.get_rl_dataset(own), 2),
        (rubric_answers.get_eval_dataset(own), 1),
        (rubric_answers.get_sft_eval_dataset(own, None), 1),
    ):
        assert len(rows) == count
        assert rows.account.left_out == left_out
    with pytest.raises(TaskError, match="row 4: the question"):
        rubric_answers.get_rl_dataset(config(source=source, strict=True, **SPLITS))


def test_metrics() -> None:
    rows = rubric_answers.get_eval_dataset(config())[:2]
    texts = [rows[0]["reference"], ""]
    prompts = [row["prompt"] for row in rows]
    found = rubric_answers.compute_metrics(prompts, texts, rows, config(), None)
    words = len(rows[0]["reference"].split()) / 2
    assert found["metrics"] == {"rubric_overlap": 7.5, "words": words}
