"""Runs of `groupwise rl` with the backend tunix: two devices, and a resume."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from groupwise.notebook.record import Record
from groupwise.training.loops.rl_start import RlResult, rl
from tests.tunix_models import model_of

pytestmark = pytest.mark.timeout(400)
SOAK = pytest.mark.soak(suite="tunix")


class Digits:
    """A task that a random model can get better at."""

    def get_rl_dataset(self, config: Any) -> list[dict[str, Any]]:
        return [{"prompt": f"count to {number}"} for number in range(12)]

    def get_reward_funcs(self, config: Any, tokenizer: Any) -> list[Any]:
        return [digits]


def digits(completions: list[str], **columns: Any) -> list[float]:
    return [sum(letter.isdigit() for letter in text) / max(len(text), 1) for text in completions]


def values(folder: Path, family: str = "gemma3", **model: Any) -> dict[str, Any]:
    return {
        "model": {"name": str(model_of(family, layers=2)), "backend": "tunix", **model},
        "lora": {"r": 8, "alpha": 16},
        "sampler": {"max_completion_length": 12},
        "algorithm": {"type": "grpo", "beta": 0.05},
        "training": {"max_steps": 4, "prompts_per_step": 2, "num_generations": 8, "learning_rate": 0.02, "num_iterations": 2,
                     "lr_scheduler_type": "constant"},
        "run": {"dir": str(folder), "name": "r", "save_steps": 2},
    }  # fmt: skip


def adapter(result: RlResult) -> bytes:
    return (result.folder / "final" / "adapter_model.safetensors").read_bytes()


def rewards(result: RlResult) -> list[float]:
    return [value for _, value in Record(result.folder).metrics("reward")["reward"]]


def assert_close(one: RlResult, other: RlResult) -> None:
    """But for rounding."""
    assert rewards(other) == pytest.approx(rewards(one), abs=0.02)
    theirs, ours = (load(adapter(each)) for each in (one, other))
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, atol=2e-3, err_msg=name)
    assert any(value.any() for name, value in ours.items() if "lora_B" in name)


@pytest.mark.parametrize(("mesh", "compared"), [
    ([2, 1], False), pytest.param([2, 1], True, marks=SOAK), pytest.param([1, 2], True, marks=SOAK),
    pytest.param([1, 1], False, marks=SOAK),
])  # fmt: skip
@pytest.mark.usefixtures("divided")
def test_two_devices_divide_the_work_and_a_run_that_is_continued_is_equal_to_the_bit(
    tmp_path: Path, mesh: list[int], compared: bool
) -> None:
    """What they come to is what one comes to, but for rounding. That their gradients are is looked at in test_inside."""
    whole = rl(values(tmp_path / "whole", mesh=mesh), Digits())
    assert list((whole.folder / "checkpoints" / "step-4").rglob("orbax"))
    cut = Path(shutil.copytree(whole.folder, tmp_path / "cut" / "r"))
    for made in ("final", "checkpoints/step-4"):
        shutil.rmtree(cut / made)
    again = rl(values(tmp_path / "cut", mesh=mesh), Digits(), resume_from="r@2")
    assert again.folder == cut
    assert adapter(whole) == adapter(again)
    if compared:
        assert_close(rl(values(tmp_path / "alone", mesh=[1, 1]), Digits()), whole)
