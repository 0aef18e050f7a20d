"""`groupwise runs import`: TRL's logged completions become a run that can be looked at."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from groupwise.cli.main import main
from groupwise.core.errors import UsageError
from groupwise.runs.store import Store
from groupwise.training.review.import_completions import import_completions


def rows(step: int, second: float = 0.5) -> list[dict[str, Any]]:
    """Two groups of two, as TRL 1.16 writes them."""
    chat = [{"role": "user", "content": "7 + 1 ="}]
    return [
        {"step": step, "prompt": prompt, "completion": completion, "right": right, "short": short, "note": "n", "advantage": 0.25}
        for prompt, completion, right, short in [
            (chat, [{"role": "assistant", "content": "8"}], 1.0, second),
            (chat, [{"role": "assistant", "content": "9"}], 0.0, math.nan),
            ([{"role": "user", "content": "1 + 1 ="}], [{"role": "assistant", "content": "2"}], 1.0, 0.0),
            ([{"role": "user", "content": "1 + 1 ="}], [{"role": "assistant", "content": "2"}], 1.0, 0.0),
        ]
    ]  # fmt: skip


@pytest.fixture
def logged(tmp_path: Path) -> Path:
    """The output_dir of a TRL run that logged steps 1 and 3."""
    output = tmp_path / "trl-run"
    (output / "completions").mkdir(parents=True)
    for step in (1, 3):
        table = pyarrow.Table.from_pylist(rows(step))
        pyarrow.parquet.write_table(table, output / f"completions/completions_{step:05d}.parquet")
    (output / "checkpoint-3").mkdir()
    log = [
        {"step": 1, "entropy": 2.5, "rewards/right/mean": 0.75, "rewards/short/mean": 0.1},
        {"step": 3, "entropy": 1.5, "completions/mean_length": 7.0, "rewards/right/mean": 0.75},
    ]
    (output / "checkpoint-3/trainer_state.json").write_text(json.dumps({"log_history": log}))
    return output


def test_groups_rewards_and_metrics_are_those_of_the_log(logged: Path, tmp_path: Path) -> None:
    made = import_completions(logged, name="there", runs_dir=tmp_path / "runs")
    assert (made.steps, made.rollouts, made.rewards) == (3, 8, ("right", "short"))
    with Store.open(made.folder / "run.db", readonly=True) as store:
        first, second = store.groups(2)
        assert store.groups(1) == []
        entropies = store.metrics(["entropy", "frac_reward_zero_std", "completions/mean_length"])
    best, worst = first.rollouts
    assert first.example.prompt == [{"role": "user", "content": "7 + 1 ="}]
    assert (best.completion, best.reward, best.advantage) == ("8", 1.5, 0.25)
    assert (worst.reward, worst.part_values, worst.notes) == (
        0.0,
        {"right": 0.0, "short": None},
        {"note": "n"},
    )
    assert second.example.index == 1
    assert entropies["entropy"] == [(1, 2.5), (3, 1.5)]
    assert entropies["frac_reward_zero_std"] == [(1, 0.5), (3, 0.5)]
    assert entropies["completions/mean_length"] == [(3, 7.0)]


def test_the_command_takes_any_file_with_these_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    plain = {"step": 1, "prompt": "a", "completion": "b", "score": 1.0, "length": 3}
    Path("mine.jsonl").write_text(json.dumps(plain) + "\n")
    assert main(["runs", "import", "mine.jsonl", "--reward", "score", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rewards"] == ["score"]
    assert main(["runs", "rollouts", "mine", "--part", "score"]) == 0
    assert "reward 1.000" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("row", "says"),
    [({"step": 1, "prompt": "a"}, "no column 'completion'"), ({"step": 1, "prompt": "a", "completion": "b"}, "no column of numbers")],
)  # fmt: skip
def test_other_files_are_refused_with_the_columns_that_they_have(
    tmp_path: Path, row: dict[str, Any], says: str
) -> None:
    (tmp_path / "other.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(UsageError, match=says):
        import_completions(tmp_path / "other.jsonl", runs_dir=tmp_path / "runs")
    with pytest.raises(UsageError, match="log_completions=True"):
        import_completions(tmp_path / "runs", runs_dir=tmp_path / "runs")
