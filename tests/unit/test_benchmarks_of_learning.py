"""What the benchmarks of learning keep, resume, compare and draw; what they measure is run by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import learning
from benchmarks.equal_learning import ratio
from benchmarks.learning import CONFIG, Curve, Study
from benchmarks.trl_side import settings
from groupwise.config import load_config

SETTINGS = {"training.max_steps": 2}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Runs as they are made, here instead of in processes of their own."""
    monkeypatch.setattr(learning, "apart", lambda *works: [work() for work in works])
    return []


def sides(made: list[tuple[str, int]]) -> dict[str, Callable[[int], Curve]]:
    def side(name: str) -> Callable[[int], Curve]:
        def learn(seed: int) -> Curve:
            made.append((name, seed))
            return {"reward": [0.1 * seed, 0.5], "seconds": [1.0, 3.0]}

        return learn

    return {"a": side("a"), "b": side("b")}


def test_what_is_there_is_not_made_again_nor_mixed_with_runs_of_other_settings(
    made: list[tuple[str, int]], tmp_path: Path
) -> None:
    file = tmp_path / "study.json"

    def fails(_: int) -> Curve:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        Study.opened(SETTINGS, file).run({**sides(made), "b": fails}, 1, None)
    Study.opened(SETTINGS, file).run(sides(made), 2, None)
    assert sorted(made) == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    stored = json.loads(file.read_text())["curves"]
    assert {side: list(runs) for side, runs in stored.items()} == {
        "a": ["0", "1"],
        "b": ["0", "1"],
    }
    with pytest.raises(SystemExit, match="max_steps"):
        Study.opened({"training.max_steps": 3}, file)


def test_the_ratio_is_of_seeds_that_both_sides_have() -> None:
    def curve(seconds: float) -> Curve:
        return {"reward": [0.0], "seconds": [seconds]}

    curves = {"Groupwise": {"0": curve(2.0), "1": curve(99.0)}, "TRL": {"0": curve(8.0)}}
    assert ratio(Study({}, None, curves)) == pytest.approx(4.0)


@pytest.mark.soak(suite="learning")
@pytest.mark.filterwarnings("ignore")
def test_trl_gets_the_settings_of_groupwises_config(tmp_path: Path) -> None:
    changed = {
        "training.seed": 3,
        "training.max_steps": 7,
        "training.prompts_per_step": 5,
        "training.num_generations": 6,
        "training.learning_rate": 3e-6,
        "training.lr_scheduler_type": "cosine",
        "training.warmup_steps": 2,
        "training.weight_decay": 0.03,
        "training.adam_beta1": 0.8,
        "training.adam_beta2": 0.98,
        "training.adam_epsilon": 1e-7,
        "training.max_grad_norm": 0.7,
        "sampler.max_completion_length": 9,
        "sampler.temperature": 0.9,
        "algorithm.epsilon": 0.3,
        "algorithm.beta": 0.02,
    }
    config = load_config(CONFIG, [f"{key}={value}" for key, value in changed.items()]).config
    theirs: Any = settings(config, str(tmp_path), logging_steps=1)
    names = {
        "prompts_per_step": "gradient_accumulation_steps",
        "max_steps": "max_steps",
    }
    for key, value in changed.items():
        name = key.partition(".")[2]
        assert getattr(theirs, names.get(name, name)) == value, key
    assert theirs.per_device_train_batch_size == 6
    assert theirs.loss_type == config.algorithm.type
    assert theirs.scale_rewards == "none"
    assert not theirs.bf16
    assert not theirs.shuffle_dataset
