"""Closed forms of GSPO: one ratio for a rollout, the exponential of its mean log-ratio."""

from __future__ import annotations

import math

import pytest
import torch

from groupwise.algorithms.gspo import Gspo
from tests.unit.algorithms.closed_forms import FLAT, LENGTHS, A


def test_weights_and_denominators(pair) -> None:
    good, bad = Gspo().weights([pair])[0]
    assert (good.advantage, bad.advantage) == pytest.approx((A, -A))
    assert (good.scale, bad.scale) == (1 / 2, 1 / 4)
    assert Gspo().denominators([pair, pair], 99) == {"policy": 4.0}
    assert Gspo().needs_proximal


def test_ratio_is_the_exponential_of_the_mean(pair, weighted, total) -> None:
    """Two ratios 1.1 and 1.3 make the geometric mean √1.43; four of the other rollout make 1."""
    algorithm = Gspo(epsilon=0.5, epsilon_high=0.5)
    ratios = [[1.1, 1.3, 1.0, 1.0], [0.5, 2.0, 4.0, 0.25]]
    rows = weighted(
        algorithm.weights([pair])[0],
        [[math.log(ratio) - 1 for ratio in row] for row in ratios],
        sampling=FLAT,
        proximal=FLAT,
        mask=LENGTHS,
    )
    loss = total(algorithm, rows, algorithm.denominators([pair], 8))
    loss.backward()
    mean = math.sqrt(1.1 * 1.3)
    assert loss.item() == pytest.approx(-(A * mean - A) / 2)
    good, bad = A * mean / (2 * 2), A / (2 * 4)
    expected = torch.tensor([[-good, -good, 0, 0], [bad] * 4], dtype=torch.float64)
    torch.testing.assert_close(rows.policy_logprobs_BT.grad, expected)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "slope"),
    [
        (3.5e-4, 1.0, -1.0),
        (5e-4, 1.0, 0.0),
        (-5e-4, 1.0, -1.0),
        (-3.5e-4, -1.0, 0.0),
        (5e-4, -1.0, 1.0),
    ],
)
def test_a_rollout_is_clipped_as_a_whole(
    batch, log_ratio: float, advantage: float, slope: float
) -> None:
    """One token far out on each side; only their mean counts."""
    flat = [[-1.0, -1.0]]
    rows = batch(
        [[-1.0 + log_ratio + 0.3, -1.0 + log_ratio - 0.3]],
        flat,
        proximal=flat,
        advantages=[advantage],
        scales=[0.5],
    )
    result = Gspo().loss(rows)
    result.components["policy"].backward()
    found = rows.policy_logprobs_BT.grad.sum().item()
    assert found == pytest.approx(slope * math.exp(log_ratio))
    clipped = result.stats["clip_low"].item() + result.stats["clip_high"].item()
    assert clipped == (2 if slope == 0 else 0)
