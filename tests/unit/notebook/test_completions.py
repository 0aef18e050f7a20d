"""Completions as plain text: few tables, however long a training is."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from groupwise.notebook import completions
from groupwise.notebook.completions import Completions
from groupwise.notebook.record import completions_table


def told(steps: range, max_steps: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is said in the course of these steps."""

    class Record:
        def __init__(self, folder: Path) -> None:
            pass

        def table(self, step: int, limit: int, longest: int):
            part = SimpleNamespace(name="right", value=0.5)
            text = f"answer of {step}\n" + "x" * 500
            shown: Any = [
                SimpleNamespace(reward=0.25, parts=[part], completion=text, draw=place // 2)
                for place in range(limit)
            ]
            prompts = {draw: f"{'y' * 500} question {draw}?" for draw in range(limit)}
            return completions_table(shown, prompts, longest)

    monkeypatch.setattr(completions, "Record", Record)
    said: list[str] = []
    run = SimpleNamespace(
        first_step=steps.start, max_steps=max_steps, folder=Path(), say=said.append
    )
    callback = Completions()
    for step in steps:
        run.step = step + 1
        callback.on_step_end(run, {})  # pyright: ignore[reportArgumentType]
    return said


def numbers(said: list[str]) -> list[int]:
    return [int(re.findall(r"^Completions of step (\d+)\n", each)[0]) for each in said]


def test_a_table_has_rewards_parts_and_the_beginning_of_each_completion(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    [text] = told(range(1), 20, monkeypatch)
    title, header, *rows = text.splitlines()
    assert (title, header.split()) == (
        "Completions of step 1",
        ["asked", "reward", "parts", "completion"],
    )
    assert len(rows) == completions.SHOWN
    assert re.fullmatch(r"  …y+ question 0\?  0\.25    right 0\.50  answer of 0⏎x+…", rows[0])
    assert re.fullmatch(r" +0\.25    right 0\.50  answer of 0⏎x+…", rows[1])
    assert "question 1?" in rows[2]
    assert max(map(len, rows)) <= 140


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
    assert numbers(told(steps, most, monkeypatch)) == expected
