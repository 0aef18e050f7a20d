"""One whole run of the toy task, at which the tests of many files look. Folders below, which train nothing, import nothing for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class WholeRun:
    """An uninterrupted run, shared by many tests: copy its folder before you write to it."""

    runs: Path
    """The folder of the run's folder, which is called `toy`."""
    result: Any
    points: list[str]
    """Its durable writes, in order."""
    equal: dict[str, Any]
    """What must be equal in any other one."""


@pytest.fixture(scope="session")
def whole_toy(tmp_path_factory: pytest.TempPathFactory) -> WholeRun:
    import torch

    import groupwise
    from groupwise.core import atomic_files
    from tests.integration.toy_run import TOY, config, what_must_be_equal

    torch.set_num_threads(1)
    runs = tmp_path_factory.mktemp("whole-toy")
    points: list[str] = []
    atomic_files.on_write = points.append
    try:
        result = groupwise.rl(config(runs), TOY)
    finally:
        atomic_files.on_write = lambda name: None
    assert result.exit_code == 0
    return WholeRun(runs, result, points, what_must_be_equal(runs / "toy"))
