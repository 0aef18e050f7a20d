"""The five functions of a notebook with backend="tunix", in real kernels: the same cells, and what interrupts and kills them."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from tests.jupyter_kernel import TRAIN_WAITING, WAITING, Kernel, in_its_fourth_step, text
from tests.tunix_models import model_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

FINAL = Path("checkpoints/digits/final/adapter_model.safetensors")


SOAK = pytest.mark.soak(suite="tunix")


def begin(steps: int = 6, layers: int | None = None) -> str:
    return f"""
from groupwise.notebook import *

def digits(completions, **columns):
    return [sum(letter.isdigit() for letter in text) / max(len(text), 1) for text in completions]

config = TrainingConfig(
    backend="tunix", model={str(model_of("gemma3", layers))!r}, dataset="arithmetic", dataset_max=40, num_batches={steps * 4 // 3},
    train_fraction=0.75, batch_size=4, num_generations=8, total_generation_steps=16, learning_rate=0.05, beta=0.0, lora_rank=8,
    lora_alpha=16, experiment_name="digits", overrides={{"training.max_grad_norm": 1.0, "eval.max_prompts": 4}},
)
session = prepare_session(config)
"""


TRAIN = "state = train_grpo(config, session, reward_functions=[digits])"


@pytest.mark.parametrize(("steps", "layers"), [(3, 2), pytest.param(33, None, marks=SOAK)])
def test_the_same_cells_train_gemma_on_jax(tmp_path: Path, steps: int, layers: int | None) -> None:
    with Kernel(tmp_path) as kernel:
        said = text(kernel.run(begin(steps, layers)))
        assert "tunix 0.1.7 with jax" in said
        assert f"step {steps}/{steps}" in text(kernel.run(TRAIN))
        if steps > 30:
            kernel.run("rewards = [value for _, value in session.run.metrics('reward')['reward']]")
            told = text(kernel.run("print(sum(rewards[:4]) / 4, sum(rewards[-8:]) / 8)"))
            first, last = map(float, told.split())
            assert last > 1.4 * first, (first, last)
        assert "PeftModel" in text(kernel.run("path = export_checkpoint(config, state)"))
        assert "Error" not in text(kernel.run("print(quick_test(config, session, 'Say 1.'))"))
        assert "accuracy" in text(kernel.run("print(sorted(evaluate(config, session)))"))
        assert "{'fsdp': 1, 'tp': 1}" in text(kernel.run("session.mesh"))
    folder = tmp_path / f"checkpoints/digits/checkpoints/step-{steps}/hf_lora"
    assert (folder / "adapter_model.safetensors").stat().st_size > 1000


@SOAK
def test_an_interrupted_training_continues_in_another_kernel_also_after_a_killed_worker(
    tmp_path: Path,
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        folder.mkdir()
    with Kernel(whole) as kernel:
        kernel.run(begin() + WAITING)
        kernel.run(TRAIN_WAITING)
    (cut / "wait").touch()
    with Kernel(cut) as kernel:
        kernel.run(begin() + WAITING)
        cell = in_its_fourth_step(kernel, cut, 200)
        kernel.interrupt()
        assert "Stopped after 3 steps" in text(kernel.outputs(cell))
        cell = in_its_fourth_step(kernel, cut, 200)
        os.kill(worker_of(kernel), signal.SIGKILL)
        (cut / "wait").unlink()
        said = text(kernel.outputs(cell))
        assert "The Tunix worker ended" in said
        assert "SIGKILL" in said
    with Kernel(cut) as kernel:
        kernel.run(begin() + WAITING)
        assert "it goes on" in text(kernel.run(TRAIN_WAITING))
    assert (whole / FINAL).read_bytes() == (cut / FINAL).read_bytes()


def worker_of(kernel: Kernel) -> int:
    """The process of the worker that the kernel has started."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == kernel.pid and any(each.endswith(b"worker/main.py") for each in words):
                return int(folder.name)
    raise AssertionError("there is no worker")
