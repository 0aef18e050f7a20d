"""The interface to Unsloth: the calls of it, and the messages if it cannot be used."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from groupwise.core.errors import ModelError
from groupwise.engine.backends.unsloth.library import load
from groupwise.engine.models.config import LoraConfig, ModelConfig
from groupwise.engine.models.plan import MIB, plan_model
from tests import unsloth


def test_it_neither_writes_to_stdout_nor_has_others_write(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("UNSLOTH_COMPILE_LOCATION", raising=False)
    monkeypatch.delenv("UNSLOTH_DISABLE_STATISTICS", raising=False)
    root = logging.getLogger()
    before = root.level, [*root.handlers]
    load(unsloth.TINY, "float32", 64)
    said = capsys.readouterr()
    assert said.out == ""
    assert "will patch your computer" in said.err
    assert (root.level, root.handlers) == before
    assert os.environ["UNSLOTH_COMPILE_LOCATION"] == str(tmp_path / "groupwise/unsloth")
    assert os.environ["UNSLOTH_DISABLE_STATISTICS"] == "1"


def test_the_model_is_frozen_and_draws_without_penalties() -> None:
    model: Any = load(unsloth.TINY, "bfloat16", 64)
    assert model.max_seq_length == 64
    room: Any = load(unsloth.TINY, "float32", None).max_seq_length
    assert load(unsloth.TINY, "float32", room + 64).max_seq_length == room
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert str(model.dtype) == "torch.bfloat16"
    assert model.generation_config.repetition_penalty in (None, 1.0)


def test_weights_are_as_small_as_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    four = ModelConfig(name="tiny", backend="unsloth", load_in_4bit=True)
    assert load(four, "float32", 64).is_loaded_in_4bit
    assert not load(unsloth.TINY, "float32", 64).is_loaded_in_4bit
    monkeypatch.setenv("FAKE_UNSLOTH_REFUSES_4BIT", "1")
    with pytest.raises(ModelError, match="load_in_4bit is"):
        load(four, "float32", 64)


def test_the_plan_knows_how_much_smaller_the_weights_are() -> None:
    """Of the tiny model's linear layers, in float32."""

    def weights(**bits: Any) -> float:
        config = ModelConfig(name="tiny", backend="unsloth", **bits)
        planned = plan_model(
            config, LoraConfig(), dtype="float32", decoding=None, microbatch=64, needs_reference=False, device="cpu"
        )  # fmt: skip
        return planned.memory.weights * MIB

    linear = sum(
        module.weight.numel()
        for path, module in load(unsloth.TINY, "float32", 64).named_modules()
        if isinstance(module, torch.nn.Linear) and path != "lm_head"
    )
    assert weights() - weights(load_in_8bit=True) == pytest.approx(3 * linear)
    assert weights() - weights(load_in_4bit=True) == pytest.approx((4 - 4.127 / 8) * linear)
