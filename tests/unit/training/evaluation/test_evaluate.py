"""Evaluation with fakes: seeds that pair, failures left out, results never overwritten, and every form of --policy."""

import json
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest

from groupwise.core.errors import (
    RewardWorkerError,
)
from groupwise.core.reward_call.request import GroupScore, MemberScore
from groupwise.core.settings.view import View
from groupwise.core.types import Completion, Example, RewardPart, SamplingParams
from groupwise.tasks.contract import load_task
from groupwise.tasks.rewards.inprocess import InProcessScorer
from groupwise.tasks.rollouts.prompts import PromptSet
from groupwise.tasks.rollouts.single import Single
from groupwise.testing import END_ID, FakeSampler, FakeTokenizer
from groupwise.training.evaluation.evaluate import (
    EvalResult,
    HeldOut,
    answer_held_out,
    compare_before_after,
)

TOKENIZER = FakeTokenizer()


class CountingScorer:
    """Rewards the share of `a`; fails the members that `fails` names, by example and member."""

    def __init__(self, fails: Collection[tuple[int, int]] = ()):
        self.fails = fails
        self.measured = 0

    async def start(self):
        pass

    async def score(self, request):
        members = []
        for member, text in enumerate(request.completions):
            value = text.count("a") / 8
            failed = (request.columns["key"][member], member) in self.fails
            scored = MemberScore("scored", None, value, (RewardPart("share", value),))
            members.append(MemberScore("failed", "it raised") if failed else scored)
        return GroupScore(tuple(members))

    async def compute_metrics(self, prompts, completions, rows):
        self.measured += 1
        assert len(prompts) == len(completions) == len(rows)
        metrics = {"accuracy": 0.25, "name": "x", "flag": True}
        return {"metrics": metrics, "more": [row["key"] for row in rows]}

    async def close(self):
        pass


def held_out_set(prompts=3, samples=2, **changes) -> HeldOut:
    texts = ["ask a", "ask b", "ask c", "ask d"][:prompts]
    examples = tuple(Example(10 + i, text, {"key": i}) for i, text in enumerate(texts))
    ids = tuple(tuple(TOKENIZER(text)["input_ids"]) for text in texts)
    found = HeldOut(
        prompts=PromptSet(examples, ids),
        params=SamplingParams(8, 1.0, stop_token_ids=(END_ID,)),
        samples_per_prompt=samples,
        seed=5,
        scores_rewards=True,
        has_metrics=True,
    )
    return replace(found, **changes)


async def answers(held_out: HeldOut, sampler=None, scorer: Any = None, **more) -> EvalResult:
    return await answer_held_out(
        held_out, sampler or FakeSampler(), scorer or CountingScorer(), TOKENIZER, "r@1", **more
    )


# What an evaluation does


async def test_two_policies_get_the_same_seeds():
    first, second = FakeSampler(), FakeSampler()
    second.table[1] = 3.0
    await answers(held_out_set(), first)
    await answers(held_out_set(), second)
    assert [each.seeds for each in first.requests] == [each.seeds for each in second.requests]
    seeds = [seed for each in first.requests for seed in each.seeds]
    assert len(set(seeds)) == 6


async def test_failures_are_no_low_rewards():
    whole = await answers(held_out_set())
    result = await answers(held_out_set(), scorer=CountingScorer({(0, 0), (1, 0), (1, 1)}))
    of_10, of_12 = whole.rows[1]["reward"], (whole.rows[4]["reward"] + whole.rows[5]["reward"]) / 2
    assert result.metrics["reward"] == pytest.approx((of_10 + of_12) / 2), "a prompt counts once"
    assert result.metrics["rollouts/failed"] == 3.0
    assert result.summary["failures"] == {"it raised": 3}
    assert result.summary["left_out"] == dict.fromkeys(("reward", "pass@1", "avg@2", "maj@2"), 1)
    assert set(result.rewards) == {10, 12}, "a prompt without a scored sample is left out"
    assert result.rewards[10] == whole.rows[1]["reward"]
    assert [row["reason"] for row in result.rows].count("it raised") == 3
    assert "rollouts/failed" not in whole.metrics


