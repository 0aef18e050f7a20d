"""lighteval's output: read completely, or its absence is reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from groupwise.core.errors import RunError
from groupwise.training.suites.lighteval import SUITES, read_scores
from tests.fake_lighteval import write

LOG = "log.txt"


def write_results(folder: Path, suite: str, *scores: float, does: str | None = None) -> None:
    rows: list[Any] = [
        {"id": str(number), "prompt": "?", "texts": ["x"], "score": score}
        for number, score in enumerate(scores)
    ]
    write(folder / "out", "openai/a/b", SUITES[suite].task, rows, does)
    (folder / LOG).touch()


@pytest.mark.parametrize("suite", SUITES)
def test_the_share_of_right_answers_is_found(tmp_path, suite):
    write_results(tmp_path, suite, 1.0, 0.5, 0.0)
    marks = read_scores(SUITES[suite], tmp_path, tmp_path / LOG)
    assert marks.value == 0.5
    assert marks.scores == {"0": 1.0, "1": 0.5, "2": 0.0}
    assert marks.stderr == pytest.approx((0.5 / 2 / 3) ** 0.5)
    assert (marks.version, marks.dataset) == (2, f"someone/{SUITES[suite].task}")


@pytest.mark.parametrize(("does", "told"), [
    ("torn", "is not JSON"), ("old", r"not what lighteval 0\.13 writes \(KeyError: 'results'\)"),
    ("other", "0.987, which is not the mean of its single marks"),
])  # fmt: skip
def test_unreadable_results_of_lighteval_are_refused(tmp_path, does, told):
    write_results(tmp_path, "math_500", 1.0, 0.0, does=does)
    with pytest.raises(RunError, match=told):
        read_scores(SUITES["math_500"], tmp_path, tmp_path / LOG)


def test_details_that_lack_are_reported(tmp_path):
    write_results(tmp_path, "lcb", 1.0)
    for file in (tmp_path / "out/details").rglob("*.parquet"):
        file.unlink()
    with pytest.raises(RunError, match="ValueError"):
        read_scores(SUITES["lcb"], tmp_path, tmp_path / LOG)
