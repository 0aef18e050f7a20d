"""The real Unsloth, on a CPU, for which it has a backend of its own: `make soak SUITE=unsloth`.

1. Training draws the tokens and computes the losses that the backend transformers does, in the same environment.
2. With weights in 4 bits a real model learns, its log-probabilities are those that it was drawn with, and it is evaluated.
3. sft learns.
"""

from __future__ import annotations

from pathlib import Path
from runpy import run_path
from typing import Any

import pytest

from benchmarks.learning import step_values
from tests import unsloth

ROOT = Path(__file__).parents[2]
PYTHON = run_path(str(ROOT / "scripts/real_environment.py"))["where"]("unsloth") / "bin/python"
TASK = str(ROOT / "examples/01_first_task/task.py")
WORDS = ("--config", str(ROOT / "configs/quickstart.yaml"), "--task-module", TASK, "training.max_steps=3",
         "training.prompts_per_step=4", "eval.max_prompts=8", "run.processes=1")  # fmt: skip

pytestmark = [
    pytest.mark.soak(suite="unsloth"), pytest.mark.timeout(1800),
    pytest.mark.skipif(not PYTHON.exists(), reason="scripts/real_environment.py makes its environment" ),
]  # fmt: skip


def run_command(folder: Path, verb: str, *words: str) -> dict[str, Any]:
    return unsloth.told(PYTHON, folder, verb, *words)


def test_it_draws_and_learns_what_transformers_does(tmp_path: Path) -> None:
    tiny = ("model.name=tiny", "model.dtype=float32", "training.learning_rate=0.01")
    for backend in ("unsloth", "transformers"):
        run_command(
            tmp_path, "rl", *WORDS, *tiny, f"model.backend={backend}", f"run.name={backend}"
        )
    for metric in ("reward", "loss", "grad_norm", "completions/mean_length"):
        found, wanted = (
            step_values(tmp_path / "runs" / name, metric) for name in ("unsloth", "transformers")
        )
        assert found == pytest.approx(wanted, rel=1e-3, abs=1e-6), metric


def test_a_real_model_learns_in_four_bits(tmp_path: Path) -> None:
    four = ("model.backend=unsloth", "model.load_in_4bit=true", "run.name=four")
    result = run_command(tmp_path, "rl", *WORDS, *four)
    assert result["state"] == "finished"
    run = tmp_path / "runs/four"
    assert max(step_values(run, "grad_norm")) > 0
    assert max(step_values(run, "sampling/logprob_gap")) < 0.1
    run_command(tmp_path, "eval", *WORDS, *four, "--policy", "four")


def test_sft_learns(tmp_path: Path) -> None:
    example = ROOT / "examples/05_sft_then_rl"
    words = ("--config", str(example / "sft.yaml"), "--task-module", str(example / "task.py"))
    few = ("training.max_steps=3", "model.name=tiny", "model.backend=unsloth", "run.name=warm")
    result = run_command(tmp_path, "sft", *words, *few)
    assert result["state"] == "finished"
    losses = step_values(tmp_path / "runs/warm", "loss")
    assert losses[-1] < losses[0]
