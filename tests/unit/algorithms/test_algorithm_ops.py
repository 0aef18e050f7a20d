"""The contract of the shared tensor maths.

1. Nothing outside the mask, and no extreme ratio, makes a value or a gradient that is not finite.
2. A sequence's log-ratio has the value of the mean or sum, and its gradient.
3. The second bound of the clip acts where the advantage is negative.
"""

from __future__ import annotations

import math

import pytest
import torch

from groupwise.algorithms import ops

MASK = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]])


@pytest.mark.parametrize("log_ratio", [-1e4, -89.0, 89.0, 1e4])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_extreme_ratios_are_bounded_and_leave_no_nan_gradient(
    log_ratio: float, advantage: float
) -> None:
    log_ratio_BT = torch.tensor([[log_ratio]], requires_grad=True)
    ratio_BT = ops.bound_log_ratio(log_ratio_BT).exp()
    ops.clipped_surrogate(ratio_BT, torch.tensor([advantage]), 0.8, 1.2).sum().backward()
    assert ratio_BT.isfinite().all()
    assert log_ratio_BT.grad is not None
    assert log_ratio_BT.grad.item() == 0.0


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_masked_difference_hides_garbage_from_value_and_gradient(garbage: float) -> None:
    left = torch.tensor([[1.0, garbage]], requires_grad=True)
    right = torch.tensor([[3.0, garbage]])
    difference = ops.masked_difference(left, right, torch.tensor([[1, 0]]))
    difference.exp().sum().backward()
    assert difference.tolist() == [[-2.0, 0.0]]
    assert left.grad is not None
    assert left.grad.tolist() == [[pytest.approx(math.exp(-2)), 0.0]]


@pytest.mark.parametrize("mean", [True, False])
def test_ratio_of_a_sequence_in_value_and_gradient(mean: bool) -> None:
    rng = torch.Generator().manual_seed(1)
    gap_BT = torch.randn(3, 4, dtype=torch.float64, generator=rng).mul(0.2).requires_grad_()
    log_ratio_BT = ops.masked_difference(gap_BT, torch.zeros(3, 4), MASK)
    counts_B = MASK.sum(-1).clamp(min=1)
    sums_B = (gap_BT * MASK).sum(-1)
    direct_B = (sums_B / counts_B if mean else sums_B).exp()
    shared_BT = ops.sequence_log_ratio(log_ratio_BT, None, MASK, mean=mean).exp()
    averaged_B = (shared_BT * MASK).sum(-1) / counts_B
    torch.testing.assert_close(averaged_B[:2], direct_B[:2])
    found = torch.autograd.grad(averaged_B[:2].sum(), gap_BT, retain_graph=True)[0]
    expected = torch.autograd.grad(direct_B[:2].sum(), gap_BT)[0]
    torch.testing.assert_close(found, expected)
    assert shared_BT[2].tolist() == [1.0] * 4


@pytest.mark.parametrize(
    ("advantage", "ratio", "value", "slope"),
    [
        (-1.0, 3.0, -3.0, -1.0),
        (-1.0, 5.0, -4.0, 0.0),  # held at delta
        (1.0, 5.0, 1.2, 0.0),  # the clip is the tighter bound
        (-1.0, 0.5, -0.8, 0.0),
    ],
)
def test_two_sided_clip(advantage: float, ratio: float, value: float, slope: float) -> None:
    ratio_BT = torch.tensor([[ratio]], requires_grad=True)
    found = ops.clipped_surrogate(ratio_BT, torch.tensor([advantage]), 0.8, 1.2, delta=4.0)
    found.sum().backward()
    assert found.item() == pytest.approx(value)
    assert ratio_BT.grad is not None
    assert ratio_BT.grad.item() == slope
