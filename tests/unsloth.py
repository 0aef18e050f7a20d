"""Installs the stand-in of Unsloth for tests, and runs commands with the real one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from groupwise.engine.models.config import LoraConfig, ModelConfig
from groupwise.engine.models.lora_config import new_lora_config

SITE = Path(__file__).parent / "fake_unsloth"
"""The folder where Unsloth is installed."""
TINY = ModelConfig(name="tiny", backend="unsloth")


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `import unsloth` find the stand-in in this process; undone after the test."""
    monkeypatch.syspath_prepend(str(SITE))
    monkeypatch.setitem(sys.modules, "unsloth", None)
    del sys.modules["unsloth"]


def told(python: Path, folder: Path, verb: str, *words: str) -> dict[str, Any]:
    """Run a command with a Python that has the real Unsloth; it must succeed. Returns its output."""
    done = subprocess.run(
        [str(python), "-m", "groupwise", verb, "--json", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(SITE.parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def tiny(*, gradient_checkpointing: bool = False, longest: int = 64) -> Any:
    """The model `tiny` as the backend loads it, ready for adapters."""
    from groupwise.engine.backends.unsloth.library import load
    from groupwise.engine.backends.unsloth.model import UnslothModel

    shape = new_lora_config(LoraConfig(r=4, alpha=8))
    base = load(TINY, "float32", longest)
    return UnslothModel(base, shape, gradient_checkpointing=gradient_checkpointing)
