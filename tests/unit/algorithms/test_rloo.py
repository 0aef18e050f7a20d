"""Closed forms of RLOO: leave-one-out baseline, the rollout as one action."""

from __future__ import annotations

import math

import pytest
import torch

from groupwise.algorithms.rloo import Rloo
from tests.unit.algorithms.closed_forms import FLAT, LENGTHS


def test_baseline_is_the_mean_of_the_others(group) -> None:
    weights = Rloo().weights([group(1.0, None, 0.0, 5.0)])[0]
    assert [weight and weight.advantage for weight in weights] == [
        pytest.approx(1 - 2.5),
        None,
        pytest.approx(0 - 3),
        pytest.approx(5 - 0.5),
    ]
    assert [weight.scale for weight in weights if weight] == [1.0, 1.0, 1.0]


def test_denominators(pair, group) -> None:
    assert Rloo(beta=0.1).denominators([pair, group(1.0, None)], 99) == {"policy": 3.0, "kl": 3.0}
    assert Rloo().needs_proximal


def test_on_policy_loss_and_gradient(pair, weighted, total) -> None:
    algorithm = Rloo()
    rows = weighted(algorithm.weights([pair])[0], FLAT, proximal=FLAT, mask=LENGTHS)
    loss = total(algorithm, rows, algorithm.denominators([pair], 8))
    loss.backward()
    assert loss.item() == 0  # advantages 1 and −1, each once for its rollout
    expected = torch.tensor([[-0.5, -0.5, 0, 0], [0.5] * 4], dtype=torch.float64)
    torch.testing.assert_close(rows.policy_logprobs_BT.grad, expected)


def test_ratio_is_the_product_and_the_rollout_is_clipped_whole(pair, weighted, total) -> None:
    algorithm = Rloo(epsilon=0.2, epsilon_high=0.5)
    ratios = [[1.1, 1.2, 1.0, 1.0], [0.5, 1.0, 1.0, 1.0]]
    rows = weighted(
        algorithm.weights([pair])[0],
        [[math.log(ratio) - 1 for ratio in row] for row in ratios],
        sampling=FLAT,
        proximal=FLAT,
        mask=LENGTHS,
    )
    loss = total(algorithm, rows, algorithm.denominators([pair], 8))
    loss.backward()
    assert loss.item() == pytest.approx(-(1.1 * 1.2 - 0.8) / 2)
    good = 1.1 * 1.2 / 2
    expected = torch.tensor([[-good, -good, 0, 0], [0.0] * 4], dtype=torch.float64)
    torch.testing.assert_close(rows.policy_logprobs_BT.grad, expected)


def test_penalty_is_summed_over_the_rollout(pair, weighted, total) -> None:
    algorithm = Rloo(beta=0.03, kl_estimator="k1")
    ahead = [[-1.5] * 4, [-1.25] * 4]
    rows = weighted(
        algorithm.weights([pair])[0], FLAT, proximal=FLAT, reference=ahead, mask=LENGTHS
    )
    loss = total(algorithm, rows, algorithm.denominators([pair], 8))
    loss.backward()
    assert loss.item() == pytest.approx(0.03 * (2 * 0.5 + 4 * 0.25) / 2)
    good, bad = -0.5 + 0.03 * 0.5 / 2, 0.5 + 0.03 * 0.25 / 2
    expected = torch.tensor([[good, good, 0, 0], [bad] * 4], dtype=torch.float64)
    torch.testing.assert_close(rows.policy_logprobs_BT.grad, expected)
