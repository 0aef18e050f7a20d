"""The calls of a step to the learner, update by update:

1. groups without signal have no rows, unless there is a penalty or a bonus, and stay in the denominators;
2. each update is divided by the groups that it takes;
3. reference and proximal log-probabilities are those of the start of the step, for every update of it;
4. a step in which nothing teaches asks nothing of the learner;
5. a row knows the other rows of its rollout: their weights as of the start of the step, their ratios as of each update;
6. what the first pass over a group found is noted beside its tokens; nobody asks for it where tokens are not kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from groupwise.algorithms.registry import make
from groupwise.core.types import (
    Example,
    Group,
    LossSpec,
    OptimiserParams,
    Rollout,
    Row,
    SamplingParams,
    Segment,
    UpdateResult,
)
from groupwise.engine.learner.config import TrainingConfig
from groupwise.training.loops.learning import LearnResult, learn, with_learner_results
from groupwise.training.loops.metrics import Timings

MAX_TOKENS = 10
"""Most tokens of a completion."""


class Recorder:
    """A learner whose log-probabilities tell how many updates it has made."""

    def __init__(self, *, tells: bool) -> None:
        self.tells = tells
        self.asked = 0
        """How often somebody wanted to know what a pass had found."""
        self.calls: list[str] = []
        self.rows: list[list[Row]] = []
        self.denominators: list[dict[str, float]] = []
        self.updates = 0

    async def forward_backward(
        self, rows: Sequence[Row], loss: LossSpec, denominators: Mapping[str, float]
    ) -> dict[str, float]:
        self.calls.append("gradient")
        self.rows.append(list(rows))
        self.denominators.append(dict(denominators))
        return {"tokens": 1.0, **{f"loss/{name}": 0.0 for name in denominators}}

    async def trained_logprobs(self) -> list[tuple[float, ...]] | None:
        self.asked += 1
        if not self.tells:
            return None
        return [(-1.0 - self.updates,) * len(row.completion_ids) for row in self.rows[-1]]

    async def update(self, params: OptimiserParams) -> UpdateResult:
        self.calls.append("update")
        self.updates += 1
        return UpdateResult(1.0, applied=True)

    async def logprobs(self, rows: Sequence[Row], role: str = "policy") -> list[tuple[float, ...]]:
        self.calls.append(role)
        return [(-1.0 - self.updates,) * len(row.completion_ids) for row in rows]


def group(draw: int, *rewards: float | None, tokens: int = 2) -> Group:
    """Rewards of its members, None for one that failed."""
    params = SamplingParams(MAX_TOKENS)
    segment = Segment("policy", tuple(range(tokens)), (-1.0,) * tokens, params=params)
    rollouts = tuple(
        Rollout(draw, member, 0, (1,), (segment,), "", "failed", "it raised")
        if reward is None
        else Rollout(draw, member, 0, (1,), (segment,), "", "scored", reward=reward)
        for member, reward in enumerate(rewards)
    )
    return Group(draw, Example(draw, "p"), rollouts)


def learnt(
    groups: Sequence[Group],
    name: str,
    knobs: dict[str, Any] | None = None,
    *,
    keep_tokens: bool = True,
    tells: bool = True,
    **training: Any,
) -> tuple[Recorder, LearnResult]:
    learner, algorithm = Recorder(tells=tells), make(name, knobs or {})

    async def allow(work: Coroutine[Any, Any, Any]) -> Any:
        return await work

    run: Any = SimpleNamespace(
        algorithm=algorithm,
        learner=learner,
        config=SimpleNamespace(
            training=TrainingConfig(prompts_per_step=len(groups), **training),
            run=SimpleNamespace(keep_tokens=keep_tokens),
        ),
        progress=SimpleNamespace(phase=lambda *_: None),
        interruption=SimpleNamespace(allow=allow),
        longest_completion=MAX_TOKENS,
        timings=Timings(),
        non_finite=0,
        non_finite_limit=3,
        step=0,
    )
    return learner, asyncio.run(learn(run, groups, algorithm.credits(groups), 0.1))


STEP = [group(0, 0.0, 1.0), group(1, 0.35, 0.35, tokens=5), group(2, 1.0, 3.0, None, tokens=3)]
"""One with a spread of 1, one that agrees, one with a failed member."""

WHOLE = {
    "grpo": 6.0, "dr_grpo": 6.0 * MAX_TOKENS, "gspo": 6.0, "rloo": 6.0, "dapo": 20.0, "cispo": 20.0,
}  # fmt: skip
"""By scored rollouts, by their greatest length, or by their tokens: those that agree count, the failed one does not."""


@pytest.mark.parametrize("name", WHOLE)
def test_groups_without_signal_cost_nothing_and_stay_in_the_denominator(name):
    learner, learned = learnt(STEP, name)
    (rows,) = learner.rows
    assert [len(row.completion_ids) for row in rows] == [2, 2, 3, 3]
    assert learner.denominators == [{"policy": WHOLE[name]}]
    assert learned.changed


@pytest.mark.parametrize(
    ("knobs", "component"), [({"beta": 0.1}, "kl"), ({"entropy_coef": 0.1}, "entropy")]
)
def test_with_a_penalty_or_a_bonus_they_are_computed(knobs, component):
    learner, _ = learnt(STEP, "grpo", knobs)
    assert [len(row.completion_ids) for row in learner.rows[0]] == [2, 2, 5, 5, 3, 3]
    assert learner.denominators[0] == {"policy": 6.0, component: 6.0 if component == "kl" else 20.0}


def test_every_update_is_divided_by_its_own_groups():
    groups = [*STEP, group(3, 0.0, 2.0, tokens=7)]
    learner, _ = learnt(groups, "dapo", minibatches=2, num_iterations=2)
    assert [found["policy"] for found in learner.denominators] == [14.0, 20.0] * 2
    assert [len(rows) for rows in learner.rows] == [2, 4] * 2
    assert learner.calls == ["gradient", "update"] * 4


def test_proximal_logprobs_are_those_before_the_first_update():
    learner, _ = learnt(STEP, "gspo", {"beta": 0.1}, minibatches=3, num_iterations=2)
    assert learner.calls == ["reference", "policy", *["gradient", "update"] * 6]
    for row in (row for rows in learner.rows for row in rows):
        length = len(row.completion_ids)
        assert row.proximal_logprobs == row.reference_logprobs == (-1.0,) * length
        assert row.sampling_logprobs == (-1.0,) * length


@pytest.mark.parametrize("knobs", [{"minibatches": 2}, {"num_iterations": 2}])
def test_the_only_update_of_a_step_makes_the_proximal_ones_itself(knobs):
    learner, _ = learnt(STEP, "gspo")
    assert learner.calls == ["gradient", "update"]
    assert all(row.proximal_logprobs is None for row in learner.rows[0])
    learner, _ = learnt(STEP, "gspo", **knobs)
    assert learner.calls == ["policy", *["gradient", "update"] * 2]


def test_rows_of_one_rollout_need_the_proximal_ones_of_each_other():
    learner, _ = learnt([in_two_rows(0)], "gspo")
    assert learner.calls == ["policy", "gradient", "update"]
    assert all(row.proximal_logprobs is not None for row in learner.rows[0])


def in_two_rows(draw: int) -> Group:
    """Two members, of whom the second has another row of 3 tokens after one of 2."""
    plain = group(draw, 0.0, 1.0)
    params = SamplingParams(MAX_TOKENS)
    anew = Segment("policy", (1, 2, 3), (-1.5,) * 3, params=params, prompt_ids=(1, 9))
    second = plain.rollouts[1]
    second = replace(second, segments=(*second.segments, anew))
    return replace(plain, rollouts=(plain.rollouts[0], second))


def others_of(rows: Sequence[Row]) -> list[tuple[int, float, float] | None]:
    return [
        row.others and (row.others.tokens, row.others.log_weight, row.others.log_ratio)
        for row in rows
    ]


@pytest.mark.parametrize("name", ["gspo", "rloo"])
def test_ratio_of_a_rollout_in_several_rows_follows_the_updates(name):
    """The learner gives a token −1 at first and one nat less after each update; the sampler gave −1 and −1.5."""
    learner, _ = learnt([in_two_rows(0)], name, num_iterations=3)
    assert learner.calls == [
        "policy",
        *["gradient", "update"],
        *["policy", "gradient", "update"] * 2,
    ]
    assert [others_of(rows) for rows in learner.rows] == [
        [None, (3, 1.5, -3.0 * updates), (2, 0.0, -2.0 * updates)] for updates in range(3)
    ]


def test_ratio_to_the_sampler_is_asked_for_from_the_first_update_on():
    knobs = {"importance_sampling_correction": "none"}
    learner, _ = learnt([in_two_rows(0)], "gspo", knobs, num_iterations=2)
    assert learner.calls == ["policy", "gradient", "update"] * 2
    assert [others_of(rows) for rows in learner.rows] == [
        [None, (3, 0.0, 1.5 - 3 * updates), (2, 0.0, -2.0 * updates)] for updates in range(2)
    ]


def test_other_rows_cost_nothing_where_each_token_has_its_own_ratio():
    knobs = {"importance_sampling_correction": "sequence_mask"}
    learner, _ = learnt([in_two_rows(0)], "grpo", knobs, num_iterations=2)
    assert learner.calls == ["policy", *["gradient", "update"] * 2]
    assert others_of(learner.rows[1]) == [None, (3, 1.5, 0.0), (2, 0.0, 0.0)]


def noted_logprobs(groups: Sequence[Group], learned: LearnResult, name: str) -> list[list[Any]]:
    """What is noted of the segments of each group."""
    weights = make(name, {}).credits(groups)
    return [
        [each.learner_logprobs for rollout in group.rollouts for each in rollout.segments]
        for group in with_learner_results(groups, weights, learned)
    ]


def test_log_probabilities_of_the_first_pass_are_recorded():
    """The second update of the step is by other weights; both groups of it are passed twice."""
    groups = [*STEP, in_two_rows(3)]
    learner, learned = learnt(groups, "grpo", minibatches=2, num_iterations=3)
    assert learner.calls == ["gradient", "update"] * 6
    assert learner.asked == 2
    assert noted_logprobs(groups, learned, "grpo") == [
        [(-1.0, -1.0)] * 2, [None] * 2, [*[(-2.0,) * 3] * 2, None], [(-2.0, -2.0), (-2.0, -2.0), (-2.0,) * 3],
    ]  # fmt: skip
