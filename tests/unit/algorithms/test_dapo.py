"""Closed forms of DAPO: mean over the tokens of the step, wider clip above, over-long shaping, dynamic sampling."""

from __future__ import annotations

import pytest

from groupwise.algorithms.dapo import Dapo
from groupwise.core.types import RewardPart


def test_masked_members_are_in_no_sum_of_tokens(rollout, group) -> None:
    cut = group(rollout(0, 0.0, tokens=5, truncated=True), rollout(1, 1.0, tokens=3))
    assert Dapo().denominators([cut], 8) == {"policy": 8.0}
    assert Dapo(mask_truncated_completions=True).denominators([cut], 8) == {"policy": 3.0}


@pytest.mark.parametrize(
    ("tokens", "punishment"), [(1, 0.0), (16, 0.0), (17, -0.25), (18, -0.5), (20, -1.0), (21, -1.0)]
)
def test_rewards_sink_over_the_last_fifth(rollout, group, tokens: int, punishment: float) -> None:
    (shaped,) = Dapo().shaped(group(rollout(0, 2.0, tokens=tokens)), 20).rollouts
    assert shaped.reward == 2.0 + punishment
    assert shaped.parts == (RewardPart("overlong", punishment, 1.0),)


def test_cache_and_factor_are_knobs_and_only_the_policy_is_counted(rollout, group) -> None:
    algorithm = Dapo(soft_punish_cache=10, soft_punish_factor=0.5)
    talk = group(rollout(0, 1.0, tokens=15, observed=50), rollout(1, None, tokens=20))
    shaped, failed = algorithm.shaped(talk, 20).rollouts
    assert shaped.reward == 1.0 - 0.5 * 0.5
    assert shaped.parts == (RewardPart("overlong", -0.5, 0.5),)
    assert failed == talk.rollouts[1]


def test_groups_that_differ_in_length_only_are_redrawn(rollout, group) -> None:
    algorithm = Dapo()
    solved = algorithm.shaped(group(rollout(0, 1.0, tokens=3), rollout(1, 1.0, tokens=19)), 20)
    assert solved.rollouts[0].reward != solved.rollouts[1].reward
    assert algorithm.resample_rounds == 10
    assert not algorithm.accepts(solved)
    hidden = algorithm.shaped(group(rollout(0, 0.25), rollout(1, 1.0, tokens=19)), 20)
    assert hidden.rollouts[0].reward == hidden.rollouts[1].reward
    assert algorithm.accepts(hidden)
