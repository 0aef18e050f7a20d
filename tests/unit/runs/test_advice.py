"""Advice on a run from the numbers of its last steps."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from groupwise.core.types import Example, Group, RewardPart, Rollout
from groupwise.runs.advice import advice_before_training, advice_on
from groupwise.runs.folder import CLIENTS
from groupwise.runs.notebook_names import OWN_NAMES
from groupwise.runs.records import EvaluationRecord, StepRecord
from groupwise.runs.store import Store

CERTAIN = {"frac_reward_zero_std": 1.0, "groups/distinct": 0.1, "entropy": 0.01}


@pytest.mark.parametrize(("solved", "problems"), [
    (0.5, ["groups without signal", "no entropy left"]),
    (0.0, ["groups without signal", "nothing solved", "no entropy left"]),
    (0.95, [""]),
])  # fmt: skip
def test_equal_rewards_are_no_fault_of_a_policy_that_solves_its_examples(
    tmp_path: Path, solved: float, problems: list[str]
) -> None:
    with Store.create(tmp_path / "run.db") as store:
        store.commit_step(
            StepRecord(0, 0, 1, "f1", (), 1e-5, 1000.0), [], {**CERTAIN, "rollouts/solved": solved}
        )
        assert [advice["problem"] for advice in advice_on(store)] == problems


@pytest.mark.parametrize(("training", "problems"), [
    ({}, ["sampler and learner differ"]),
    ({"num_iterations": 1, "minibatches": 1, "max_off_policy_steps": 0}, ["sampler and learner differ"]),
    ({"num_iterations": 2}, []),
    ({"minibatches": 4}, []),
    ({"max_off_policy_steps": 1}, []),
])  # fmt: skip
def test_a_gap_is_no_fault_if_updates_come_between_sampling_and_learning(
    tmp_path: Path, training: dict[str, int], problems: list[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"training": training}))
    with Store.create(tmp_path / "run.db") as store:
        store.commit_step(
            StepRecord(0, 0, 1, "f1", (), 1e-5, 1000.0), [], {"sampling/logprob_gap": 0.2}
        )
        assert [advice["problem"] for advice in advice_on(store)] == problems


@pytest.mark.parametrize(("model", "advised", "does"), [
    ("tiny", 1, "groupwise init -t TASK -m smollm2-135m-instruct"),
    ("smollm2-135m-instruct", 2, "(warm_up)"),
])  # fmt: skip
def test_a_toy_is_expected_to_solve_nothing(
    tmp_path: Path, model: str, advised: int, does: str
) -> None:
    with Store.create(tmp_path / "run.db") as store:
        store.set_meta({"model": model})
        store.commit_step(
            StepRecord(0, 0, 1, "f1", (), 1e-5, 1000.0),
            [],
            {"frac_reward_zero_std": 1.0, "groups/distinct": 1.0, "rollouts/solved": 0.0},
        )
        advice = advice_on(store)
    assert len(advice) == advised
    assert all(does in each["do"] for each in advice)


@pytest.mark.parametrize(("rewards", "changes", "advised"), [
    ([0.0] * 40, {}, "get_sft_dataset"),
    ([0.0] * 39 + [1.0], {}, "get_sft_dataset"),
    ([0.0] * 40, {"model": {"name": "tiny"}}, "groupwise init -t TASK"),
    ([0.0] * 40, {"eval": {"temperature": 0.0}}, "eval.temperature=1.0"),
    ([0.0] * 40, {"warm_up": "sft.yaml"}, ""),
    ([0.0] * 36 + [1.0] * 4, {}, ""),
    ([0.1, 0.2, 0.3, 0.4] * 10, {}, ""),
    ([None] * 40, {}, ""),
])  # fmt: skip
def test_a_model_that_solves_hardly_anything_is_to_be_warmed_up_before_training(
    rewards: list[float | None], changes: dict[str, Any], advised: str
) -> None:
    rows = [{"reward": r, "success": None if r is None else r >= 0.5} for r in rewards]
    config = {
        "model": {"name": "smollm2-135m-instruct"},
        "warm_up": None,
        "eval": {"temperature": 1.0},
        **changes,
    }
    advice = advice_before_training(rows, config)
    assert len(advice) == bool(advised)
    assert all(advised in each["do"] for each in advice)


@pytest.mark.parametrize("model", ["tiny", "smollm2-135m-instruct"])
@pytest.mark.parametrize("solved", [0.0, 0.95])
@pytest.mark.parametrize("distinct", [0.1, 1.0])
def test_a_client_of_the_server_is_given_no_keys_and_commands_of_a_config(
    tmp_path: Path, model: str, solved: float, distinct: float
) -> None:
    with Store.create(tmp_path / "run.db") as store:
        store.set_meta({"model": model, "task": CLIENTS, "task_file": ""})
        numbers = {
            "frac_reward_zero_std": 1.0, "groups/distinct": distinct, "completions/clipped_ratio": 1.0,
            "entropy": 0.01, "kl": 9.0, "clip_ratio/region_mean": 0.5, "updates/left_out": 1.0,
        }  # fmt: skip
        store.commit_step(
            StepRecord(0, 0, 1, "f1", (), 1e-5, 1000.0), [], {**numbers, "rollouts/solved": solved}
        )
        advice = advice_on(store)
    assert len(advice) >= 2
    text = " ".join(each["says"] + each["do"] for each in advice)
    for wrong in ("groupwise ", "warm_up", "data.", "training.", "eval.", "sampler.max_completion_length"):  # fmt: skip
        assert wrong not in text


@pytest.mark.parametrize("model", ["tiny", "smollm2-135m-instruct"])
@pytest.mark.parametrize("solved", [0.0, 0.95])
@pytest.mark.parametrize("distinct", [0.1, 1.0])
def test_a_run_of_a_notebook_is_given_what_a_notebook_can_set(
    tmp_path: Path, model: str, solved: float, distinct: float
) -> None:
    with Store.create(tmp_path / "run.db") as store:
        store.set_meta({"model": model, "notebook": {}})
        numbers = {"frac_reward_zero_std": 1.0, "groups/distinct": distinct, "completions/clipped_ratio": 1.0, "kl": 9.0}  # fmt: skip
        store.commit_step(
            StepRecord(0, 0, 1, "f1", (), 1e-5, 1000.0), [], {**numbers, "rollouts/solved": solved}
        )
        advice = advice_on(store)
    assert len(advice) >= 3
    text = " ".join(each["do"] for each in advice)
    for wrong in ("groupwise ", "warm_up", "warm-up", "data.", *OWN_NAMES):
        assert not re.search(rf"\b{re.escape(wrong)}", text), wrong
    assert (model == "tiny" and solved == 0.0) == ('TrainingConfig(model="smollm2-135m' in text)
    for each in advice:
        keys = re.findall(r"\b(?:eval|sampler|training)\.[a-z_]+", each["do"])
        assert not keys or "overrides=" in each["do"]


def test_advice_on_a_supervised_run_names_only_its_keys(tmp_path: Path) -> None:
    with Store.create(tmp_path / "run.db") as store:
        store.set_meta({"kind": "sft"})
        metrics = {"entropy": 0.01, "updates/left_out": 1.0}
        store.commit_step(StepRecord(0, 0, 1, "f1", (), 1e-5, 1000.0), [], metrics)
        advised = " ".join(advice["do"] for advice in advice_on(store))
    keys = re.findall(r"\b[a-z]+\.[a-z_]+", advised)
    assert keys == [
        "training.learning_rate", "training.max_steps", "training.stop_when", "training.learning_rate"
    ]  # fmt: skip


def test_a_run_that_was_compared_with_its_start_is_not_advised_to_compare(tmp_path: Path) -> None:
    with Store.create(tmp_path / "run.db") as store:
        step = StepRecord(0, 0, 1, "f1", (), 1e-5, 1000.0)
        store.commit_step(step, [], {"rollouts/solved": 0.95})
        advised = [advice_on(store)[0]["do"]]
        for steps, name in ((0, "before"), (1, "after")):
            store.add_evaluation(
                EvaluationRecord(steps, name, "", {"reward": 1.0}, ({"example": 0},))
            )
        advised.append(advice_on(store)[0]["do"])
    assert ["groupwise eval" in text for text in advised] == [True, False]


def test_a_reward_that_never_pays_is_named(tmp_path: Path) -> None:
    parts = (
        *(RewardPart("right", 0.0), RewardPart("only_number", 0.0, weight=0.5)),
        RewardPart("length", 0.0, weight=0.0),
    )
    rollout = Rollout(0, 0, 0, (), (), "x", "scored", reward=0.0, parts=parts)
    step = StepRecord(0, 0, 1, "f1", (0,), 1e-5, 1000.0)
    numbers = {f"rewards/{part.name}/{kind}": 0.0 for part in parts for kind in ("mean", "std")}
    for right, said in ((0.5, ["The reward only_number was 0"]), (0.0, [])):
        with Store.create(tmp_path / f"{right}.db") as store:
            group = Group(0, Example(0, "p"), (rollout,))
            store.commit_step(step, [group], {**numbers, "rewards/right/mean": right})
            assert [each["says"].partition(" for ")[0] for each in advice_on(store)] == said
