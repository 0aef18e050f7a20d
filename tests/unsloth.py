"""The stand-in of Unsloth where tests import it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from groupwise.models.config import LoraConfig, ModelConfig
from groupwise.models.lora import new_lora_config

SITE = Path(__file__).parent / "fake_unsloth"
"""Where it is installed."""
TINY = ModelConfig(name="tiny", backend="unsloth")


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have it be what `import unsloth` finds in this process."""
    monkeypatch.syspath_prepend(str(SITE))
    monkeypatch.delitem(sys.modules, "unsloth", raising=False)


def tiny(*, gradient_checkpointing: bool = False, longest: int = 64) -> Any:
    """The model `tiny` as the backend loads it, ready for adapters."""
    from groupwise.unsloth.model import UnslothModel
    from groupwise.unsloth.parts import load

    shape = new_lora_config(LoraConfig(r=4, alpha=8))
    base = load(TINY, "float32", longest)
    return UnslothModel(base, shape, gradient_checkpointing=gradient_checkpointing)
