"""Completions as plain text: few tables, however long a training is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from groupwise.display.notebook import Table
from groupwise.notebook import completions
from groupwise.notebook.completions import Completions


class Record:
    """Of any run; its tables are empty."""

    def __init__(self, folder: Path) -> None: ...

    def table(self, step: int, limit: int, longest: int) -> Table:
        return Table("", [])


@pytest.mark.parametrize(
    ("steps", "most", "expected"),
    [
        (range(3), 3, [1, 2, 3]),
        (range(450), 450, [1, 57, 114, 171, 228, 285, 342, 399, 450]),
        (range(200, 450), 450, [201, 228, 285, 342, 399, 450]),
    ],
)
def test_they_come_at_the_first_step_at_the_last_and_now_and_then(
    steps: range, most: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completions, "Record", Record)
    said: list[str] = []
    run = SimpleNamespace(first_step=steps.start, max_steps=most, folder=Path(), say=said.append)
    callback = Completions()
    for run.step in range(steps.start + 1, steps.stop + 1):
        callback.on_step_end(run, {})  # pyright: ignore[reportArgumentType]
    assert [int(each.split()[-1]) for each in said] == expected
