"""Does it learn? A model of random weights learns to answer with the two letters that its prompt calls for.

The whole path is real: config, sampler, rewards, algorithm, learner, publication, held-out prompts. Chance earns 0.05, the
right first letter alone earns 0.5, so that more than that needs both letters, and a look at the prompt. With the sign of the
advantage turned round, the same run unlearns even what chance earns.

And is it told of, where a reward pays for the wrong thing? Then the model does what the reward pays for, which is warned
of; that an honest reward is learnt is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

import groupwise
from benchmarks.choosing_examples import CHARACTERS, write_model
from groupwise.algorithms.registry import ALGORITHMS
from groupwise.core.types import RolloutCredit
from groupwise.engine.models import tiny
from groupwise.runs.records import WarningRecord
from groupwise.runs.store import Store
from tests.rotation import rotating_params

pytestmark = pytest.mark.slow
WORDS = {"x": "ab", "y": "cd", "z": "ef"}
SEEN, UNSEEN = range(6), range(6, 10)
SOAK = pytest.mark.soak(suite="learning")
OTHERS = sorted(ALGORITHMS.keys() - {"dr_grpo", "distillation"})
EACH = ["dr_grpo", *rotating_params(OTHERS, len(OTHERS), "learning", str)]
"""CI also runs one other algorithm, which the commit hash chooses. Distillation needs a teacher."""


class TwoLetters:
    """`4y:` is to be answered by `cd`; the digits of the held-out prompts never occur in training."""

    def __init__(self, *rewards: Any) -> None:
        self.rewards = list(rewards)

    def get_rl_dataset(self, config: Any) -> list[dict[str, str]]:
        return rows(SEEN)

    def get_eval_dataset(self, config: Any) -> list[dict[str, str]]:
        return rows(UNSEEN)

    def get_reward_funcs(self, config: Any, tokenizer: Any) -> list[Any]:
        return self.rewards


def rows(digits: range) -> list[dict[str, str]]:
    return [
        {"prompt": f"{digit}{key}:", "answer": word}
        for digit in digits
        for key, word in WORDS.items()
    ]


def correct(completions: list[str], answer: list[str], **_: Any) -> list[float]:
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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A small vocabulary, and weights large enough that attention and logits are not flat."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "CHARACTERS", CHARACTERS)
        folder = tmp_path_factory.mktemp("learning") / "model"
        write_model(folder)
        yield folder


@dataclass(frozen=True)
class Progress:
    """What came of a run."""

    folder: Path
    curves: dict[str, list[float]]
    warnings: list[WarningRecord]
    before: float
    """Held-out reward."""
    after: float
    summary: dict[str, Any]

    @property
    def first(self) -> float:
        """Mean reward of the first ten steps."""
        return fmean(self.curves["reward"][:10])

    @property
    def last(self) -> float:
        return fmean(self.curves["reward"][-10:])

    @property
    def warned(self) -> list[tuple[str, str]]:
        return [(warning.name, warning.kind) for warning in self.warnings]


def trained(
    model: Path,
    rewards: tuple[Any, ...] = (correct,),
    *,
    algorithm: str = "dr_grpo",
    steps: int = 36,
    lora: Any = None,
    sampler: dict[str, Any] | None = None,
    **training: Any,
) -> Progress:
    config = {
        "model": {"name": str(model), "dtype": "float32"},
        "lora": lora,
        "sampler": {"max_completion_length": 2, "max_num_seqs": 48, **(sampler or {})},
        "algorithm": {"type": algorithm},
        "training": {
            "max_steps": steps,
            "prompts_per_step": 6,
            "num_generations": 16,
            "learning_rate": 0.003,
            "lr_scheduler_type": "constant",
            "seed": 3,
            **training,
        },
        "rewards": {"in_process": True},
        "run": {"name": "toy", "dir": str(model.parent / "runs"), "save_steps": 1000, "threads": 1},
    }
    result = groupwise.rl(config, TwoLetters(*rewards))
    assert result.folder
    assert result.before
    assert result.after
    with Store.open(result.folder / "run.db", readonly=True) as store:
        curves = {name: [value for _, value in curve] for name, curve in store.metrics().items()}
        warnings = store.warnings()
    held_out = result.before.metrics["reward"], result.after.metrics["reward"]
    return Progress(result.folder, curves, warnings, *held_out, result.summary)


@pytest.fixture(scope="module")
def learnt(model: Path) -> Callable[[str], Progress]:
    """A run of an algorithm, made once."""
    return cache(lambda algorithm: trained(model, algorithm=algorithm))


@pytest.mark.parametrize("algorithm", EACH)
def test_it_learns_and_what_it_learns_holds_for_prompts_it_never_saw(learnt, algorithm):
    found = learnt(algorithm)
    assert found.first < 0.25
    assert found.last > 0.55
    assert found.before < 0.1
    assert found.after > 0.65
    assert found.summary["held_out"]["rises"]


def test_a_lora_adapter_learns_too(model):
    found = trained(model, steps=50, learning_rate=0.005, lora={"r": 8, "alpha": 16})
    assert found.last > 2 * found.first
    assert found.last > 0.25
    assert found.after > 0.5
    assert found.summary["held_out"]["rises"]


@pytest.mark.parametrize("algorithm", EACH)
def test_with_the_sign_of_the_advantage_turned_it_unlearns(model, monkeypatch, algorithm):
    kind = ALGORITHMS[algorithm]
    credits = kind.credits

    def turned(self: Any, groups: Any) -> Any:
        return [
            [weight and RolloutCredit(-weight.advantage, weight.scale) for weight in credit]
            for credit in credits(self, groups)
        ]

    monkeypatch.setattr(kind, "credits", turned)
    found = trained(model, algorithm=algorithm, steps=16)
    assert found.last < 0.03
    assert found.after < 0.1
    assert not found.summary["held_out"]["rises"]


OFF_POLICY: dict[str, dict[str, Any]] = {
    "lag": {"max_off_policy_steps": 1},
    "free": {"schedule": "free", "max_off_policy_steps": 2, "num_iterations": 2, "minibatches": 2},
    "updates": {"num_iterations": 2, "minibatches": 2},
}


@pytest.mark.parametrize("way", rotating_params([*OFF_POLICY], 3, "learning", str))
def test_it_learns_off_policy_too(model, way):
    found = trained(model, **OFF_POLICY[way])
    assert found.last > 0.55
    assert found.after > 0.65


# Signals of reward hacking


def test_an_honest_reward_that_is_learnt_raises_nothing(learnt):
    found = learnt("dr_grpo")
    distinct = found.curves["signals/distinct_completions"]
    assert distinct[-1] < 0.5 * distinct[0]
    assert found.warned == []
    assert set(found.curves["signals/active"]) == {0.0}
    assert "warnings" not in found.summary


@SOAK
def test_a_reward_that_pays_for_length_is_reported(model, caplog):
    stops = {"max_completion_length": 12, "stop": list("abcd")}
    found = trained(model, (eloquent,), steps=40, sampler=stops, num_generations=8)
    assert found.curves["signals/length_growth"][-1] > 1.5
    assert ("length", "begins") in found.warned
    names = [name for name, _ in found.warned]
    assert set(names) <= {"length", "truncation", "repetition"}
    assert [each["signal"] for each in found.summary["warnings"]] == names
    told = [r.getMessage() for r in caplog.records if "signal length" in r.getMessage()]
    assert len(told) == 1, "once"
    assert "groupwise runs rollouts" in told[0]


@SOAK
def test_a_reward_that_pays_for_saying_it_again_is_reported(model):
    longer = {"max_completion_length": 8}
    found = trained(model, (cheerful,), steps=40, sampler=longer, num_generations=8)
    assert found.curves["signals/repetition"][-1] > 0.5
    assert found.warned == [("repetition", "begins")]
    assert found.curves["rewards/cheerful/mean"][-1] > 1.5, "and nothing was stopped"


def test_a_heavy_part_that_eats_a_light_one_is_reported(learnt):
    """From a model that knows the answers; the light part is 0.2 of the reward at most, and lost for it."""
    knows = learnt("dr_grpo").folder / "final"
    rewards = ((correct, 0.2), (digits, 2.0))
    found = trained(knows, rewards, steps=24, num_generations=8)
    earned = found.curves["rewards/correct/mean"]
    assert earned[0] > 5 * earned[-1]
    assert {"dominance", "accuracy"} <= {name for name, kind in found.warned if kind == "begins"}
    dominance = next(each for each in found.warnings if each.name == "dominance")
    assert dominance.values["correct at the start"] == pytest.approx(fmean(earned[:10]))
