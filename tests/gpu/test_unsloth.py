"""Against the real Unsloth with its kernels: `make gpu`, where `pip install 'groupwise[train,unsloth]'` was done.

Each command runs in a process of its own, because Unsloth must be imported before transformers.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks.learning import step_values
from tests import unsloth

ROOT = Path(__file__).parents[2]
MODEL = os.environ.get("GROUPWISE_UNSLOTH_MODEL", "smollm2-135m-instruct")
WORDS = ("--config", str(ROOT / "configs/quickstart.yaml"), "--task-module", str(ROOT / "examples/01_first_task/task.py"),
         f"model.name={MODEL}", "eval.max_prompts=32")  # fmt: skip

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("unsloth") is None, reason="Unsloth is not installed"),
]


def run_rl(folder: Path, *words: str) -> dict[str, Any]:
    return unsloth.told(Path(sys.executable), folder, "rl", *WORDS, *words)


@pytest.mark.parametrize("bits", [(), ("model.load_in_4bit=true",), ("model.load_in_8bit=true",)], ids=str)  # fmt: skip
def test_it_learns_from_what_it_draws(tmp_path: Path, bits: tuple[str, ...]) -> None:
    """Log-probabilities of sampler and learner agree as far as bfloat16 does, and a gradient comes of them."""
    run_rl(tmp_path, "model.backend=unsloth", "training.max_steps=3", "run.name=live", *bits)
    run = tmp_path / "runs/live"
    assert max(step_values(run, "grad_norm")) > 0
    assert max(step_values(run, "sampling/logprob_gap")) < 0.1


def test_the_quickstart_learns(tmp_path: Path) -> None:
    result = run_rl(tmp_path, "model.backend=unsloth", "run.name=quick")
    assert result["reward_last"] > result["reward_first"]
