"""The contract of advantages and of the shared tensor maths.

1. Rewards that are the same, up to rounding, give exactly 0; so does a group of one.
2. A tiny spread does not explode.
3. The standard deviation is that of a sample, with 1e-4 added (as TRL has it).
4. The order of members changes nothing, not even the last bit; a shift of all rewards changes nothing but rounding.
5. Members that failed are as if they had never been there.
6. k3 has the mean of the KL divergence and the gradient of the reversed one.
7. Nothing outside the mask, and no extreme ratio, makes a value or a gradient that is not finite.
"""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from groupwise.algorithms import ops

REWARDS = st.lists(st.floats(-20, 20), min_size=2, max_size=12)


@pytest.mark.parametrize("divide_by_std", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 16])
@pytest.mark.parametrize("reward", [0.0, 0.35, 0.1 + 0.2, 1 / 3, -7.7, 1e300, 1e-300])
def test_identical_rewards_give_exactly_zero(reward: float, size: int, divide_by_std: bool) -> None:
    assert ops.advantages([reward] * size, divide_by_std=divide_by_std) == [0.0] * size


@pytest.mark.parametrize(
    "rewards",
    [
        [0.1 + 0.2, 0.3],
        [0.1 + 0.7 + 0.2, 0.2 + 0.7 + 0.1, 1.0],
        [float(np.float32(0.35)), 0.35],
        [0.1 + 0.2 - 0.3, 0.0],
        [1234.5678, float(np.float32(1234.5678))],
    ],
)
def test_rewards_that_differ_by_rounding_are_the_same(rewards: list[float]) -> None:
    assert ops.advantages(rewards, divide_by_std=True) == [0.0] * len(rewards)


@pytest.mark.parametrize(
    ("rewards", "same"),
    [
        ([0.0, 1e-6], True),
        ([0.0, 1.1e-6], False),
        ([-0.5, -0.5 + 1.1e-6], False),
        ([1e6, 1e6 + 0.9], True),
        ([1e6, 1e6 + 1.1], False),
        ([-1e6, 1e6], False),
    ],
)
def test_tolerance_is_a_millionth_of_the_larger_of_size_and_one(
    rewards: list[float], same: bool
) -> None:
    assert ops.tied(rewards) is same


def test_no_rewards_no_advantages() -> None:
    assert ops.advantages([], divide_by_std=True) == []


@given(spread=st.floats(2e-6, 1e-4), size=st.integers(2, 16), base=st.floats(-1, 1))
def test_tiny_spreads_do_not_explode(spread: float, size: int, base: float) -> None:
    rewards = [base] * (size - 1) + [base + spread]
    standardised = ops.advantages(rewards, divide_by_std=True)
    assert max(map(abs, standardised)) < spread / ops.STD_EPSILON


def test_closed_form_of_four_members() -> None:
    rewards = [0.0, 0.0, 0.0, 1.0]  # mean 1/4, sample variance (3/16 + 9/16) / 3 = 1/4
    assert ops.advantages(rewards, divide_by_std=False) == [-0.25, -0.25, -0.25, 0.75]
    low, high = -0.25 / 0.5001, 0.75 / 0.5001
    assert ops.advantages(rewards, divide_by_std=True) == pytest.approx([low, low, low, high])


@given(REWARDS)
def test_vector_form_agrees(rewards: list[float]) -> None:
    assume(max(rewards) - min(rewards) > 1e-4)
    rewards_G = np.array(rewards)
    centred_G = rewards_G - rewards_G.mean()
    scaled_G = centred_G / (rewards_G.std(ddof=1) + 1e-4)
    assert ops.advantages(rewards, divide_by_std=False) == pytest.approx(centred_G, abs=1e-12)
    assert ops.advantages(rewards, divide_by_std=True) == pytest.approx(scaled_G, abs=1e-9)


@given(REWARDS)
def test_standardised_advantages_are_bounded_by_the_size_of_the_group(rewards: list[float]) -> None:
    bound = (len(rewards) - 1) / math.sqrt(len(rewards))
    assert max(map(abs, ops.advantages(rewards, divide_by_std=True))) < bound


