"""Trying a command here: its own words where it would fail, and where it writes."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from groupwise.errors import UsageError
from groupwise.launch import preflight
from groupwise.launch.preflight import check_verb, results_of, try_verb
from tests.integration.running import TOY, config


@pytest.fixture
def project(tmp_path: Path) -> Path:
    shutil.copy(TOY, tmp_path / "task.py")
    write(tmp_path, config(Path("runs")))
    return tmp_path


def write(project: Path, content: dict[str, Any]) -> None:
    (project / "c.yaml").write_text(json.dumps(content))


RL = ("rl", "--config", "c.yaml", "--task-module", "task.py")


def test_verbs_that_may_be_launched_and_what_is_told_of_others() -> None:
    for words in (["rl"], ["sft", "x"], ["eval"], ["generate", "--dataset"]):
        check_verb(words)
    for words in ([], ["serve"], ["--config", "c"], ["fleet", "submit"], [""]):
        with pytest.raises(UsageError, match="--script PATH"):
            check_verb(words)
    for word in ("--help", "--dry-run"):
        with pytest.raises(UsageError, match=word):
            check_verb(["rl", "--config", "c", word])


MODEL = {"name": "tiny", "adapter": None}
TRAINING = {
    "plan": {"task": "Task task", "steps": 5},
    "config": {"model": MODEL, "run": {"dir": "elsewhere/runs"}},
}
PLAN = {"task": "Task task", "prompts": 3, "policies": ["base"], "folders": ["runs/a"]}
EVALUATION = {"plan": {**PLAN, "results": ["out.json"]}, "config": {"model": MODEL}}
"""What the two commands say of themselves with --dry-run."""


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.soak(suite="launch"))])
def says(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """The command says this, or what it really says: for that it loads all of a training's libraries, as launching one does."""

    def have_it_say(document: Any) -> None:
        done = subprocess.CompletedProcess(
            [], 0, stdout=b"{hello\n" + json.dumps(document).encode()
        )
        if not request.param:
            monkeypatch.setattr(preflight.subprocess, "run", lambda *_, **__: done)

    return have_it_say


def test_a_training_says_where_it_writes_and_leaves_nothing(
    project: Path, says: Callable[[Any], None]
) -> None:
    """With the variables of the job, whatever its task writes as it is imported, and however files of the project are called."""
    text = (project / "task.py").read_text()
    begins = "import os\nos.environ['NEEDED_BY_IT']\nprint('{hello')\n"
    (project / "task.py").write_text(begins + text)
    (project / "queue.py").write_text("raise RuntimeError('not this one')\n")
    says(TRAINING)
    tried = try_verb([*RL, "run.dir=elsewhere/runs"], project, {"NEEDED_BY_IT": "x"})
    assert tried.results == ("elsewhere/runs",)
    assert "5 steps" in tried.summary
    assert tried.needs == ("c.yaml", "task.py")
    left = {path.name for path in project.iterdir()} - {"__pycache__"}
    assert left == {"c.yaml", "task.py", "queue.py"}


def test_an_evaluation_says_what_it_reads(project: Path, says: Callable[[Any], None]) -> None:
    says(EVALUATION)
    tried = try_verb(["eval", *RL[1:], "--output=out.json"], project, {})
    assert tried.results == ("out.json",)
    assert "3 prompts for base" in tried.summary
    assert {"c.yaml", "task.py"} <= {*tried.needs}


def test_what_would_fail_is_told_in_its_own_words(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here for a variable that only this terminal has."""
    monkeypatch.setenv("NEEDED_BY_IT", "only in this terminal")
    (project / "task.py").write_text("import os\nos.environ['NEEDED_BY_IT']\n")
    with pytest.raises(UsageError, match="NEEDED_BY_IT") as refused:
        try_verb(RL, project, {})
    assert "--env-file" in str(refused.value)


@pytest.mark.parametrize("word", ["--task-module={}/task.py", "data.datasets={}/c.yaml:x"])
def test_a_path_of_the_project_is_relative(project: Path, word: str) -> None:
    with pytest.raises(UsageError, match="relative"):
        try_verb([*RL[:3], word.format(project)], project, {})


def test_where_an_untried_command_writes() -> None:
    words = ["eval", "--output", "a.json", "run.dir=my/runs", "--output=b.json"]
    assert results_of(words) == ("my/runs", "a.json", "b.json")
    assert results_of(["generate", "--output", "hub:me/data"]) == ()
    assert results_of(["generate", "--output"]) == ()
