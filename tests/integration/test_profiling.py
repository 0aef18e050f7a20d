"""`run.profile`, on real runs: the trace of a step says what it did, and changes nothing of what it learns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import groupwise
from tests.integration.toy_run import TOY, config, what_must_be_equal

SFT = str(Path(__file__).with_name("sft_task.py"))


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def settings(runs: Path, profile: Any, **training: Any) -> dict[str, Any]:
    made = config(runs, **training)
    made["run"]["profile"] = profile
    made["algorithm"] = {"type": "grpo", "beta": 0.1}
    return made


def names(folder: Path, step: int) -> set[str]:
    """What happened, in the trace of a step."""
    trace = json.loads((folder / f"profile/step-{step}.json").read_text())
    return {event["name"] for event in trace["traceEvents"] if event.get("ph") == "X"}


def test_a_profiled_run_is_the_same_run_and_its_trace_shows_what_was_done(tmp_path):
    groupwise.rl(settings(tmp_path / "plain", None, max_off_policy_steps=1, max_steps=3), TOY)
    groupwise.rl(settings(tmp_path / "traced", [1], max_off_policy_steps=1, max_steps=3), TOY)
    traced = tmp_path / "traced/toy"
    assert what_must_be_equal(traced) == what_must_be_equal(tmp_path / "plain/toy")
    assert {path.name for path in (traced / "profile").iterdir()} == {"step-1.json", "step-1.txt"}
    assert not (tmp_path / "plain/toy/profile").exists()
    calls = {"forward_backward", "update", "publish", "logprobs of the reference"}
    wanted = {f"learner.{call}" for call in calls} | {"aten::mm", "aten::embedding"}
    assert names(traced, 1) >= wanted
    table = (traced / "profile/step-1.txt").read_text().splitlines()
    phases = {line.split()[0]: float(line.split()[1]) for line in table[:5]}
    assert [*phases] == ["sampling", "scoring", "learning", "publishing", "step"]
    assert min(phases.values()) >= 0
    assert any("Self CPU" in line for line in table)


def test_a_supervised_step_can_be_profiled(tmp_path):
    made = {
        "model": {"name": "tiny"},
        "training": {"max_steps": 2, "examples_per_step": 2},
        "run": {"name": "sft", "dir": str(tmp_path), "threads": 1, "profile": 1},
    }
    folder = groupwise.sft(made, SFT).folder
    assert "learner.forward_backward" in names(folder, 1)
    assert (folder / "profile/step-1.txt").read_text().startswith("learning")
