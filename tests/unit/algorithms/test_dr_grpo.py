"""Closed forms of Dr. GRPO: centred advantages, sum over tokens, a constant normaliser."""

from __future__ import annotations

import math

import pytest
import torch

from groupwise.algorithms.dr_grpo import DrGrpo
from tests.unit.algorithms.closed_forms import FLAT, LENGTHS


def test_weights_and_denominators(pair, group) -> None:
    assert [
        (weight.advantage, weight.scale) for weight in DrGrpo().weights([pair])[0] if weight
    ] == [
        (0.5, 1.0),
        (-0.5, 1.0),
    ]
    assert DrGrpo().denominators([pair, group(1.0, None)], 8) == {"policy": 24.0}
    assert DrGrpo(beta=0.1, kl_gradient="estimator").denominators([pair], 8) == {
        "policy": 16.0,
        "kl": 16.0,
    }


def test_on_policy_loss_and_gradient(pair, weighted, total) -> None:
    algorithm = DrGrpo()
    rows = weighted(algorithm.weights([pair])[0], FLAT, mask=LENGTHS)
    loss = total(algorithm, rows, algorithm.denominators([pair], 8))
    loss.backward()
    assert loss.item() == -(2 * 0.5 - 4 * 0.5) / (2 * 8)
    each = 0.5 / 16
    expected = torch.tensor([[-each, -each, 0, 0], [each] * 4], dtype=torch.float64)
    torch.testing.assert_close(rows.policy_logprobs_BT.grad, expected)


def test_on_policy_loss_of_equal_lengths_is_zero(pair, weighted, total) -> None:
    algorithm = DrGrpo()
    rows = weighted(algorithm.weights([pair])[0], FLAT)
    assert total(algorithm, rows, algorithm.denominators([pair], 4)).item() == 0


def test_off_policy_loss_with_penalty(pair, weighted, total) -> None:
    algorithm = DrGrpo(beta=0.1, epsilon_high=0.5, kl_gradient="estimator")
    ratios = [[1.1, 1.6, 1.0, 1.0], [0.9, 0.7, 1.0, 1.3]]
    rows = weighted(
        algorithm.weights([pair])[0],
        [[math.log(ratio) - 1 for ratio in row] for row in ratios],
        sampling=FLAT,
        mask=LENGTHS,
        reference=[[math.log(2 * ratio) - 1 for ratio in row] for row in ratios],
    )
    loss = total(algorithm, rows, algorithm.denominators([pair], 8))
    good = 0.5 * (1.1 + 1.5)  # 1.6 is clipped
    bad = -0.5 * (0.9 + 0.8 + 1.0 + 1.3)  # 0.7 is clipped
    penalty = 0.1 * 6 * (2 - math.log(2) - 1)
    assert loss.item() == pytest.approx((-(good + bad) + penalty) / 16)


def test_masked_truncated_members_still_count_in_the_normaliser(rollout, group) -> None:
    cut = group(rollout(0, 0.0, truncated=True), 1.0)
    algorithm = DrGrpo(mask_truncated_completions=True)
    weights = algorithm.weights([cut])[0]
    assert weights[0] is None
    assert weights[1] is not None
    assert weights[1].advantage == 0.5
    assert algorithm.denominators([cut], 10) == {"policy": 20.0}
