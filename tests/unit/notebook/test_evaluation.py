"""The sampling of an evaluation in a notebook: which temperature, how many samples."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from groupwise.notebook import TrainingConfig, evaluate, evaluation, prepare_session
from groupwise.training.config import EvalConfig, load_config


@pytest.fixture
def eval_configs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[EvalConfig]:
    """How the core would answer the test part."""
    found: list[EvalConfig] = []

    def evaluated(config: Any, *_: Any, overrides: Any, samples_per_prompt: int, **__: Any) -> Any:
        samples = f"eval.samples_per_prompt={samples_per_prompt}"
        found.append(load_config(config, [*overrides, samples]).config.eval)
        return SimpleNamespace(policy="base", metrics={}, metrics_with_interval=[], prompts=1)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(evaluation, "evaluated", evaluated)
    return found


WARM = {"eval.temperature": 0.3, "eval.samples_per_prompt": 2}


@pytest.mark.parametrize(("overrides", "given", "expected"), [
    ({}, {}, (1, 0.0)), ({}, {"samples_per_prompt": np.int64(4)}, (4, 1.0)), (WARM, {}, (2, 0.3)),
    (WARM, {"samples_per_prompt": 4}, (4, 0.3)), ({"eval": {"temperature": 0.3}}, {"samples_per_prompt": 4}, (4, 0.3)),
])  # fmt: skip
def test_overrides_win(
    eval_configs: list[EvalConfig], overrides: Any, given: Any, expected: Any
) -> None:
    config = TrainingConfig(model="tiny", dataset="arithmetic", dataset_max=8, overrides=overrides)
    evaluate(config, prepare_session(config), **given)
    [found] = eval_configs
    assert (found.samples_per_prompt, found.temperature) == expected
