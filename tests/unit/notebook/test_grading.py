"""What is measured of an answer: between the marks, or the last number or line where there are none."""

from __future__ import annotations

from typing import Any

import pytest

from groupwise.core.reward_call.tags import Tags
from groupwise.notebook.config import TrainingConfig
from groupwise.notebook.grading import grades, with_marks
from groupwise.notebook.task import RIGHT, NotebookTask
from groupwise.tasks.rewards.rubric import Rubric


def test_the_answer() -> None:
    for said, measured in (
        ("<answer>7</answer> and not 8", None), ("3 + 4 is 7.", "<answer>7</answer>"), ("it is 1,234.5", "<answer>1,234.5</answer>"),
        ("20 - 27 = -7", "<answer>-7</answer>"), ("5-3", "<answer>3</answer>"), (r"so \boxed{7}, in 2 steps", None), ("<answer>", None),
        ("none", None), ("", None),
    ):  # fmt: skip
        expected = said if measured is None else measured
        assert with_marks(Tags(), said, ["7"]) == expected
        assert with_marks(Tags(), [{"role": "assistant", "content": said}], ["7"]) == expected


@pytest.mark.parametrize(("gold", "said", "right"), [
    ("1/2", "1/2", True), ("6", "about 1e6", False), ("1000000", "it is 1e6.", True), ("0.5", "so .5", True), ("5", "0.25 or .5", False),
    ("Tokyo", "The capital is Tokyo.", True), ("Tokyo", "Hm.\nIt is **Tokyo**!\n", True), ("Tokyo", "<answer>It is Tokyo</answer>", True),
    ("Tokyo", "<answer>Kyoto</answer> and not Tokyo", False), ("Tokyo", "Tokyo, or Kyoto", False), ("New York", "It is New\nYork", False),
    ("St. Louis", "It is St. Louis.", True), ("Apollo 11", "It was Apollo 11", True), ("Apollo 11", "It was 11", False),
    ("x+1", "<answer>x + 1</answer>", True), ("x+1", "1 + x", True), (["Tokyo", "Edo"], "It was Edo.", True), (7, "It is 7", True),
])  # fmt: skip
def test_what_is_right(gold: Any, said: str, right: bool) -> None:
    assert grades(Tags(), [said], tolerant=False, answer=[gold]) == [right]
    assert (grades(Tags(), [said], tolerant=True, answer=[gold])[0] >= RIGHT) == right


def none(completions: list[str], **columns: object) -> list[float]:
    return [0.0] * len(completions)


def test_a_model_that_writes_no_marks_is_measured_all_the_same() -> None:
    task = NotebookTask(TrainingConfig(dataset="arithmetic"), [], [], Rubric([none], where="test"))
    rows = [{"question": "3 + 4?", "answer": "7"}] * 4
    said = ["3 + 4 = 7", "7.5", "<reasoning>4 and 3</reasoning><answer>7</answer>", "no idea"]
    found = task.compute_metrics(["?"] * 4, said, rows, {}, None)["metrics"]
    assert found == {"accuracy": 0.5, "within_10_percent": 0.75, "format_rate": 0.25}
    words = [{"question": "Capital of Japan?", "answer": "Tokyo"}] * 4
    said = ["It is Tokyo.", "Kyoto", "<reasoning>so</reasoning><answer>Tokyo</answer>", "?"]
    found = task.compute_metrics(["?"] * 4, said, words, {}, None)["metrics"]
    assert found == {"accuracy": 0.5, "format_rate": 0.25}
    found = task.compute_metrics(["?"] * 4, said, [*words[1:], *rows[:1]], {}, None)["metrics"]
    assert found["within_10_percent"] == 0.5
