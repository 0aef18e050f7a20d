"""The preprocessing of rows before prompts are made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from groupwise.core.errors import TaskError
from groupwise.tasks.data.config import DatasetConfig
from groupwise.tasks.data.loading import training_parts
from groupwise.tasks.data.messages import Unusable
from groupwise.tasks.data.pipelines import find_pipeline

CHAT = [{"role": "user", "content": "1+1?"}]
PAIR = {"prompt": "a", "answer": "b"}
OWN = """
def short(row):
    return None if len(row["q"]) > 4 else {"prompt": row["q"].upper(), "kept": row["id"]}

def wrong(row):
    return [row]

def broken(row):
    return row["missing"]

NUMBER = 3
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own_pipelines.py").write_text(OWN)
    rows = [{"q": "one?", "id": 1}, {"q": "three?", "id": 2}]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def data(**keys: Any) -> DatasetConfig:
    return DatasetConfig(dataset_name="rows.jsonl", **keys)


@pytest.mark.parametrize(("name", "row", "made"), [
    ("generic", {**PAIR, "x": 1}, {**PAIR, "x": 1, "reference": "b"}),
    ("generic", {**PAIR, "reference": "c"}, {**PAIR, "reference": "c"}),
    ("generic", {**PAIR, "reference": None}, {**PAIR, "reference": "b"}), ("generic", {"prompt": "a"}, {"prompt": "a"}),
    ("deepseek", {"prompt": CHAT, "answer": "2"}, {"prompt": CHAT, "answer": "2", "reference": "2"}),
    ("deepseek", {"prompt": "1+1?"}, {"prompt": CHAT}),
])  # fmt: skip
def test_built_in_pipelines(name: str, row: dict[str, Any], made: dict[str, Any]) -> None:
    given = json.dumps(row)
    assert find_pipeline(name)(row) == made
    assert json.dumps(row) == given, "the row that was given stays as it is"


def test_a_teachers_answer_is_the_completion() -> None:
    step = find_pipeline("generic", teacher=True)
    assert step({"prompt": "a", "answer": "b"}) == {**PAIR, "completion": "b"}
    assert step({"messages": CHAT}) == {"messages": CHAT}, "rows of another kind stay"
    with pytest.raises(Unusable, match="not text"):
        find_pipeline("generic")({"prompt": CHAT})


def test_own_ones_make_prompts_of_other_columns_and_leave_rows_out() -> None:
    parts, account = training_parts(
        data(preprocessing_pipeline="own_pipelines.py:short"), teacher=False
    )
    (part,) = parts
    assert [{k: row[k] for k in ("prompt", "kept")} for row in part.rows] == [
        {"prompt": "ONE?", "kept": 1}
    ]
    assert account.left_out == {"the pipeline own_pipelines.py:short gives None": 1}


@pytest.mark.parametrize(("name", "told"), [
    ("generc", r"No preprocessing pipeline `generc`(.|\n)*`generic`"), ("own_pipelines.py", "own_pipelines.py is not a function"),
    ("own_pipelines.py:NUMBER", "own_pipelines.py:NUMBER is not a function"), ("own_pipelines.py:shor", "has no `shor`"),
    ("own_pipelines.py:wrong", "Expected a row"), ("own_pipelines.py:broken", r"\{'q': 'one\?'(.|\n)*KeyError"),
    ("own_pipelines.py:short", r"gives None \(row 1\)"), ("generic", "no column 'prompt'. It has: q, id"),
])  # fmt: skip
def test_errors_of_a_preprocessing_pipeline_name_it_and_the_row(name: str, told: str) -> None:
    with pytest.raises(TaskError, match=told):
        training_parts(data(preprocessing_pipeline=name, strict=True), teacher=False)
    if name == "generc":  # before the data are read
        given = DatasetConfig(dataset_name="gone.jsonl", preprocessing_pipeline=name)
        with pytest.raises(TaskError, match="generc"):
            training_parts(given, teacher=False)
