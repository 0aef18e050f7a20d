"""Helpers for tests of built-in tasks: configs, splits, files of rows, and the rewards of a completion."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from groupwise.core.reward_call.request import MemberScore, ScoreRequest
from groupwise.core.reward_call.text import as_completion
from groupwise.core.settings.view import View
from groupwise.tasks.contract import Task, load_task

_builtin = cache(load_task)


def config(**task: Any) -> View:
    """A config with this section for the task."""
    return View({"task": task})


def splits(module: ModuleType, given: View) -> tuple[Any, Any, Any]:
    """Rows for training, validation and test; the first two with their gold completions."""
    train, validation = (
        module.get_sft_dataset(given, None),
        module.get_sft_eval_dataset(given, None),
    )
    return train, validation, module.get_eval_dataset(given)


def jsonl(file: Path, rows: Iterable[Mapping[str, Any]]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def scored(
    task: str | Task, said: Any, row: Mapping[str, Any], given: View | None = None, tokens: int = 1
) -> MemberScore:
    """The rewards of one answer to a row's prompt; none may fail."""
    found = _builtin(task) if isinstance(task, str) else task
    prompt = row.get("prompt", "?")
    columns = {name: [value] for name, value in row.items() if name not in ("prompt", "completion")}
    completion = as_completion(prompt, said) if isinstance(said, str) else said
    asked = ScoreRequest(0, [prompt], [completion], [[1] * tokens], columns, 0, 1)
    (member,) = asyncio.run(found.rubric(given or config(), None).score(asked)).members
    assert member.outcome == "scored", member.reason
    return member


def earned(task: str | Task, said: Any, row: Mapping[str, Any], given: View | None = None) -> float:
    reward = scored(task, said, row, given).reward
    assert reward is not None
    return reward
