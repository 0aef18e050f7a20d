"""Initial weights from a checkpoint of a run that goes on meanwhile. tests/integration/test_resume.py has the rest."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from groupwise.core.errors import RunNotFoundError
from groupwise.training.loops.resume import copy_start_weights
from tests.meanwhile import right_before


def test_a_checkpoint_that_is_pruned_while_it_is_copied_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = tmp_path / "checkpoints" / "step-4"
    start.mkdir(parents=True)
    (start / "model.safetensors").touch()
    right_before(monkeypatch, os, "scandir", lambda: shutil.rmtree(start), lambda at: at == start)
    run: Any = SimpleNamespace(path=tmp_path / "run")
    with pytest.raises(RunNotFoundError, match="step-4 was deleted"):
        copy_start_weights(run, run, start)
