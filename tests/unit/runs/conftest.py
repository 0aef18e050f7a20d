"""Crashes at a named point, for all tests of the run folder."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from groupwise.core import atomic_files

DieAt = Callable[[str, Callable[[], object]], None]


@pytest.fixture
def die_at() -> DieAt:
    """`die_at(point, work)` does `work` in a child process that dies at the crash point, as by kill -9."""
    return _die_at


def _die_at(point: str, work: Callable[[], object]) -> None:
    def die(name: str) -> None:
        if name == point:
            os._exit(9)

    child = os.fork()
    if child == 0:
        atomic_files.on_write = die
        try:
            work()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9, f"{point} was not reached"
