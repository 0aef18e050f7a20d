"""Sampler and learner that work, and doubles with one fault each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from groupwise.core.findings import Finding
from groupwise.core.types import Example, Group, SamplingParams, UpdateResult
from groupwise.testing import END_ID, FakeLearner, FakeSampler, FakeTokenizer
from groupwise.training.checks.doctor_engine import (
    Engine,
    check_gap,
    check_invariance,
    check_publication,
    judge_gap,
    judge_masks,
    judge_slopes,
    publish,
    rows_of,
)
from groupwise.training.loops.recording import MAX_GAP

QUESTIONS = ("ask a", "ask b", "ask c")


def engine(folder: Path, sampler: Any = None, learner: Any = None, **changes: Any) -> Engine:
    tokenizer = FakeTokenizer()
    made = Engine(
        sampler=sampler or FakeSampler(),
        learner=learner or FakeLearner("doctor", folder),
        tokenizer=tokenizer,
        params=SamplingParams(12, 1.0, stop_token_ids=(END_ID,)),
        examples=tuple(Example(place, text) for place, text in enumerate(QUESTIONS)),
        prompts=tuple(tuple(tokenizer(text)["input_ids"]) for text in QUESTIONS),
        dtype="float32",
    )
    return replace(made, **changes)


def peaked(table: list[float]) -> list[float]:
    """Logits that differ, so that another temperature is another policy."""
    return [2.0 if place % 3 else 0.0 for place in range(len(table))]


async def looked_at(made: Engine) -> dict[str, Finding]:
    """Everything that the doctor looks at, in its order."""
    published = await publish(made, 0)
    groups = await made.sample()
    rows = rows_of(groups)
    found = [
        judge_masks(groups, rows, (END_ID,)),
        await check_gap(made, rows, "gap"),
        await check_invariance(made, groups),
        *await check_publication(made, published, groups),
    ]
    return {finding.name: finding for finding in found}


async def test_a_sampler_and_a_learner_that_belong_together_are_well(tmp_path: Path):
    found = await looked_at(engine(tmp_path))
    names = {"masks", "gap", "batch invariance", "weight publication", "gap after an update"}
    assert {name: each.level for name, each in found.items()} == dict.fromkeys(names, "ok")
    assert found["masks"].data["stopped"] > 0


class Stale(FakeSampler):
    """Says that it has loaded the weights, and goes on with the old ones."""

    named = ""

    async def load(self, policy):
        self.named, self.version = policy.fingerprint, policy.version

    def fingerprint(self):
        return self.named


class Idle(FakeSampler):
    """Does not load anything."""

    async def load(self, policy):
        pass


class Frozen(FakeLearner):
    """Updates nothing."""

    async def update(self, params):
        self.discard()
        return UpdateResult(0.0, True)


@pytest.mark.parametrize(("sampler", "learner", "said"), [
    (Stale, FakeLearner, "outputs are those of the old weights"),
    (Idle, FakeLearner, "was published, the sampler serves"), (FakeSampler, Frozen, "did nothing"),
])  # fmt: skip
async def test_weights_that_are_not_published_are_a_problem(sampler, learner, said, tmp_path: Path):
    made = engine(tmp_path, sampler(), learner("doctor", tmp_path))
    found = (await looked_at(made))["weight publication"]
    assert (found.level, said in found.measured) == ("problem", True)


class Colder(FakeLearner):
    """Computes log-probabilities at another temperature than was sampled at."""

    async def logprobs(self, rows, role="policy"):
        return await super().logprobs([replace(row, temperature=2.0) for row in rows], role)


async def test_a_learner_with_another_temperature_is_found_by_the_gap(tmp_path: Path):
    for kind, level in ((Colder, "problem"), (FakeLearner, "ok")):
        learner = kind("doctor", tmp_path)
        learner.table = peaked(learner.table)
        said = (await looked_at(engine(tmp_path, learner=learner)))["gap"]
        assert said.level == level
        assert (said.data["mean"] > MAX_GAP) is (level == "problem")


@pytest.mark.parametrize(("gap", "dtype", "level"), [
    (0.0, "float32", "ok"), (0.002, "float32", "problem"), (0.03, "bfloat16", "ok"),
    (0.002, "tf32", "ok"), (0.09, "bfloat16", "warning"), (0.16, "bfloat16", "problem"),
    (float("nan"), "bfloat16", "problem"),
])  # fmt: skip
def test_the_accepted_gap_depends_on_the_number_format(gap, dtype, level):
    assert judge_gap([(-1.0, -2.0)], [(-1.0 - gap, -2.0 + gap)], dtype, "gap").level == level


async def groups_of(tmp_path: Path) -> list[Group]:
    made = engine(tmp_path)
    await publish(made, 0)
    return await made.sample()


async def test_tokens_after_the_stop_token_are_found(tmp_path: Path):
    (group, *_) = await groups_of(tmp_path)
    rollout = next(one for one in group.rollouts if one.segments[0].finish_reason == "stop")
    (segment,) = rollout.segments
    longer = replace(
        segment,
        token_ids=(*segment.token_ids, 5),
        sampling_logprobs=(*(segment.sampling_logprobs or ()), -1.0),
    )
    broken = [replace(group, rollouts=(replace(rollout, segments=(longer,)),))]
    said = judge_masks(broken, rows_of(broken), (END_ID,))
    assert (said.level, "before the end" in said.measured) == ("problem", True)


async def test_a_row_that_trains_fewer_tokens_than_were_sampled_is_found(tmp_path: Path):
    groups = await groups_of(tmp_path)
    rows = rows_of(groups)
    rows[3] = replace(rows[3], mask=(0, *rows[3].mask[1:]))
    said = judge_masks(groups, rows, (END_ID,))
    assert (said.level, said.data["wrong"]) == ("problem", 1)


class Crowded(FakeSampler):
    """Draws something else when it is asked for several groups."""

    async def generate(self, request):
        found = await super().generate(request)
        if len(self.requests) <= len(QUESTIONS):
            return found
        return tuple(replace(each, token_ids=each.token_ids[::-1]) for each in found)


class Rounding(Crowded):
    """Draws the same tokens with other last bits."""

    async def generate(self, request):
        found = await FakeSampler.generate(self, request)
        if len(self.requests) <= len(QUESTIONS):
            return found
        return tuple(
            replace(each, logprobs=tuple(value - 1e-7 for value in each.logprobs)) for each in found
        )


@pytest.mark.parametrize(("sampler", "level"), [(Crowded, "problem"), (Rounding, "warning")])
async def test_a_sampler_whose_results_depend_on_the_others_is_found(
    sampler, level, tmp_path: Path
):
    assert (await looked_at(engine(tmp_path, sampler())))["batch invariance"].level == level


def test_steps_that_rounding_swallows_are_warned_of():
    assert judge_slopes([("a", 0.99, 0.0), ("b", 1.01, 0.01)], 1e-6).level == "ok"
    said = judge_slopes([("a", 0.99, 0.01), ("b", 0.4, 0.1)], 1e-6)
    assert said.level == "warning"
    assert "40% ± 10%, b" in said.measured
    by_chance = judge_slopes([("a", 0.99, 0.01), ("b", 0.66, 0.3)], 1e-6)
    assert by_chance.level == "ok", "rounding is noisy there, and nothing says that it swallows"
    assert judge_slopes([("a", 0.7, 0.01), ("b", 0.66, 0.3)], 1e-6).level == "warning"
