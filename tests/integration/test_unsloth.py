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
from groupwise.cli.main import main
from tests import unsloth
from tests.integration.toy_run import TOY, config, what_must_be_equal

SFT = str(Path(__file__).with_name("sft_task.py"))
WORDS = ("model.name=tiny", "model.backend=unsloth", "run.threads=1", "model.dtype=float32")
RL = ("training.max_steps=2", "training.prompts_per_step=2", "training.num_generations=4",
      "sampler.max_completion_length=6", "sampler.max_num_seqs=8", "run.name=tried")  # fmt: skip
COMMANDS = {
    "rl": ("rl", "--json", "--task-module", TOY, *RL),
    "eval": ("eval", "--json", "--task-module", TOY, "--policy", "tried", *RL),
    "sft": ("sft", "--json", "--task-module", SFT, "training.max_steps=2"),
}


def command(folder: Path, verb: str, *, ends: bool = False) -> subprocess.CompletedProcess[str]:
    """As a person types it, in a process of its own, that may end as soon as Unsloth is imported."""
    own = {"PYTHONPATH": str(unsloth.SITE), "FAKE_UNSLOTH_NOTES": "notes"}
    if ends:
        own["FAKE_UNSLOTH_ENDS"] = "1"
    return subprocess.run(
        [sys.executable, "-m", "groupwise", *COMMANDS[verb], *WORDS],
        cwd=folder,
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def output_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.soak(suite="engine")
def test_every_command_imports_it_first_and_keeps_its_chatter_off_stdout(tmp_path: Path) -> None:
    results = {verb: output_of(command(tmp_path, verb)) for verb in COMMANDS}
    assert results["rl"]["state"] == results["sft"]["state"] == "finished"
    assert results["eval"]
    assert (tmp_path / "runs/tried/final/adapter_model.safetensors").is_file()
    assert (tmp_path / "notes").read_text().split() == ["first"] * 3


def test_it_is_imported_before_transformers(tmp_path: Path) -> None:
    done = command(tmp_path, "rl", ends=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert (tmp_path / "notes").read_text().split() == ["first"]


def test_where_it_is_missing_the_install_command_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*COMMANDS["rl"], "--dry-run", *WORDS]) == 2
    assert "'groupwise[train,unsloth]'" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == []


def unsloths(runs: Path, backend: str = "unsloth", **training: Any) -> dict[str, Any]:
    settings = config(runs, **{"max_steps": 3, **training})
    settings["model"] |= {"backend": backend, "dtype": "float32"}
    settings["run"] |= {"processes": 1}
    settings["training"]["lr_scheduler_type"] = "constant"
    return settings


def test_it_learns_what_transformers_learns_and_a_resumed_run_is_the_undisturbed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unsloth.install(monkeypatch)
    folders = {
        backend: groupwise.rl(unsloths(tmp_path / backend, backend), TOY).folder
        for backend in ("unsloth", "transformers")
    }
    for metric in ("reward", "loss", "grad_norm", "completions/mean_length"):
        found, wanted = (step_values(folders[name], metric) for name in folders)
        assert len(found) == 3
        assert found == pytest.approx(wanted, rel=1e-3, abs=1e-6), metric
    groupwise.rl(unsloths(tmp_path / "parts", max_steps=2), TOY)
    resumed = groupwise.rl(unsloths(tmp_path / "parts"), TOY, resume_from="toy@2").folder
    assert what_must_be_equal(resumed)["files"] == what_must_be_equal(folders["unsloth"])["files"]
    assert "Unsloth:" not in capsys.readouterr().out
