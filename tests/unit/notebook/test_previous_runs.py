"""Which earlier run a training continues, and what is said of the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from groupwise.notebook import previous_runs


def test_only_the_newest_run_and_the_newest_that_was_cut_off_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states = {"a": "stopped", "a-2": "stopped", "a-3": "finished", "a-4": "finished"}
    runs = [
        SimpleNamespace(name=name, path=name, state=state, broken=None)
        for name, state in states.items()
    ]
    monkeypatch.setattr(previous_runs.find, "list_runs", lambda folder: runs)
    monkeypatch.setattr(previous_runs.find, "newest_weights", lambda path: path)
    monkeypatch.setattr(previous_runs, "changes", lambda *of: ["training.seed"])
    core: Any = SimpleNamespace(run=SimpleNamespace(name="a", dir="."))
    said: list[str] = []
    assert previous_runs.newest_alike(core, {}, said.append) is None
    assert [line.split()[0] for line in said] == ["a-4", "a-2"]
    assert all("differs in seed" in line for line in said)
