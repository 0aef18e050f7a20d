"""Parametrise over a part of a long list, chosen by the commit hash; the soak suite runs the whole list.

GROUPWISE_TURN overrides the commit hash; without git it is 0.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
VARIABLE = "GROUPWISE_TURN"


@cache
def turn() -> int:
    """A number that differs from commit to commit."""
    if given := os.environ.get(VARIABLE):
        return int(given)
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=7", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return 0
    return int(found[:7], 16)


def described() -> str:
    """A line for the session's header: how to run the same part again."""
    return f"{VARIABLE}={turn()}"


def rotating_params(
    items: Sequence[T], parts: int, suite: str, name: Callable[[T], str], marks: Sequence[Any] = ()
) -> list[Any]:
    """One in `parts` of the items, at least one; and all items, with the mark of the soak suite."""
    parts = min(parts, len(items)) or 1
    now = [
        pytest.param(each, id=name(each), marks=marks) for each in items[turn() % parts :: parts]
    ]
    soak = (*marks, pytest.mark.soak(suite=suite))
    return now + [pytest.param(each, id=f"all: {name(each)}", marks=soak) for each in items]
