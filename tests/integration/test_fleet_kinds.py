"""The commands that the kinds of fleet jobs make of a row run, and write the promised files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from groupwise.cli.main import main
from groupwise.cli.train_grpo import main as train_grpo
from groupwise.jobs.launch.kinds import EVAL, GRPO, SFT
from tests.integration.fleet import tiny_grpo

PROGRAMS = {"groupwise": main, "groupwise-train-grpo": train_grpo}
SMALL = {"run.threads": 1, "rewards.in_process": True, "max_completion_length": 6}


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    tiny_grpo.write_files(tmp_path)
    return tmp_path


def run(arguments: tuple[str, ...]) -> int:
    return PROGRAMS[arguments[0]](arguments[1:])


def without_training(**columns: Any) -> dict[str, Any]:
    """The row of the tiny job with the database's defaults where a training would say more."""
    defaults = {"max_steps": 500, "learning_rate": 5e-6, "batch_size": 1, "num_generations": 4}
    return tiny_grpo.row(**defaults, **columns)


def test_grpo_with_less_computed_at_once(work: Path) -> None:
    less = GRPO.smaller(tiny_grpo.row(max_steps=1, hyperparams=SMALL))
    assert less is not None
    assert run(GRPO.expand(less).arguments) == 0
    assert (work / "outputs/model.safetensors").is_file()


def test_sft(work: Path) -> None:
    hyperparams = {"lora.r": 4, "run": {"threads": 1}}
    columns = {"reward_function": None, "hyperparams": hyperparams, "max_steps": 2}
    spec = SFT.expand(tiny_grpo.row(**columns))
    assert run(spec.arguments) == 0
    assert (work / "outputs/sft/final/adapter_model.safetensors").is_file()
    assert (work / "outputs/sft/checkpoints/step-2/manifest.json").is_file()


def test_eval(work: Path) -> None:
    hyperparams = {
        "eval.max_prompts": 3, "run.threads": 1, "rewards.in_process": True, "sampler": {"max_completion_length": 6},
    }  # fmt: skip
    spec = EVAL.expand(without_training(hyperparams=hyperparams, output_dir="found/here"))
    assert run(spec.arguments) == 0
    result = json.loads((work / "found/here/evaluation.json").read_text())
    assert len(result["rows"]) == 3
    assert run(spec.arguments) == 2, "results are never overwritten"
