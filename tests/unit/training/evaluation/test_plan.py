"""`groupwise eval --dry-run`: the prompts and settings, before any model is loaded."""

import json
from pathlib import Path
from typing import Any

import pytest

from groupwise.cli.main import main
from tests.integration.toy_run import TOY, config

WORDS = ("eval", "--task-module", TOY)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(json.dumps(config(Path("runs"))))
    return tmp_path


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*WORDS, "--config", "c.yaml", "--dry-run", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)["plan"]


def test_it_says_what_is_asked_and_where_results_go(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def loads(*_: object) -> None:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr("groupwise.training.assembly.start.start_serving", loads)
    plan = planned(capsys, "--samples-per-prompt", "2", "eval.temperature=1.0")
    assert plan["policies"] == ["base"]
    assert (plan["prompts"], plan["samples_per_prompt"]) == (3, 2)
    assert plan["folders"] == []
    assert plan["results"] == ["results/toy_task-base.json"]
    assert [path.name for path in place.iterdir()] == ["c.yaml"]


@pytest.mark.parametrize(
    "wrong", ["--policy=nobody@3", "eval.max_promptz=3", "data.test_split_size=-1"]
)
def test_a_dry_run_refuses_what_an_evaluation_refuses(
    place: Path, capsys: pytest.CaptureFixture[str], wrong: str
) -> None:
    words = [*WORDS, "--config", "c.yaml", wrong]
    assert main(words) == 2
    refused = capsys.readouterr().err
    assert main([*words, "--dry-run"]) == 2
    assert capsys.readouterr().err == refused
