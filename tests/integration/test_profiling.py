"""`run.profile`, on real runs: the trace of a step says what it did, and changes nothing of what it learns."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import groupwise
from groupwise.errors import ConfigError
from tests.integration.running import TOY, config, what_must_be_equal

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


def test_a_profiled_run_is_the_same_run_and_its_trace_shows_what_was_done(tmp_path, capfd):
    groupwise.rl(settings(tmp_path / "plain", None, lag=1), TOY)
    groupwise.rl(settings(tmp_path / "traced", [1, 3], lag=1), TOY)
    traced = tmp_path / "traced/toy"
    assert what_must_be_equal(traced) == what_must_be_equal(tmp_path / "plain/toy")
    files = {path.name for path in (traced / "profile").iterdir()}
    assert files == {"step-1.json", "step-1.txt", "step-3.json", "step-3.txt"}
    assert not (tmp_path / "plain/toy/profile").exists()

    assert "rofiler" not in capfd.readouterr().err, "torch's tracer says nothing"
    found = names(traced, 3)
    calls = {"forward_backward", "update", "publish", "logprobs of the reference"}
    assert found >= {f"learner.{call}" for call in calls} | {"aten::mm", "aten::embedding"}
    table = (traced / "profile/step-3.txt").read_text().splitlines()
    phases = [line.split() for line in table[:5]]
    assert [phase[0] for phase in phases] == [
        "sampling",
        "scoring",
        "learning",
        "publishing",
        "step",
    ]
    assert all(float(phase[1]) >= 0 for phase in phases)
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


@pytest.mark.soak(suite="training")
def test_a_resume_may_ask_for_a_profile_and_one_that_cannot_be_written_costs_a_warning(
    tmp_path, capsys
):
    groupwise.rl(settings(tmp_path, None, max_steps=5, lr_scheduler_type="constant"), TOY)
    result = groupwise.rl(
        settings(tmp_path, 5, max_steps=6, lr_scheduler_type="constant"), TOY, resume_from="toy@5"
    )
    assert "learner.update" in names(result.folder, 5)
    shutil.rmtree(tmp_path / "toy/profile")
    (tmp_path / "toy/profile").write_text("in the way")
    result = groupwise.rl(
        settings(tmp_path, 6, max_steps=7, lr_scheduler_type="constant"), TOY, resume_from="toy@6"
    )
    assert result.exit_code == 0
    assert "the profile of step 6 could not be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        ([1, 5], r"run\.profile names step 5.* 0 to 4"),
        ([2, -1], "counted from 0"),
    ],
)
def test_steps_that_never_come_are_refused(tmp_path, profile, message):
    with pytest.raises(ConfigError, match=message):
        groupwise.rl(settings(tmp_path, profile), TOY)
    assert not (tmp_path / "toy").exists()
