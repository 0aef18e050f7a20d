"""`groupwise doctor` as a whole, on the tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from groupwise.core.errors import ConfigError, ModelError, RunError, TaskError
from groupwise.core.findings import Report
from groupwise.training.assembly import start
from groupwise.training.assembly.parts import Parts
from groupwise.training.checks import doctor_cost, doctor_machine
from groupwise.training.checks import doctor_examination as module
from groupwise.training.checks.doctor import doctor

SMALL: dict[str, Any] = {
    "model": {"name": "tiny"}, "lora": {"r": 4}, "sampler": {"max_completion_length": 8, "max_num_seqs": 8},
    "training": {"max_steps": 3, "prompts_per_step": 2, "num_generations": 2}, "run": {"threads": 1},
}  # fmt: skip


def examined(folder: Path, task: Any = None, **changes: Any) -> Report:
    return doctor({**SMALL, "run": {"threads": 1, "dir": str(folder / "runs")}, **changes}, task)


def by_name(report: Report) -> dict[str, Any]:
    return {finding.name: finding for finding in report.findings}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    folder = tmp_path_factory.mktemp("doctor")
    made = examined(folder)
    assert list(folder.iterdir()) == [], "a doctor leaves nothing behind"
    return made


def test_the_tiny_model_is_well_in_everything_that_is_looked_at(report: Report):
    assert [finding.name for finding in report.findings] == [
        "libraries", "cores", "device", "memory", "disk", "random numbers", "round trip", "end of sequence",
        "padding", "begin of sequence", "generation prompt", "template prefix", "earlier turns", "prompts",
        "stop tokens", "masks", "re-encoding", "log-probability gap", "batch invariance", "adapter slope",
        "weight publication", "gap after an update", "peak memory", "speed",
    ]  # fmt: skip
    shaky = {"cores", "peak memory"}  # depend on who else is running here, and on what ran before
    assert {f.level for f in report.findings if f.name not in shaky} == {"ok"}
    assert (report.exit_code, report.subject[:8]) == (0, "tiny on ")
    json.dumps(report.summary)


def test_a_task_asks_its_own_prompts(tmp_path: Path):
    task = SimpleNamespace(get_rl_dataset=lambda config: [{"prompt": letter} for letter in "abcde"])
    training = {**SMALL["training"], "max_steps": None, "num_train_epochs": 2}
    found = by_name(examined(tmp_path, task, training=training))
    assert "3 of the task's 5, of up to 1" in found["prompts"].measured
    assert found["speed"].data["steps"] == 5


def test_too_little_disk_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    monkeypatch.setattr(start, "training_parts", refuse)
    report = examined(tmp_path)
    assert by_name(report)["disk"].level == "problem"


def refuse(*_: Any) -> Parts:
    raise RunError("the engine refuses")


def test_a_machine_without_the_libraries_is_told_so_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(doctor_machine, "installed_versions", lambda: {"torch": None})
    report = doctor()
    assert [finding.name for finding in report.findings] == ["libraries"]
    assert report.exit_code == 1


def test_doctor_refuses_an_invalid_config_model_or_task(tmp_path: Path):
    with pytest.raises(ConfigError):
        doctor(SMALL, overrides=["sampler.slotz=8"])
    with pytest.raises(ModelError):
        examined(tmp_path, model={"name": str(tmp_path / "none")})
    with pytest.raises(TaskError, match="get_rl_dataset"):
        examined(tmp_path, SimpleNamespace())


def test_much_more_memory_than_planned_is_a_warning_unless_the_plan_is_small() -> None:
    level = {
        (planned, measured): doctor_cost.peak(planned, measured << 20).level
        for planned, measured in ((612, 783), (612, 1000), (5000, 5900), (5000, 6100))
    }
    assert list(level.values()) == ["ok", "warning", "ok", "warning"]
