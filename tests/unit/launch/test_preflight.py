"""Trying a command here: its own words where it would fail, and where it writes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from groupwise.errors import UsageError
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


@pytest.mark.parametrize("words", [["rl"], ["sft", "x"], ["eval"], ["generate", "--dataset"]])
def test_verbs_that_may_be_launched(words: list[str]) -> None:
    check_verb(words)


@pytest.mark.parametrize("words", [[], ["serve"], ["--config", "c"], ["fleet", "submit"], [""]])
def test_others_are_refused_with_what_there_is(words: list[str]) -> None:
    with pytest.raises(UsageError, match=r"rl, sft, eval, generate: .*--script PATH"):
        check_verb(words)


@pytest.mark.parametrize("word", ["--help", "--dry-run"])
def test_words_with_which_a_job_does_nothing_are_refused(word: str) -> None:
    with pytest.raises(UsageError, match=f"stands {word}, with which the job would do nothing"):
        check_verb(["rl", "--config", "c", word])


def test_a_training_says_where_it_writes_and_leaves_nothing(project: Path) -> None:
    tried = try_verb([*RL, "run.dir=elsewhere/runs"], project, {})
    assert tried.results == ("elsewhere/runs",)
    assert "5 steps" in tried.summary
    assert tried.needs == ("c.yaml", "task.py")
    assert sorted(path.name for path in project.iterdir() if path.is_file()) == [
        "c.yaml",
        "task.py",
    ]


def test_an_evaluation_says_what_it_reads(project: Path) -> None:
    tried = try_verb(["eval", *RL[1:], "--output=out.json"], project, {})
    assert tried.results == ("out.json",)
    assert "3 prompts for base" in tried.summary


@pytest.mark.parametrize(
    ("word", "told"),
    [("training.max_stepz=3", "training.max_steps"), ("model.name=no/such", "no/such")],
)
def test_what_would_fail_is_told_in_its_own_words(project: Path, word: str, told: str) -> None:
    with pytest.raises(UsageError, match="nothing was launched") as refused:
        try_verb([*RL, word], project, {"HF_HUB_OFFLINE": "1"})
    assert told in str(refused.value)


def test_a_task_that_cannot_be_imported_is_told(project: Path) -> None:
    (project / "task.py").write_text("import not_there_at_all\n")
    with pytest.raises(UsageError, match="not_there_at_all"):
        try_verb(RL, project, {})


@pytest.mark.parametrize("word", ["--task-module={}/task.py", "data.datasets={}/c.yaml:x"])
def test_a_path_of_the_project_is_relative(project: Path, word: str) -> None:
    with pytest.raises(UsageError, match="runs in a copy of the project: name it relative"):
        try_verb([*RL[:3], word.format(project)], project, {})


def test_a_task_may_write_as_it_is_imported(project: Path) -> None:
    text = (project / "task.py").read_text()
    (project / "task.py").write_text("print('{hello')\n" + text)
    assert try_verb(RL, project, {}).results == ("runs",)


def test_names_of_the_project_hide_none_of_pythons(project: Path) -> None:
    (project / "queue.py").write_text("raise RuntimeError('not this one')\n")
    assert try_verb(RL, project, {}).results == ("runs",)


def test_variables_of_the_job_are_there(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (project / "task.py").read_text()
    (project / "task.py").write_text("import os\nos.environ['NEEDED_BY_IT']\n" + text)
    with pytest.raises(UsageError, match="NEEDED_BY_IT"):
        try_verb(RL, project, {})
    assert try_verb(RL, project, {"NEEDED_BY_IT": "x"}).results == ("runs",)
    monkeypatch.setenv("NEEDED_BY_IT", "only in this terminal")
    with pytest.raises(UsageError, match="none that are only set here"):
        try_verb(RL, project, {})


def test_where_an_untried_command_writes() -> None:
    words = ["eval", "--output", "a.json", "run.dir=my/runs", "--output=b.json"]
    assert results_of(words) == ("my/runs", "a.json", "b.json")
    assert results_of(["generate", "--output", "hub:me/data"]) == ()
    assert results_of(["generate", "--output"]) == ()
