"""Commands with `model.backend: unsloth`, over the stand-in of Unsloth.

1. rl, sft and eval work, import it before transformers, and write nothing of its chatter to stdout.
2. A run that was interrupted and resumed is the undisturbed one, to the bit.
3. What is drawn and learnt is what the backend transformers draws and learns, but for the last digits.
4. Where it is not installed, every command says what to install, exit 2, before it does anything.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import groupwise
from benchmarks.learning import step_values
from tests import unsloth
from tests.integration.running import STEPS, TOY, config, what_must_be_equal

SFT = str(Path(__file__).with_name("sft_task.py"))
WORDS = ("model.name=tiny", "model.backend=unsloth", "run.threads=1", "model.dtype=float32")
RL = ("training.max_steps=2", "training.prompts_per_step=2", "training.num_generations=4",
      "sampler.max_completion_length=6", "sampler.slots=8", "run.name=tried")  # fmt: skip


def command(folder: Path, *words: str, there: bool = True) -> subprocess.CompletedProcess[str]:
    """As a person types it, in a process of its own."""
    found = {"PYTHONPATH": str(unsloth.SITE), "FAKE_UNSLOTH_NOTES": "notes"} if there else {}
    return subprocess.run(
        [sys.executable, "-m", "groupwise", *words, *WORDS],
        cwd=folder,
        env={**os.environ, **found},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def told(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_command_imports_it_first_and_keeps_its_chatter_off_stdout(tmp_path: Path) -> None:
    result = told(command(tmp_path, "rl", "--json", "--task-module", TOY, *RL))
    assert result["state"] == "finished"
    assert (tmp_path / "runs/tried/final/adapter_model.safetensors").is_file()
    evaluated = told(
        command(tmp_path, "eval", "--json", "--task-module", TOY, "--policy", "tried", *RL)
    )
    assert evaluated
    learnt = told(command(tmp_path, "sft", "--json", "--task-module", SFT, "training.max_steps=2"))
    assert learnt["state"] == "finished"
    assert (tmp_path / "notes").read_text().split() == ["first"] * 3


def test_where_it_is_missing_the_install_command_is_told(tmp_path: Path) -> None:
    done = command(tmp_path, "rl", "--dry-run", "--task-module", TOY, *RL, there=False)
    assert done.returncode == 2
    assert "Unsloth is not installed" in done.stderr
    assert "pip install 'groupwise[train,unsloth]'" in done.stderr
    assert [*tmp_path.iterdir()] == []


def unsloths(runs: Path, backend: str = "unsloth", **training: Any) -> dict[str, Any]:
    settings = config(runs, **training)
    settings["model"] |= {"backend": backend, "dtype": "float32"}
    settings["run"] |= {"processes": 1}
    settings["training"]["lr_scheduler_type"] = "constant"
    return settings


def test_a_resumed_run_is_the_undisturbed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsloth.install(monkeypatch)
    whole = groupwise.rl(unsloths(tmp_path / "whole"), TOY)
    groupwise.rl(unsloths(tmp_path / "parts", max_steps=2), TOY)
    resumed = groupwise.rl(
        unsloths(tmp_path / "parts"),
        TOY,
        resume_from=str(tmp_path / "parts/toy/checkpoints/step-2"),
    )
    assert what_must_be_equal(resumed.folder)["files"] == what_must_be_equal(whole.folder)["files"]


def test_it_learns_what_transformers_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsloth.install(monkeypatch)
    folders = {
        backend: groupwise.rl(unsloths(tmp_path / backend, backend), TOY).folder
        for backend in ("unsloth", "transformers")
    }
    for metric in ("reward", "loss", "grad_norm", "completions/mean_length"):
        found, wanted = (step_values(folders[name], metric) for name in folders)
        assert len(found) == STEPS
        assert found == pytest.approx(wanted, rel=1e-3, abs=1e-6), metric
