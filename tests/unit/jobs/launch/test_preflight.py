"""The dry run of a command on this machine: its own message if it would fail, and where it writes."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from groupwise.core.errors import UsageError
from groupwise.jobs.launch import preflight
from groupwise.jobs.launch.preflight import try_command
from tests.integration.toy_run import TOY, config


@pytest.fixture
def project(tmp_path: Path) -> Path:
    shutil.copy(TOY, tmp_path / "task.py")
    (tmp_path / "c.yaml").write_text(json.dumps(config(Path("runs"))))
    return tmp_path


RL = ("rl", "--config", "c.yaml", "--task-module", "task.py")
TRAINING = {
    "plan": {"task": "Task task", "steps": 5},
    "config": {
        "model": {"name": "tiny", "adapter": None},
        "algorithm": {"type": "task.py:Mine"},
        "teacher": {"name": "hub/teacher", "adapter": "c.yaml"},
        "run": {"dir": "elsewhere/runs"},
    },
}


@pytest.mark.parametrize(
    "real", [False, pytest.param(True, marks=pytest.mark.soak(suite="launch"))]
)
def test_a_training_says_where_it_writes_and_leaves_nothing(
    project: Path, monkeypatch: pytest.MonkeyPatch, real: bool
) -> None:
    """With the variables of the job, whatever its task writes as it is imported, and however files of the project are called. What a `real`
    one says of itself loads all of a training's libraries."""
    text = (project / "task.py").read_text()
    begins = "import os\nos.environ['NEEDED_BY_IT']\nprint('{hello')\n"
    (project / "task.py").write_text(begins + text)
    (project / "queue.py").write_text("raise RuntimeError('not this one')\n")
    said = b"{hello\n" + json.dumps(TRAINING).encode()
    done = subprocess.CompletedProcess([], 0, stdout=said)
    if not real:
        monkeypatch.setattr(preflight.subprocess, "run", lambda *_, **__: done)
    tried = try_command([*RL, "run.dir=elsewhere/runs"], project, {"NEEDED_BY_IT": "x"})
    assert tried.results == ("elsewhere/runs",)
    assert "5 steps" in tried.summary
    named = ("c.yaml", "task.py")  # what the config names; a real one names neither
    assert tried.needs == (*(() if real else named), "c.yaml", "task.py")
    left = {path.name for path in project.iterdir()} - {"__pycache__"}
    assert left == {"c.yaml", "task.py", "queue.py"}


def test_a_preflight_failure_is_reported_with_its_message_and_env_file_advice(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here for a variable that only this terminal has."""
    monkeypatch.setenv("NEEDED_BY_IT", "only in this terminal")
    (project / "task.py").write_text("import os\nos.environ['NEEDED_BY_IT']\n")
    with pytest.raises(UsageError, match="NEEDED_BY_IT") as refused:
        try_command(RL, project, {})
    assert "--env-file" in str(refused.value)
