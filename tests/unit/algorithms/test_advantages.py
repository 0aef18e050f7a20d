"""The contract of advantages.

1. Rewards that are the same, up to rounding, give exactly 0; so does a group of one.
2. A tiny spread does not explode.
3. The standard deviation is that of a sample, with 1e-4 added (as TRL has it).
4. The order of members changes nothing, not even the last bit; a shift of all rewards changes nothing but rounding.
5. Members that failed are as if they had never been there.
6. Groups keep their identity: what a group gets does not depend on its place in the step, or (but for the scale of a batch) on the others.
"""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from groupwise.algorithms import advantages
from groupwise.algorithms.registry import ALGORITHMS, make
from groupwise.core.types import Group

REWARDS = st.lists(st.floats(-20, 20), min_size=2, max_size=12)


def _advantages(rewards: list[float], *, divide_by_std: bool) -> list[float]:
    differences = advantages.centred(rewards)
    if not divide_by_std:
        return differences
    return advantages.scaled(differences, advantages.deviation(differences))


def _of_group(group: Group, *, divide_by_std: bool) -> tuple[float | None, ...]:
    (found,) = advantages.group_relative([group], "group" if divide_by_std else "none")
    return found


@pytest.mark.parametrize("divide_by_std", [False, True])
def test_identical_rewards_give_exactly_zero(divide_by_std: bool) -> None:
    for size in (0, 1, 2, 3, 7, 8, 16):
        for reward in (0.0, 0.35, 0.1 + 0.2, 1 / 3, -7.7, 1e300, 1e-300):
            assert _advantages([reward] * size, divide_by_std=divide_by_std) == [0.0] * size


@pytest.mark.parametrize("rewards", [
    [0.1 + 0.2, 0.3], [0.1 + 0.7 + 0.2, 0.2 + 0.7 + 0.1, 1.0], [float(np.float32(0.35)), 0.35], [0.1 + 0.2 - 0.3, 0.0],
    [1234.5678, float(np.float32(1234.5678))],
])  # fmt: skip
def test_rewards_that_differ_by_rounding_are_the_same(rewards: list[float]) -> None:
    assert _advantages(rewards, divide_by_std=True) == [0.0] * len(rewards)


@given(spread=st.floats(2e-6, 1e-4), size=st.integers(2, 16), base=st.floats(-1, 1))
def test_tiny_spreads_do_not_explode(spread: float, size: int, base: float) -> None:
    rewards = [base] * (size - 1) + [base + spread]
    standardised = _advantages(rewards, divide_by_std=True)
    assert max(map(abs, standardised)) < spread / advantages.STD_EPSILON


def test_closed_form_of_four_members() -> None:
    rewards = [0.0, 0.0, 0.0, 1.0]  # mean 1/4, sample variance (3/16 + 9/16) / 3 = 1/4
    assert _advantages(rewards, divide_by_std=False) == [-0.25, -0.25, -0.25, 0.75]
    low, high = -0.25 / 0.5001, 0.75 / 0.5001
    assert _advantages(rewards, divide_by_std=True) == pytest.approx([low, low, low, high])


@given(REWARDS)
def test_vector_form_agrees(rewards: list[float]) -> None:
    assume(max(rewards) - min(rewards) > 1e-4)
    rewards_G = np.array(rewards)
    centred_G = rewards_G - rewards_G.mean()
    scaled_G = centred_G / (rewards_G.std(ddof=1) + 1e-4)
    assert _advantages(rewards, divide_by_std=False) == pytest.approx(centred_G, abs=1e-12)
    assert _advantages(rewards, divide_by_std=True) == pytest.approx(scaled_G, abs=1e-9)


@given(st.data(), st.booleans())
def test_order_of_members_does_not_change_a_bit(data: st.DataObject, divide_by_std: bool) -> None:
    rewards = data.draw(REWARDS)
    order = data.draw(st.permutations(range(len(rewards))))
    straight = _advantages(rewards, divide_by_std=divide_by_std)
    shuffled = _advantages([rewards[i] for i in order], divide_by_std=divide_by_std)
    assert shuffled == [straight[i] for i in order]


@given(REWARDS, st.floats(-100, 100), st.booleans())
def test_shift_of_all_rewards_changes_nothing(
    rewards: list[float], shift: float, divide_by_std: bool
) -> None:
    assume(max(rewards) - min(rewards) > 1e-3)
    shifted = [reward + shift for reward in rewards]
    expected = _advantages(rewards, divide_by_std=divide_by_std)
    assert _advantages(shifted, divide_by_std=divide_by_std) == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize("divide_by_std", [False, True])
def test_rewards_as_large_as_floats_get_are_no_crash(divide_by_std: bool) -> None:
    worst = -sys.float_info.max
    found = _advantages([worst, worst, worst, 1.0], divide_by_std=divide_by_std)
    assert all(map(math.isfinite, found))


