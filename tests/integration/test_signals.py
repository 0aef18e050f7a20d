"""Signals of reward hacking in whole runs: a reward that pays for the wrong thing is warned of, an honest one is not.

A small model of random weights is really trained, until it does what the reward pays for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import groupwise
from benchmarks.choosing_examples import CHARACTERS, write_model
from groupwise.models import tiny
from groupwise.runs.records import WarningRecord
from groupwise.runs.store import Store

WORDS = {"x": "ab", "y": "cd", "z": "ef"}
STEPS = 40


class Task:
    """`4y:` is to be answered by `cd`."""

    def __init__(self, *rewards: Any) -> None:
        self.rewards = list(rewards)

    def get_rl_dataset(self, config: Any) -> list[dict[str, str]]:
        return [
            {"prompt": f"{digit}{key}:", "answer": word}
            for digit in range(6)
            for key, word in WORDS.items()
        ]

    def get_reward_funcs(self, config: Any, tokenizer: Any) -> list[Any]:
        return self.rewards


def accuracy(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """The share of the letters that are right."""
    return [
        sum(mine == right for mine, right in zip(text, gold, strict=False)) / 2
        for text, gold in zip(completions, answer, strict=True)
    ]


def eloquent(completions: list[str], **_: Any) -> list[float]:
    """Meant: explain yourself. Paid: whatever takes long."""
    return [len(text) / 12 for text in completions]


def cheerful(completions: list[str], **_: Any) -> list[float]:
    """Meant: one friendly word. Paid: as many as fit."""
    return [text.count("e") / 4 for text in completions]


def digits(completions: list[str], **_: Any) -> list[float]:
    """Meant: show a number. Paid: nothing but digits."""
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def correct(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    return accuracy(completions, answer, **columns)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small vocabulary, and weights large enough that attention and logits are not flat."""
    monkeypatch.setattr(tiny, "CHARACTERS", CHARACTERS)
    write_model(tmp_path / "model")
    return tmp_path / "model"


def warned(
    model: Path, task: Task, length: int, stop: list[str], steps: int = STEPS, **sections: Any
) -> tuple[list[WarningRecord], dict[str, list[float]], dict[str, Any]]:
    """The warnings of a run, its curves, and its summary."""
    config = {
        "model": {"name": str(model), "dtype": "float32"},
        "lora": None,
        "sampler": {"max_completion_length": length, "slots": 48, "stop": stop},
        "training": {
            "max_steps": steps,
            "prompts_per_step": 6,
            "num_generations": 8,
            "learning_rate": 0.003,
            "lr_scheduler_type": "constant",
            "seed": 3,
        },
        "rewards": {"in_process": True},
        "run": {"name": "toy", "dir": str(model.parent / "runs"), "save_steps": 1000, "threads": 1},
        **sections,
    }
    result = groupwise.rl(config, task)
    assert result.folder
    with Store.open(result.folder / "run.db", readonly=True) as store:
        curves = {name: [v for _, v in curve] for name, curve in store.metrics().items()}
        return store.warnings(), curves, result.summary


def names(warnings: list[WarningRecord]) -> list[tuple[str, str]]:
    return [(warning.name, warning.kind) for warning in warnings]


@pytest.mark.soak(suite="learning")
def test_an_honest_reward_that_is_learnt_raises_nothing(model):
    warnings, curves, summary = warned(model, Task(accuracy), 2, [])
    assert curves["reward"][-1] > 2 * curves["reward"][0], "it was learnt"
    assert (
        curves["signals/distinct_completions"][-1] < 0.5 * curves["signals/distinct_completions"][0]
    )
    assert names(warnings) == []
    assert set(curves["signals/active"]) == {0.0}
    assert "warnings" not in summary


@pytest.mark.soak(suite="learning")
def test_a_reward_that_pays_for_length_is_told(model, caplog):
    warnings, curves, summary = warned(model, Task(eloquent), 12, list("abcd"))
    assert curves["signals/length_growth"][-1] > 1.5
    assert ("length", "begins") in names(warnings)
    assert {name for name, _ in names(warnings)} <= {"length", "truncation", "repetition"}
    assert [each["signal"] for each in summary["warnings"]] == [name for name, _ in names(warnings)]
    told = [r.getMessage() for r in caplog.records if "signal length" in r.getMessage()]
    assert len(told) == 1, "once"
    assert "groupwise runs rollouts toy --best" in told[0]


@pytest.mark.soak(suite="learning")
def test_a_reward_that_pays_for_saying_it_again_is_told(model):
    warnings, curves, _ = warned(model, Task(cheerful), 8, [])
    assert curves["signals/repetition"][-1] > 0.5
    assert names(warnings) == [("repetition", "begins")]
    assert curves["rewards/cheerful/mean"][-1] > 1.5, "and nothing was stopped"


def test_a_heavy_part_that_eats_a_light_one_is_told(model):
    """From a model that knows some of the answers; the light part is 0.1 of the reward at most, and lost for it."""
    silent, curves, _ = warned(model, Task(accuracy), 2, [], steps=20, signals=None)
    assert (silent, [name for name in curves if name.startswith("signals/")]) == ([], [])
    knows = model.parent / "runs" / "toy" / "final"
    task = Task((correct, 0.2), (digits, 2.0))
    warnings, curves, _ = warned(knows, task, 2, [], steps=30)
    assert curves["rewards/correct/mean"][0] > 5 * curves["rewards/correct/mean"][-1]
    assert {"dominance", "accuracy"} <= {name for name, kind in names(warnings) if kind == "begins"}
    (dominance, *_) = (w for w in warnings if w.name == "dominance")
    first = curves["rewards/correct/mean"][:10]
    assert dominance.values["correct at the start"] == pytest.approx(sum(first) / 10)
