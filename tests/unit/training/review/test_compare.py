"""Two sides: found by their names, paired by content, and compared prompt by prompt."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from groupwise.core.errors import RunNotFoundError, UsageError
from groupwise.core.types import Example, Group, RewardPart, Rollout, Segment
from groupwise.runs.folder import RunFolder
from groupwise.runs.records import EvaluationRecord, StepRecord
from groupwise.training.evaluation.measures import Success, rows_of
from groupwise.training.review.compare import Comparison, compare_references, find_side


def evaluation_rows(
    rewards: Mapping[str, Sequence[float | None]], part: str = "right", **columns: Any
) -> list[dict[str, Any]]:
    """Rows of prompts with the rewards of their samples, in this order."""
    groups = []
    for index, (prompt, values) in enumerate(rewards.items()):
        rollouts = [
            Rollout(
                index, member, 0, (1,), (Segment("policy", (1,)),), f"{prompt} gives {value}",
                "failed" if value is None else "scored", None if value is None else "",
                value, () if value is None else (RewardPart(part, value),),
            )
            for member, value in enumerate(values)
        ]  # fmt: skip
        groups.append(Group(index, Example(index, prompt, columns), tuple(rollouts)))
    return rows_of(groups, Success())


def a_file(
    folder: Path, name: str, rewards: Mapping[str, Sequence[float | None]], **more: Any
) -> str:
    config = more.pop("config", {})
    metrics = {"reward": 0.0, "pass@1": 0.0, "accuracy": 0.25, **more.pop("metrics", {})}
    rows = evaluation_rows(rewards, **more)
    path = folder / f"{name}.json"
    path.write_text(
        json.dumps({"policy": name, "metrics": metrics, "rows": rows, "config": config})
    )
    return str(path)


def metric(comparison: Comparison, name: str) -> Any:
    return next(each for each in comparison.metrics if each.name == name)


def test_prompts_are_paired_by_content_whatever_their_order(tmp_path):
    a = a_file(tmp_path, "a", {"p": [0.0], "q": [1.0], "r": [1.0], "only": [0.5]})
    b = a_file(tmp_path, "b", {"r": [0.0], "q": [1.0], "p": [1.0]})
    found = compare_references(a, b)
    assert (found.prompts, found.only_a, found.only_b) == (3, 1, 0)
    reward = metric(found, "reward")
    assert (reward.a, reward.b) == pytest.approx((2 / 3, 2 / 3)), "over the pairs only"
    assert (reward.better, reward.worse, reward.equal) == (1, 1, 1)
    assert reward.change.value == 0
    assert metric(found, "accuracy").change is None


def test_unscored_answers_are_left_out_and_counted_in_a_note(tmp_path):
    a = a_file(tmp_path, "a", {"p": [None], "q": [1.0]})
    b = a_file(tmp_path, "b", {"p": [1.0], "q": [0.0]})
    found = compare_references(a, b)
    assert metric(found, "reward").change.count == 1
    assert found.notes == ("A: 1 of 2 answers could not be scored and are left out",)


def test_nothing_in_common_is_refused_with_the_reason(tmp_path):
    a = a_file(tmp_path, "a", {"p": [0.0]}, answer=1)
    with pytest.raises(UsageError, match="'p' and 'q'"):
        compare_references(a, a_file(tmp_path, "b", {"q": [0.0]}))
    with pytest.raises(UsageError, match="other columns"):
        compare_references(a, a_file(tmp_path, "c", {"p": [0.0]}, answer=2))


# Runs


def a_run(
    runs: Path, name: str, rewards: list[float], evaluations: dict[int, str], **config: Any
) -> Path:
    """Each step draws one prompt, `step N`, and rewards it with 0 and twice the number given."""
    with RunFolder.create(runs, name, {"model": {"name": "tiny"}, **config}, {}) as run:
        for step, reward in enumerate(rewards):
            members = tuple(
                Rollout(step, m, 0, (1,), (Segment("policy", (1,)),), "", "scored", None, value)
                for m, value in enumerate((0.0, 2 * reward))
            )
            group = Group(step, Example(step, f"step {step}"), members)
            record = StepRecord(step, step, step + 1, "f", (step,), 0.1, 0.0)
            run.store.commit_step(record, [group], {"reward": reward})
        for step, called in evaluations.items():
            rows = evaluation_rows({"p": [step / 10], "q": [0.0]})
            run.store.add_evaluation(
                EvaluationRecord(step, called, f"{name}@{step}", {"reward": step / 20}, rows)
            )
        run.finish("finished")
        return run.path


@pytest.fixture
def runs(tmp_path):
    found = tmp_path / "runs"
    a_run(found, "a", [0.1, 0.2, 0.3, 0.4], {0: "before", 2: "step-2", 4: "after"})
    a_run(found, "b", [0.1, 0.3, 0.5, 0.7], {0: "before", 4: "after"}, training={"seed": 7})
    a_run(found, "bare", [0.5, 0.5], {0: "before"}, algorithm={"type": "gone.py:Mine"})
    return found


def test_a_run_is_its_evaluation_after_training_and_its_curve(runs):
    found = compare_references("a", "b", runs)
    assert (found.a.label, found.b.label) == ("a@4 (after)", "b@4 (after)")
    assert metric(found, "reward").change.value == 0
    curves = (*found.curve.a, *found.curve.b)
    assert (found.curve.steps, curves) == (4, pytest.approx((0.15, 0.35, 0.2, 0.6)))
    assert found.curve.change.value == pytest.approx(fmean([0.2, 0.3]))
    assert found.config == {"training.seed": (0, 7)}
    gone = compare_references("a@0", "bare@0", runs).config
    assert "algorithm.type" in gone, "a file that was removed does not hide the run"


def test_unrecorded_evaluations_are_found_in_result_files(runs):
    with pytest.raises(RunNotFoundError, match=r"no evaluation after 3 .*a@0 .*a@2"):
        compare_references("a", "a@3", runs)
    written = Path(a_file(runs / "a" / "results", "a@3", {"p": [0.7]}))
    (runs / "a" / "results" / "rescored-x.json").write_text('{"kind": "rescoring"}')
    assert find_side("a@3", runs).label == f"a@3 ({written})"
    assert find_side("a:a@3.json", runs).label == f"a@3 ({written})"
    assert find_side("a@0:a@3.json", runs).label == f"a@3 ({written})"
    for other in ("a:a@4.json", "a:../results/a@3.json", "a:/etc/passwd.json"):
        with pytest.raises(RunNotFoundError, match=r"called .*json"):
            find_side(other, runs)


# Supervised runs


def a_supervised_run(
    runs: Path, name: str, losses: Sequence[float], asked: str = "rows", **config: Any
) -> Path:
    """Its curve, and an evaluation of two examples: one of 3 tokens in two rows, one of 1 token."""
    settings = {"model": {"name": "tiny"}, **config}
    with RunFolder.create(runs, name, settings, {"kind": "sft", "data": "d"}) as run:
        for step, loss in enumerate(losses):
            record = StepRecord(step, step, step + 1, "", (step,), 0.1, 0.0)
            run.store.commit_step(record, [Group(step, Example(step, ""), ())], {"loss": loss})
        if asked:
            last = losses[-1]
            rows = [
                {"example": 0, "loss": last, "tokens": 1},
                {"example": 0, "loss": last, "tokens": 2},
                {"example": 1, "loss": 1.0, "tokens": 1},
            ]
            metrics = {"eval_loss": (3 * last + 1) / 4, "perplexity": 2.0}
            steps = len(losses)
            run.store.add_evaluation(
                EvaluationRecord(steps, f"step-{steps}", f"{name}@{steps}", metrics, rows, asked)
            )
        run.finish("finished")
        return run.path


def test_supervised_runs_are_compared_by_their_losses(runs):
    a_supervised_run(runs, "w", [2.0, 0.5])
    a_supervised_run(runs, "v", [2.0, 0.9], training={"learning_rate": 0.5})
    found = compare_references("w", "v", runs)
    loss = metric(found, "eval_loss")
    assert (loss.a, loss.b) == (pytest.approx(2.5 / 4), pytest.approx(3.7 / 4)), "as recorded"
    assert loss.change.value == pytest.approx(1.2 / 4)
    assert loss.change.low <= loss.change.value <= loss.change.high
    assert (loss.better, loss.worse, loss.equal) == (0, 1, 1), "less is better"
    assert metric(found, "perplexity").change is None
    assert (found.curve.metric, found.curve.steps, found.curve.b) == ("loss", 2, (2.0, 0.9))
    assert found.config == {"training.learning_rate": (1e-4, 0.5)}
    assert (found.prompts, found.notes) == (2, ())
    assert json.loads(json.dumps(found.summary()))["metrics"]["eval_loss"]["worse"] == 1