def test_members_that_are_not_scored_count_nowhere(rollout, group) -> None:
    alone = _of_group(group(0.0, 0.5, 1.0), divide_by_std=True)
    late = rollout(4, 9.0, outcome="timed_out")
    unknown = rollout(5, None, outcome="pending")
    mixed = group(None, 0.0, 0.5, None, late, unknown, 1.0)
    found = _of_group(mixed, divide_by_std=True)
    assert found == (None, alone[0], alone[1], None, None, None, alone[2])
    assert advantages.scored_members([mixed, group(None), group(1.0)]) == 4


def test_single_scored_member_learns_nothing(group) -> None:
    assert _of_group(group(None, 5.0, None), divide_by_std=True) == (None, 0.0, None)


@pytest.mark.parametrize("reward", [None, math.nan, math.inf])
def test_scored_member_without_a_finite_reward_is_a_broken_invariant(
    rollout, group, reward
) -> None:
    broken = group(1.0, rollout(1, reward, outcome="scored"))
    with pytest.raises(AssertionError, match="draw 0, member 1"):
        _of_group(broken, divide_by_std=False)


def test_only_what_the_policy_wrote_is_trained(rollout) -> None:
    assert advantages.trained_tokens(rollout(0, 1.0, tokens=4, observed=9)) == 4


def test_batch_scale_is_the_deviation_of_all_rewards_of_the_step(group) -> None:
    groups = [group(0.0, 1.0), group(2.0, 4.0)]
    std = np.std([0.0, 1.0, 2.0, 4.0], ddof=1) + 1e-4
    found = advantages.group_relative(groups, "batch")
    assert found[0] == pytest.approx((-0.5 / std, 0.5 / std))
    assert found[1] == pytest.approx((-1 / std, 1 / std))


def test_batch_scale_leaves_a_group_that_agrees_at_zero(group) -> None:
    found = advantages.group_relative([group(0.1 + 0.2, 0.3, 0.3), group(0.0, 1.0)], "batch")
    assert found[0] == (0.0, 0.0, 0.0)
    assert advantages.group_relative([group(1.0, 1.0)], "batch") == [(0.0, 0.0)]


@given(REWARDS)
def test_leave_one_out_is_the_reward_less_the_mean_of_the_others(rewards: list[float]) -> None:
    assume(not advantages.all_equal(rewards))
    by_hand = [reward - (sum(rewards) - reward) / (len(rewards) - 1) for reward in rewards]
    assert advantages.leave_one_out(rewards) == pytest.approx(by_hand, abs=1e-9)


@pytest.mark.parametrize("rewards", [[], [3.0], [0.1 + 0.2, 0.3]])
def test_leave_one_out_without_a_difference_is_zero(rewards: list[float]) -> None:
    assert advantages.leave_one_out(rewards) == [0.0] * len(rewards)


@pytest.mark.parametrize("name", ALGORITHMS)
@settings(max_examples=30)
@given(data=st.data())
def test_groups_keep_their_identity_in_any_order(name: str, data: st.DataObject, group) -> None:
    rewards = data.draw(st.lists(REWARDS, min_size=1, max_size=5))
    order = data.draw(st.permutations(range(len(rewards))))
    groups = [group(*values) for values in rewards]
    straight = make(name, {}).credits(groups)
    shuffled = make(name, {}).credits([groups[i] for i in order])
    assert shuffled == tuple(straight[i] for i in order)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo"])
@settings(max_examples=30)
@given(data=st.data())
def test_a_group_does_not_know_the_others(name: str, data: st.DataObject, group) -> None:
    groups = [group(*values) for values in data.draw(st.lists(REWARDS, min_size=2, max_size=4))]
    algorithm = make(name, {})
    alone = tuple(algorithm.credits([each])[0] for each in groups)
    assert algorithm.credits(groups) == alone


@pytest.mark.parametrize("name", ALGORITHMS)
def test_failed_members_do_not_affect_advantages(name: str, group) -> None:
    algorithm = make(name, {})
    whole = algorithm.credits([group(0.0, 0.5, 1.0), group(1.0, 3.0)])
    holed = algorithm.credits([group(None, 0.0, 0.5, None, 1.0), group(1.0, 3.0, None)])
    assert holed == ((None, *whole[0][:2], None, whole[0][2]), (*whole[1], None))
    groups = [group(None, 0.0, 1.0), group(None)]
    assert algorithm.denominators(groups, 8) == algorithm.denominators([group(0.0, 1.0)], 8)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_step_that_agrees_has_no_signal_and_keeps_its_denominator(name: str, group) -> None:
    algorithm = make(name, {})
    groups = [group(0.35, 0.35, 0.1 + 0.25), group(0.35)]
    for weights in algorithm.credits(groups):
        assert [weight.advantage for weight in weights if weight] == [0.0] * len(weights)
        assert algorithm.teaches(weights) == algorithm.needs_teacher
    assert algorithm.denominators(groups, 8)["policy"] > 0
    assert make(name, {"beta": 0.1}).teaches(algorithm.credits(groups)[0])
    assert make(name, {"entropy_coef": 0.1}).teaches(algorithm.credits(groups)[0])
    assert algorithm.denominators([], 8) == {"policy": 0.0}
