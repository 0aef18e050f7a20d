"""What is measured of an answer: between the marks, or the last number where there are none."""

from __future__ import annotations

import pytest

from groupwise.notebook.config import TrainingConfig
from groupwise.notebook.grading import grades, with_marks
from groupwise.notebook.task import NotebookTask
from groupwise.rewards.rubric import Rubric
from groupwise.rewards.tags import Tags


@pytest.mark.parametrize(
    ("said", "measured"),
    [
        ("<answer>7</answer> and not 8", "<answer>7</answer> and not 8"),
        ("3 + 4 is 7.", "<answer>7</answer>"),
        ("it is 1,234.5, I think", "<answer>1,234.5</answer>"),
        ("20 - 27 = -7", "<answer>-7</answer>"),
        ("5-3", "<answer>3</answer>"),
        (r"so \boxed{7}, in 2 steps", r"so \boxed{7}, in 2 steps"),
        ("<answer>", "<answer>"),
        ("none", "none"),
    ],
)
def test_the_answer(said: str, measured: str) -> None:
    assert with_marks(Tags(), said) == measured
    assert with_marks(Tags(), [{"role": "assistant", "content": said}]) == measured


def test_marks_of_another_kind() -> None:
    tags = Tags(reasoning=("(", ")"), answer=("[", "]"))
    assert with_marks(tags, "(3 and 4) so 7") == "[7]"
    assert grades(tags, ["it is 7", "[7] or 8", "8"], tolerant=False, answer=["7"] * 3) == [1, 1, 0]


def none(completions: list[str], **columns: object) -> list[float]:
    return [0.0] * len(completions)


def test_a_model_that_writes_no_marks_is_measured_all_the_same() -> None:
    task = NotebookTask(TrainingConfig(dataset="arithmetic"), [], [], Rubric([none], where="test"))
    rows = [{"question": "3 + 4?", "answer": "7"}] * 4
    said = ["3 + 4 = 7", "7.5", "<reasoning>4 and 3</reasoning><answer>7</answer>", "no idea"]
    found = task.compute_metrics(["?"] * 4, said, rows, {}, None)["metrics"]
    assert found == {"accuracy": 0.5, "within_10_percent": 0.75, "format_rate": 0.25}
