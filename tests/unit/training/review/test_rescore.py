"""Recorded rollouts scored again: by a task or by named functions, in workers, without changing the record."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from groupwise.core.errors import RunNotFoundError, TaskError, UsageError
from groupwise.core.types import Example, Group, Rollout, Segment
from groupwise.runs.folder import RunFolder
from groupwise.runs.records import StepRecord
from groupwise.runs.store import Store
from groupwise.training.review.rescore import Rescoring, rescore

REWARDS = str(Path(__file__).with_name("rescoring_rewards.py"))
TEXTS = ("aaaa", "aaa", "aa", "a")


def rollout(draw: int, member: int, reward: float | None, **more: Any) -> Rollout:
    outcome = "failed" if reward is None else "scored"
    segments = more.pop("segments", (Segment("policy", (1,) * len(TEXTS[member])),))
    return Rollout(draw, member, 0, (1,), segments, TEXTS[member], outcome, None, reward, **more)


def a_run(runs: Path, **more: Any) -> Path:
    """Three steps of two groups; longer is better, but in the last group it is worse, and one rollout failed."""
    scoring = {"in_process": True, **more.pop("rewards", {})}
    config = {"model": {"name": "tiny"}, "rewards": scoring}
    with RunFolder.create(runs, "r", config, {"max_steps": 3}, **more) as run:
        for step in range(3):
            groups = []
            for draw in (2 * step, 2 * step + 1):
                rewards: list[float | None] = [4.0, 3.0, 2.0, 1.0]
                if draw == 5:
                    rewards = [1.0, 2.0, 3.0, None]
                members = tuple(rollout(draw, m, r) for m, r in enumerate(rewards))
                groups.append(Group(draw, Example(draw, f"ask {draw}", {"number": draw}), members))
            record = StepRecord(step, 0, 0, "f", (2 * step, 2 * step + 1), 0.1, 0.0)
            run.store.commit_step(record, groups, {})
        run.finish("finished")
        return run.path


@pytest.fixture
def runs(tmp_path):
    found = tmp_path / "runs"
    a_run(found)
    return found


@pytest.fixture
def in_workers(tmp_path):
    """Scored by processes, which may be killed."""
    found = tmp_path / "runs"
    a_run(found, rewards={"in_process": False, "time_limit": 0.7})
    return found


def judged(runs: Path, *names: str, **more: Any) -> Rescoring:
    return rescore("r", rewards=[f"{REWARDS}:{name}" for name in names], runs_dir=runs, **more)


def record(runs: Path) -> bytes:
    with Store.open(runs / "r" / "run.db", readonly=True) as store:
        return store.deterministic_dump()


def test_totals_agreement_and_places(runs):
    before = record(runs)
    found = judged(runs, "length")
    assert list(found.steps) == [1, 2, 3]
    first, last = found.steps[1], found.steps[3]
    assert (first.rollouts, first.scored, first.old, first.new) == (8, 8, 2.5, 2.5)
    assert (first.correlation, first.agreement, first.moved) == (pytest.approx(1), 1.0, 0)
    assert (last.rollouts, last.scored, last.failed) == (8, 7, 0)
    assert last.agreement == pytest.approx(6 / 9), "three of nine pairs are turned round"
    assert last.moved == 2
    assert found.overall.rollouts == 24
    assert record(runs) == before, "the record is only read"


def test_all_is_written_beside_the_record(runs):
    found = [judged(runs, "length"), judged(runs, "length")]
    names = [each.path.name for each in found]
    assert names == ["rescored-length.json", "rescored-length-2.json"]
    stored = json.loads(found[0].path.read_text())
    assert (stored["kind"], stored["rewards"]) == ("rescoring", {"length": 1.0})
    written = found[1].path.with_suffix(".jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in written]
    assert len(rows) == 24
    assert rows[0]["old_parts"] == {}
    assert rows[0]["new_parts"] == {"length": 4.0}
    assert not list(found[0].path.parent.glob(".*")), "nothing is left under construction"
    assert stored["overall"] == found[0].summary()["overall"]


def test_a_task_judges_with_its_weights_and_the_configs_task_section(runs):
    found = rescore("r", task=REWARDS, runs_dir=runs, overrides=["task.backwards=0.5"])
    assert found.rewards == {"length": 2.0, "backwards": 0.5}
    assert next(found.rows()).new == 2.0 * 4 - 0.5 * 4
    with pytest.raises(TaskError, match="no get_reward_funcs"):
        rescore("r", task=str(Path(__file__)), runs_dir=runs)


def test_rewards_that_raise_or_hang_cost_their_group_only(in_workers):
    raised = judged(in_workers, "raises_at_two", limit=4)
    assert [row.group for row in list(raised.rows())[::4]] == [3, 4, 5, 6], "the last groups"
    lost = [row for row in raised.rows() if row.new is None]
    assert {(row.group, row.new_outcome) for row in lost} == {(3, "failed")}
    assert "two is too much" in (lost[0].reason or "")
    assert raised.steps[2].failed == 4
    hung = judged(in_workers, "hangs_at_one", step=1)
    assert {(row.group, row.new_outcome) for row in hung.rows()} == {
        (1, "scored"),
        (2, "timed_out"),
    }
    assert hung.overall.scored == 4


@pytest.mark.parametrize(
    ("name", "why", "broken"),
    [
        ("boo", "reward `boo` raised", True),
        ("one_too_few", "reward `one_too_few` returned", True),
        ("nothing", "no reward applied", False),
    ],
)
def test_a_reward_that_scores_nothing_is_reported_with_its_reason(runs, name, why, broken):
    found = judged(runs, name)
    assert (found.overall.scored, found.overall.failed, found.exit_code) == (0, 24, 1)
    assert found.failed_rewards == ((name,) if broken else ())
    ((reason, count),) = found.overall.reasons.items()
    assert (reason.startswith(why), count) == (True, 24)
    assert found.summary()["steps"]["1"]["reasons"] == {reason: 8}


def test_texts_are_enough_but_token_ids_are_not_made_up(tmp_path):
    a_run(tmp_path, keep_tokens=False)
    assert judged(tmp_path, "length", step=1).overall.new == 2.5
    with pytest.raises(TaskError, match=r"`ids` .* completion_ids"):
        judged(tmp_path, "ids")


def test_rescore_refuses_invalid_requests_with_the_reason(runs):
    for given in ({}, {"task": REWARDS, "rewards": ["x:y"]}):
        with pytest.raises(UsageError, match="--task-module or --rewards"):
            rescore("r", runs_dir=runs, **given)
    with pytest.raises(RunNotFoundError, match="no step 4"):
        judged(runs, "length", step=4)
    with pytest.raises(TaskError, match="Did you mean `length`"):
        judged(runs, "lengt")
    with pytest.raises(TaskError, match="environment gave"):
        rescore("r", task=SimpleNamespace(get_environment=lambda config: None), runs_dir=runs)
    RunFolder.create(runs, "warm", {"data": {}}, {"kind": "sft"}).close()
    with pytest.raises(UsageError, match="groupwise sft"):
        rescore("warm", task=REWARDS, runs_dir=runs)
    with RunFolder.create(runs, "plain", {"model": {"name": "tiny"}}, {}) as run:
        group = Group(0, Example(0, "p"), (rollout(0, 0, 1.0),))
        run.store.commit_step(StepRecord(0, 0, 0, "f", (0,), 0.1, 0.0), [group], {})
    with pytest.raises(TaskError, match="asks for `number`"):
        rescore("plain", rewards=[f"{REWARDS}:raises_at_two"], runs_dir=runs)
