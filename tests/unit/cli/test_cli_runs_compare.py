"""What `runs compare` and `runs rescore` print, for people and for programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from groupwise.cli.runs.app import app
from groupwise.core.errors import UsageError
from groupwise.core.types import Example, Group, Rollout, Segment
from groupwise.runs.folder import RunFolder
from groupwise.runs.records import EvaluationRecord, StepRecord
from groupwise.training.evaluation.measures import Success, rows_of

HOSTILE = "\x1b]0;owned\x07 [bold]no markup[/bold]\nsecond line"


def group(draw: int, *rewards: float) -> Group:
    segment = Segment("policy", (1,), finish_reason="stop")
    rollouts = [
        Rollout(draw, m, 0, (1,), (segment,), HOSTILE + "!" * m, "scored", None, reward)
        for m, reward in enumerate(rewards)
    ]
    return Group(draw, Example(draw, f"ask {draw} \x1b[31m"), tuple(rollouts))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name, after in (("a", 0.0), ("b", 1.0)):
        config = {"model": {"name": "tiny"}, "training": {"learning_rate": 0.1 + after}}
        with RunFolder.create(tmp_path, name, config, {}) as run:
            record = StepRecord(0, 0, 1, "f", (0,), 0.1, 0.0)
            run.store.commit_step(record, [group(0, after, 0.5)], {"reward": after})
            rows = rows_of([group(0, after), group(1, 0.5)], Success())
            metrics = {"reward": 0.5, "pass@1": after, "accuracy": 0.5}
            run.store.add_evaluation(EvaluationRecord(1, "after", f"{name}@1", metrics, rows))
            run.finish("finished")
    return tmp_path


def call(runs: Path, *arguments: str, exit_code: int = 0) -> str:
    given = [*arguments, "--dir", str(runs)]
    result = CliRunner().invoke(app, given, catch_exceptions=False)
    assert result.exit_code == exit_code, result.output
    return result.stdout


def test_a_comparison_is_a_table_or_json(runs: Path) -> None:
    lines = call(runs, "compare", "a", "b").splitlines()
    assert lines[:2] == ["A  a@1 (after)", "B  b@1 (after)"]
    assert "held-out prompts: 2 answered by both" in lines
    cells = [line.split() for line in lines]
    reward = next(row for row in cells if row[:3] == ["reward", "0.25", "0.75"])
    assert (reward[3], reward[-3:]) == ("+0.500", ["1", "0", "1"])
    assert ["accuracy", "0.5", "0.5", "+0.000"] in cells
    assert ["training.learning_rate", "0.1", "→", "1.1"] in cells
    assert "reward in training, 1 step that both have" in lines
    shown = call(runs, "compare", "a", "b", "--rows", "5")
    assert "  │ ask 0 ␛[31m" in shown
    assert all(letter == "\n" or letter.isprintable() for letter in shown)
    written = call(runs, "compare", "a", "b", "--rows", "1", "--json")
    assert written.isascii()
    found: dict[str, Any] = json.loads(written, parse_constant=pytest.fail)
    assert found["metrics"]["reward"]["change"]["value"] == 0.5
    assert found["metrics"]["accuracy"]["change"] is None
    assert found["config"] == {"training.learning_rate": [0.1, 1.1]}
    assert (found["prompts"], len(found["changed"])) == (2, 1)


REWARD = f"{Path(__file__).parents[1] / 'training' / 'review' / 'rescoring_rewards.py'}:backwards"


def test_a_rescoring_reads_as_a_table(runs: Path) -> None:
    shown = call(runs, "rescore", "a", "--rewards", REWARD)
    lines = shown.splitlines()
    assert lines[0] == "a by backwards"
    assert lines[3].split() == ["1", "2", "0.250", "-45.500", "-1.000", "0.000", "2"]
    assert "1     1      1        2 → 1  0 → -45" in shown
    assert f"  groupwise runs rollouts a --step 1 --dir {runs}" in lines
    assert all(letter == "\n" or letter.isprintable() for letter in shown)
    files = [Path(line.split()[-1]) for line in lines if line.startswith(("results ", "rollouts "))]
    assert [(path.suffix, path.is_file()) for path in files] == [(".json", True), (".jsonl", True)]
    with pytest.raises(UsageError, match="--task-module or"):
        call(runs, "rescore", "a")


def test_a_reward_that_crashes_is_shown_with_its_reason(runs: Path) -> None:
    boo = REWARD.replace("backwards", "boo")
    asked = ("rescore", "a", "--rewards", f"{boo}")
    found = json.loads(call(runs, *asked, "--json", exit_code=1))
    assert (found["rewards"], found["broken"]) == ({"boo": 1.0}, ["boo"])
    ((reason, times),) = found["overall"]["reasons"].items()
    assert ("ValueError: boo" in reason, times) == (True, 2)
