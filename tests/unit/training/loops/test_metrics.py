"""The numbers of a step, against a step small enough to do by hand."""

import math
from dataclasses import replace

import pytest

from groupwise.core.types import Example, FinishReason, Group, Outcome, RewardPart, Rollout, Segment
from groupwise.training.loops.metrics import (
    group_metrics,
    loss_metrics,
)


def rollout(
    member: int,
    length: int,
    reward: float | None = None,
    outcome: Outcome = "scored",
    reason: str | None = None,
    parts: tuple[RewardPart, ...] = (),
    finish: FinishReason = "stop",
) -> Rollout:
    segment = Segment("policy", tuple(range(length)), (0.0,) * length, finish_reason=finish)
    return Rollout(0, member, 0, (1,), (segment,), "", outcome, reason, reward, parts)


def group(*rollouts, **metrics):
    return Group(0, Example(0, "p"), rollouts, metrics)


def parts(**values):
    return tuple(RewardPart(name, value) for name, value in values.items())


STEP = [
    group(
        rollout(0, 2, 1.0, parts=parts(right=1.0, style=0.5)),
        rollout(1, 4, 3.0, parts=parts(right=3.0, style=None), finish="length"),
        rollout(2, 9, None, "failed", "reward `right` raised KeyError"),
        share=0.2,
    ),
    group(
        rollout(0, 1, 5.0, parts=parts(right=5.0)),
        rollout(1, 1, 5.0, parts=parts(right=5.0)),
        share=0.6,
        only_here=7.0,
    ),
    group(rollout(0, 3, None, "timed_out", "30 s"), rollout(1, 3, None, "timed_out", "30 s")),
]


def test_rewards_are_of_scored_members_only():
    found = group_metrics(STEP)
    assert found["reward"] == pytest.approx(14 / 4)
    assert found["reward_std"] == pytest.approx((math.sqrt(2) + 0) / 2)
    assert found["frac_reward_zero_std"] == 0.5
    assert found["rewards/right/mean"] == pytest.approx(14 / 4)
    assert found["rewards/right/std"] == pytest.approx(math.sqrt(11 / 3))
    assert found["rewards/style/mean"] == 0.5, "None does not count as 0"
    assert found["rewards/style/std"] == 0.0


def test_groups_of_one_have_no_spread():
    found = group_metrics([group(rollout(0, 1, 1.0)), group(rollout(0, 1, 3.0))])
    assert found["reward"] == 2.0
    assert {"reward_std", "frac_reward_zero_std"}.isdisjoint(found)


def test_outcomes_and_lengths_are_of_all():
    found = group_metrics(STEP)
    assert (found["rollouts/scored"], found["rollouts/failed"]) == (4, 1)
    assert found["rollouts/timed_out"] == 2
    assert found["completions/mean_length"] == pytest.approx(23 / 7)
    assert (found["completions/min_length"], found["completions/max_length"]) == (1, 9)
    assert found["completions/clipped_ratio"] == pytest.approx(1 / 7)
    assert found["share"] == pytest.approx(0.4), "what tasks log, over the groups that have it"
    assert found["only_here"] == 7.0


def test_tokens_of_the_environment_do_not_count_in_completion_lengths():
    written = Segment("policy", (1, 2), (0.0, 0.0), finish_reason="stop")
    said = [written, Segment("environment", (3,) * 10), written]
    found = group_metrics([group(replace(rollout(0, 1, 1.0), segments=tuple(said)))])
    assert (found["completions/mean_length"], found["completions/max_length"]) == (4, 4)
    assert found["rollouts/mean_length"] == 14
    assert "rollouts/mean_length" not in group_metrics(STEP)


@pytest.mark.parametrize("reward", [0.1 + 0.2, 0.3])
def test_rewards_that_are_the_same_up_to_rounding_have_no_spread(reward):
    found = group_metrics([group(rollout(0, 1, reward), rollout(1, 1, 0.1 + 0.2))])
    assert found["frac_reward_zero_std"] == 1.0
    assert found["reward_std"] == pytest.approx(0.0)


def test_the_loss_is_divided_and_statistics_are_means_over_tokens():
    sums = {
        "loss/policy": -6.0, "loss/kl": 1.0, "tokens": 8.0, "ratio": 8.4, "logprob_gap": 0.4,
        "clip_low": 1.0, "clip_high": 2.0, "kl": 4.0, "entropy": 16.0,
    }  # fmt: skip
    assert loss_metrics([(sums, {"policy": 12.0, "kl": 4.0})]) == pytest.approx(
        {
            "loss": -0.25, "kl": 0.5, "entropy": 2.0, "sampling/ratio_mean": 1.05, "sampling/logprob_gap": 0.05,
            "clip_ratio/low_mean": 0.125, "clip_ratio/high_mean": 0.25, "clip_ratio/region_mean": 0.375,
        }
    )  # fmt: skip


def test_several_updates_give_their_mean_loss_and_means_over_all_their_tokens():
    first = ({"loss/policy": -4.0, "tokens": 2.0, "ratio": 2.0}, {"policy": 4.0})
    second = ({"loss/policy": -6.0, "tokens": 6.0, "ratio": 9.0}, {"policy": 2.0})
    found = loss_metrics([first, second])
    assert found["loss"] == -2.0
    assert found["sampling/ratio_mean"] == 11 / 8


def test_rewards_that_are_the_same_up_to_addition_have_no_spread():
    found = group_metrics([group(rollout(0, 1, 0.1 + 0.2), rollout(1, 1, 0.1 + 0.2))])
    assert found["frac_reward_zero_std"] == 1.0
    assert found["reward_std"] == 0.0


def test_spread_is_that_of_training():
    found = group_metrics([group(rollout(0, 1, 0.3), rollout(1, 1, 0.1 + 0.2))])
    assert found["frac_reward_zero_std"] == 1.0