@given(st.data(), st.booleans())
def test_order_of_members_does_not_change_a_bit(data: st.DataObject, divide_by_std: bool) -> None:
    rewards = data.draw(REWARDS)
    order = data.draw(st.permutations(range(len(rewards))))
    straight = ops.advantages(rewards, divide_by_std=divide_by_std)
    shuffled = ops.advantages([rewards[i] for i in order], divide_by_std=divide_by_std)
    assert shuffled == [straight[i] for i in order]


@given(REWARDS, st.floats(-100, 100), st.booleans())
def test_shift_of_all_rewards_changes_nothing(
    rewards: list[float], shift: float, divide_by_std: bool
) -> None:
    assume(max(rewards) - min(rewards) > 1e-3)
    shifted = [reward + shift for reward in rewards]
    expected = ops.advantages(rewards, divide_by_std=divide_by_std)
    assert ops.advantages(shifted, divide_by_std=divide_by_std) == pytest.approx(expected, abs=1e-8)


@given(REWARDS, st.floats(0.5, 50))
def test_factor_carries_over_unless_the_spread_is_divided_out(
    rewards: list[float], factor: float
) -> None:
    assume(max(rewards) - min(rewards) > 1.0)
    larger = [reward * factor for reward in rewards]
    centred = ops.advantages(rewards, divide_by_std=False)
    assert ops.advantages(larger, divide_by_std=False) == pytest.approx(
        [factor * advantage for advantage in centred], abs=1e-9
    )
    assert ops.advantages(larger, divide_by_std=True) == pytest.approx(
        ops.advantages(rewards, divide_by_std=True), rel=2e-3, abs=1e-9
    )


@given(REWARDS, st.booleans())
def test_advantages_sum_to_zero(rewards: list[float], divide_by_std: bool) -> None:
    assert math.fsum(ops.advantages(rewards, divide_by_std=divide_by_std)) == pytest.approx(
        0, abs=1e-9
    )


@pytest.mark.parametrize("divide_by_std", [False, True])
def test_rewards_as_large_as_floats_get_are_no_crash(divide_by_std: bool) -> None:
    worst = -sys.float_info.max
    found = ops.advantages([worst, worst, worst, 1.0], divide_by_std=divide_by_std)
    assert all(map(math.isfinite, found))


def test_members_that_are_not_scored_count_nowhere(rollout, group) -> None:
    alone = ops.group_advantages(group(0.0, 0.5, 1.0), divide_by_std=True)
    late = rollout(4, 9.0, outcome="timed_out")
    unknown = rollout(5, None, outcome="pending")
    mixed = group(None, 0.0, 0.5, None, late, unknown, 1.0)
    found = ops.group_advantages(mixed, divide_by_std=True)
    assert found == (None, alone[0], alone[1], None, None, None, alone[2])
    assert ops.scored_members([mixed, group(None), group(1.0)]) == 4


def test_single_scored_member_learns_nothing(group) -> None:
    assert ops.group_advantages(group(None, 5.0, None), divide_by_std=True) == (None, 0.0, None)


@pytest.mark.parametrize("reward", [None, math.nan, math.inf])
def test_scored_member_without_a_finite_reward_is_a_broken_invariant(
    rollout, group, reward
) -> None:
    broken = group(1.0, rollout(1, reward, outcome="scored"))
    with pytest.raises(AssertionError, match="draw 0, member 1 is scored"):
        ops.group_advantages(broken, divide_by_std=False)


def test_only_what_the_policy_wrote_is_trained(rollout) -> None:
    assert ops.trained_tokens(rollout(0, 1.0, tokens=4, observed=9)) == 4


VOCABULARY = 5


