"""Simulates what another thread or process does at the worst moment: between two steps of the code under test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def right_after(
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    change: Callable[[], object],
    when: Callable[[Any], bool] = lambda _: True,
) -> None:
    """Call `change` once, after the first call of `owner.name` whose first argument fulfils `when`."""
    _interrupt(monkeypatch, owner, name, change, when, before=False)


def right_before(
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    change: Callable[[], object],
    when: Callable[[Any], bool] = lambda _: True,
) -> None:
    """Call `change` once, before the first call of `owner.name` whose first argument fulfils `when`."""
    _interrupt(monkeypatch, owner, name, change, when, before=True)


def _interrupt(
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    change: Callable[[], object],
    when: Callable[[Any], bool],
    *,
    before: bool,
) -> None:
    real = getattr(owner, name)
    pending = [change]

    def call(*arguments: Any, **keywords: Any) -> Any:
        due = bool(pending) and when(arguments[0] if arguments else None)
        if due and before:
            pending.pop()()
        result = real(*arguments, **keywords)
        if due and not before and pending:
            pending.pop()()
        return result

    monkeypatch.setattr(owner, name, call)
