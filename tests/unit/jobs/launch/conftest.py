"""A training that only records its arguments."""

from types import SimpleNamespace
from typing import Any

import pytest

from groupwise.jobs.launch import train_grpo


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the command was understood to be given: flags, overrides, and how."""
    calls: list[tuple[Any, ...]] = []

    def train(*given: Any, **how: Any) -> Any:
        calls.append((*given, how))
        return SimpleNamespace(summary={}, exit_code=0)

    monkeypatch.setattr(train_grpo, "train_grpo", train)
    monkeypatch.delenv("RESUME_FROM", raising=False)
    return calls
