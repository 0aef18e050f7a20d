"""A gold answer of an example that has them earns full marks; a wrong one earns less. Built-in tasks: `contract/test_builtin_tasks.py`."""

import sys
from pathlib import Path

import pytest

from groupwise.core import plugins
from groupwise.core.settings.view import View
from groupwise.tasks.contract import load_task
from tests.task_kit import earned

EXAMPLES = Path(__file__).parents[4] / "examples"


@pytest.fixture(autouse=True)
def _clean_imports(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(plugins, "_user_folders", set())


@pytest.mark.parametrize(
    ("folder", "right", "wrong", "full"),
    [
        ("01_first_task", lambda c: c["answer"], lambda c: f"1{c['answer']}", 1.2),
        (
            "05_sft_then_rl",
            lambda c: f"7+5+0=12\nAnswer: {c['sum']}",
            lambda c: f"Answer: {c['sum'] + 1}",
            1.1,
        ),
    ],
)
def test_gold_answers_earn_full_marks_and_wrong_ones_less(folder, right, wrong, full):
    task, config = load_task(str(EXAMPLES / folder / "task.py")), View({"task": {}})
    for example in task.eval_examples(config)[:40]:
        row = {"prompt": example.prompt, **example.columns}
        assert earned(task, right(row), row, config) == pytest.approx(full)
        assert earned(task, wrong(row), row, config) < full - 1e-6