class MixtureScorer(CountingScorer):
    """The metrics of a mixture with a task `sums`."""

    async def compute_metrics(self, prompts, completions, rows):
        names = ("accuracy", "sums/accuracy", "sums/accuracy_level_1", "sums/hard/accuracy")
        return {"metrics": dict.fromkeys((*names, "accuracy/a", "other/accuracy"), 0.0)}


async def test_an_interval_of_one_task_stands_on_its_own_prompts():
    plain = held_out_set(prompts=4)
    labelled = [
        replace(each, columns={**each.columns, **({"task": "sums"} if each.index != 11 else {})})
        for each in plain.prompts.examples
    ]
    mixed = replace(plain, prompts=replace(plain.prompts, examples=tuple(labelled)))
    result = await answers(mixed, scorer=MixtureScorer())
    assert [row.get("task") for row in result.rows[::2]] == ["sums", None, "sums", "sums"]
    intervals = result.summary["intervals_95"]
    assert intervals["sums/accuracy"] == pytest.approx([0.0, 0.5615], abs=1e-4)  # n = 3
    assert intervals["accuracy"] == pytest.approx([0.0, 0.4899], abs=1e-4)  # n = 4
    assert set(intervals) == {"reward", "pass@1", "avg@2", "maj@2", "accuracy", "sums/accuracy"}
    recorded = replace(result, rows=json.loads(json.dumps(result.rows)))
    assert recorded.summary == result.summary


class Scripted:
    """A sampler whose k-th sample is the token k."""

    async def generate(self, request):
        return tuple(
            Completion((place,), (0.0,), "stop", seed, 0, "f")
            for place, seed in enumerate(request.seeds)
        )


async def test_the_vote_on_a_task_counts_answers_however_they_were_found():
    """Two right answers of three, none of whose texts are alike."""
    said = ["<think>2 and 2</think><answer>4</answer>", "<answer> 4.0 </answer>", r"\boxed{5}"]
    task, config = load_task("math"), View({"task": {}})
    scorer = InProcessScorer(task.rubric(config, None), lambda *_: {})
    one = Example(0, "2+2?", {"answer": "4"})
    held = held_out_set(
        samples=3, prompts=1, has_metrics=False, rollouts=Single(lambda ids: said[ids[0]])
    )
    held = replace(held, prompts=replace(held.prompts, examples=(one,)))
    result = await answers(held, Scripted(), scorer)
    await scorer.close()
    assert [row["answer"] for row in result.rows] == ["4", "4", "5"]
    assert (result.metrics["maj@3"], result.metrics["avg@3"]) == (1.0, pytest.approx(2 / 3))


async def test_before_and_after_are_compared_prompt_by_prompt():
    good = FakeSampler()
    good.table[1] = 6.0
    before = await answers(held_out_set(), scorer=CountingScorer({(0, 0), (0, 1)}))
    after = await answers(held_out_set(), good)
    found = compare_before_after(before, after)
    assert found["prompts"] == 2, "those that both have"
    assert found["rises"]
    wanted = sum(after.rewards[key] - before.rewards[key] for key in (11, 12)) / 2
    assert found["change"]["value"] == pytest.approx(wanted)
    assert not compare_before_after(after, after)["rises"]
    assert found["after"].keys() == after.metrics.keys()
    assert found["after"]["reward"].keys() == {"value", "low", "high"}
    lengths = {"value": after.metrics["completions/mean_length"]}
    assert found["after"]["completions/mean_length"] == lengths


class UnmeasuredScorer(CountingScorer):
    """Scores, but the task's own metrics fail."""

    async def compute_metrics(self, prompts, completions, rows):
        raise RewardWorkerError("compute_metrics raised ValueError")


async def test_where_the_tasks_own_metrics_fail_all_else_stands():
    told: list[RewardWorkerError] = []
    result = await answers(held_out_set(), scorer=UnmeasuredScorer(), on_metrics_failed=told.append)
    whole = await answers(held_out_set())
    assert [str(error) for error in told] == ["compute_metrics raised ValueError"]
    assert result.rows == whole.rows
    assert set(whole.metrics) - set(result.metrics) == {"accuracy"}
    assert result.details == {}
    with pytest.raises(RewardWorkerError, match="raised ValueError"):
        await answers(held_out_set(), scorer=UnmeasuredScorer())
