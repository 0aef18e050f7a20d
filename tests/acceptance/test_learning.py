"""Does it learn? A model of random weights learns to answer with the two letters that its prompt calls for.

The whole path is real: config, sampler, rewards, algorithm, learner, publication, held-out prompts. Chance earns 0.05, the
right first letter alone earns 0.5, so that more than that needs both letters, and a look at the prompt. With the sign of the
advantage turned round, the same run unlearns even what chance earns.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

import groupwise
from benchmarks.choosing_examples import CHARACTERS, write_model
from groupwise.algorithms.registry import ALGORITHMS
from groupwise.models import tiny
from groupwise.runs.store import Store
from groupwise.types import Weight

WORDS = {"x": "ab", "y": "cd", "z": "ef"}
SEEN, UNSEEN = range(6), range(6, 10)
ALWAYS = ("dr_grpo",)
EACH = [
    name if name in ALWAYS else pytest.param(name, marks=pytest.mark.soak(suite="learning"))
    for name in sorted(ALGORITHMS)
]


class TwoLetters:
    """`4y:` is to be answered by `cd`; the digits of the held-out prompts never occur in training."""

    def get_rl_dataset(self, config: Any) -> list[dict[str, str]]:
        return rows(SEEN)

    def get_eval_dataset(self, config: Any) -> list[dict[str, str]]:
        return rows(UNSEEN)

    def get_reward_funcs(self, config: Any, tokenizer: Any) -> list[Any]:
        return [right_letters]


def rows(digits: range) -> list[dict[str, str]]:
    return [
        {"prompt": f"{digit}{key}:", "answer": word}
        for digit in digits
        for key, word in WORDS.items()
    ]


def right_letters(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [
        sum(mine == right for mine, right in zip(text, gold, strict=False)) / 2
        for text, gold in zip(completions, answer, strict=True)
    ]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small vocabulary, and weights large enough that attention and logits are not flat."""
    monkeypatch.setattr(tiny, "CHARACTERS", CHARACTERS)
    write_model(tmp_path / "model")
    return tmp_path / "model"


@dataclass(frozen=True)
class Progress:
    """What came of a run."""

    first: float
    """Mean reward of the first ten steps."""
    last: float
    before: float
    """Held-out reward."""
    after: float
    summary: dict[str, Any]


def trained(
    model: Path, algorithm: str, steps: int, rate: float, lora: Any = None, **training: Any
) -> Progress:
    config = {
        "model": {"name": str(model), "dtype": "float32"},
        "lora": lora,
        "sampler": {"max_completion_length": 2, "slots": 48},
        "algorithm": {"type": algorithm},
        "training": {
            "max_steps": steps,
            "prompts_per_step": 6,
            "num_generations": 16,
            "learning_rate": rate,
            "lr_scheduler_type": "constant",
            "seed": 3,
            **training,
        },
        "rewards": {"in_process": True},
        "run": {"name": "toy", "dir": str(model.parent / "runs"), "save_steps": 1000, "threads": 1},
    }
    result = groupwise.rl(config, TwoLetters())
    assert result.folder
    assert result.before
    assert result.after
    with Store.open(result.folder / "run.db", readonly=True) as store:
        rewards = [value for _, value in store.metrics(["reward"])["reward"]]
    held_out = result.before.metrics["reward"], result.after.metrics["reward"]
    return Progress(fmean(rewards[:10]), fmean(rewards[-10:]), *held_out, result.summary)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", EACH)
def test_it_learns_and_what_it_learns_holds_for_prompts_it_never_saw(model, algorithm):
    found = trained(model, algorithm, steps=36, rate=0.003)
    assert found.first < 0.25
    assert found.last > 0.55
    assert found.before < 0.1
    assert found.after > 0.65
    assert found.summary["held_out"]["rises"]


@pytest.mark.soak(suite="learning")
def test_a_lora_adapter_learns_too(model):
    found = trained(model, "dr_grpo", steps=80, rate=0.005, lora={"r": 8, "alpha": 16})
    assert found.last > 2 * found.first
    assert found.last > 0.25
    assert found.after > 0.5
    assert found.summary["held_out"]["rises"]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", EACH)
def test_with_the_sign_of_the_advantage_turned_it_unlearns(model, monkeypatch, algorithm):
    kind = ALGORITHMS[algorithm]
    weights = kind.weights

    def turned(self: Any, groups: Any) -> Any:
        return [
            [weight and Weight(-weight.advantage, weight.scale) for weight in credit]
            for credit in weights(self, groups)
        ]

    monkeypatch.setattr(kind, "weights", turned)
    found = trained(model, algorithm, steps=16, rate=0.003)
    assert found.last < 0.03
    assert found.after < 0.1
    assert not found.summary["held_out"]["rises"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [
        pytest.param({"lag": 1}, marks=pytest.mark.soak(suite="learning"), id="lag"),
        pytest.param(
            {"schedule": "free", "lag": 2, "num_iterations": 2, "minibatches": 2},
            marks=pytest.mark.soak(suite="learning"),
            id="free",
        ),
        pytest.param(
            {"num_iterations": 2, "minibatches": 2},
            marks=pytest.mark.soak(suite="learning"),
            id="updates",
        ),
    ],
)
def test_it_learns_off_policy_too(model, way):
    found = trained(model, "dr_grpo", steps=36, rate=0.003, **way)
    assert found.last > 0.55
    assert found.after > 0.65