def _distributions() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits with gradient, and reference log-probabilities, over five tokens."""
    logits_V = torch.tensor([0.3, -1.2, 0.8, 0.0, 1.5], dtype=torch.float64, requires_grad=True)
    reference_V = torch.tensor([0.5, 0.4, -0.9, 0.2, 0.7], dtype=torch.float64).log_softmax(0)
    return logits_V, reference_V


def _k3_under_the_policy(policy_V: torch.Tensor, reference_V: torch.Tensor) -> torch.Tensor:
    """The expectation over tokens that the policy samples: weights carry no gradient."""
    kl_1V = ops.k3(policy_V[None], reference_V[None], torch.ones(1, VOCABULARY))
    return (policy_V.detach().exp() * kl_1V[0]).sum()


def test_mean_of_k3_is_the_divergence_from_the_reference() -> None:
    logits_V, reference_V = _distributions()
    policy_V = logits_V.log_softmax(0)
    exact = (policy_V.exp() * (policy_V - reference_V)).sum()
    assert _k3_under_the_policy(policy_V, reference_V).item() == pytest.approx(exact.item())


def test_gradient_of_k3_is_that_of_the_divergence_of_the_reference() -> None:
    logits_V, reference_V = _distributions()
    _k3_under_the_policy(logits_V.log_softmax(0), reference_V).backward()
    found, logits_V.grad = logits_V.grad, None
    (reference_V.exp() * (reference_V - logits_V.log_softmax(0))).sum().backward()
    assert found is not None
    torch.testing.assert_close(found, logits_V.grad)


def test_k3_by_hand() -> None:
    half, one = torch.tensor([[math.log(0.5), -1.0]]), torch.tensor([[0.0, -1.0]])
    found = ops.k3(half, one, torch.ones(1, 2))
    torch.testing.assert_close(found, torch.tensor([[2 - math.log(2) - 1, 0.0]]))


@given(st.lists(st.floats(-1000, 0), min_size=2, max_size=2))
def test_k3_is_never_negative_and_always_finite(logprobs: list[float]) -> None:
    policy = torch.tensor([[logprobs[0]]], requires_grad=True)
    kl = ops.k3(policy, torch.tensor([[logprobs[1]]]), torch.ones(1, 1))
    (gradient,) = torch.autograd.grad(kl.sum(), policy)
    assert kl.item() >= 0
    assert kl.isfinite().all()
    assert gradient.isfinite().all()


def test_k3_of_policies_that_hardly_differ_keeps_its_digits() -> None:
    kl = ops.k3(torch.tensor([[-1.0]]), torch.tensor([[-1.0 + 2**-10]]), torch.ones(1, 1))
    assert kl.item() == pytest.approx(2**-21, rel=1e-3)


@pytest.mark.parametrize("log_ratio", [-1e4, -89.0, 89.0, 1e4])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_extreme_ratios_are_bounded_and_leave_no_nan_gradient(
    log_ratio: float, advantage: float
) -> None:
    log_ratio_BT = torch.tensor([[log_ratio]], requires_grad=True)
    ratio_BT = ops.bounded(log_ratio_BT).exp()
    ops.clipped_surrogate(ratio_BT, torch.tensor([advantage]), 0.8, 1.2).sum().backward()
    assert ratio_BT.isfinite().all()
    assert log_ratio_BT.grad is not None
    assert log_ratio_BT.grad.item() == 0.0


def test_ratios_within_the_bound_are_untouched() -> None:
    log_ratio_BT = torch.tensor([[-19.9, 0.0, 19.9]])
    assert torch.equal(ops.bounded(log_ratio_BT), log_ratio_BT)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_masked_difference_hides_garbage_from_value_and_gradient(garbage: float) -> None:
    left = torch.tensor([[1.0, garbage]], requires_grad=True)
    right = torch.tensor([[3.0, garbage]])
    difference = ops.masked_difference(left, right, torch.tensor([[1, 0]]))
    difference.exp().sum().backward()
    assert difference.tolist() == [[-2.0, 0.0]]
    assert left.grad is not None
    assert left.grad.tolist() == [[pytest.approx(math.exp(-2)), 0.0]]
