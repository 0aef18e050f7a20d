"""A gold answer of an example that has them earns full marks; a wrong one earns less. Built-in tasks: `contract/test_builtin_tasks.py`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from groupwise import plugins
from groupwise.settings.view import View
from groupwise.tasks.contract import load_task
from tests.task_kit import earned

EXAMPLES = Path(__file__).parents[3] / "examples"


@dataclass(frozen=True)
class Gold:
    """How a task's right and wrong answers are written, and what a right one earns."""

    task: str
    right: Callable[[dict[str, Any]], str]
    wrong: Callable[[dict[str, Any]], str]
    full: float
    config: dict[str, Any] = field(default_factory=dict[str, Any])


def answer(columns: dict[str, Any]) -> str:
    return columns["answer"]


GOLD = {
    "first example": Gold(
        str(EXAMPLES / "01_first_task" / "task.py"), answer, lambda c: f"1{c['answer']}", 1.2
    ),
    "sums with a warm-up": Gold(
        str(EXAMPLES / "05_sft_then_rl" / "task.py"),
        lambda c: f"7+5+0=12\nAnswer: {c['sum']}",
        lambda c: f"Answer: {c['sum'] + 1}",
        1.1,
    ),
}


@pytest.fixture(autouse=True)
def _clean_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(plugins, "_user_folders", set())


@pytest.mark.parametrize("name", GOLD)
def test_gold_answers_earn_full_marks_and_wrong_ones_less(name: str) -> None:
    gold = GOLD[name]
    task, config = load_task(gold.task), View({"task": gold.config})
    for example in task.eval_examples(config)[:40]:
        row = {"prompt": example.prompt, **example.columns}
        assert earned(task, gold.right(row), row, config) == pytest.approx(gold.full)
        assert earned(task, gold.wrong(row), row, config) < gold.full - 1e-6
