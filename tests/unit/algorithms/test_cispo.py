"""Closed forms of CISPO: the weight is capped and detached, no token loses its gradient."""

from __future__ import annotations

import math

import pytest
import torch

from groupwise.algorithms.cispo import Cispo
from tests.unit.algorithms.closed_forms import LENGTHS, A


def test_weights_and_denominators(pair) -> None:
    good, bad = Cispo().weights([pair])[0]
    assert (good.advantage, bad.advantage) == pytest.approx((A, -A))
    assert (good.scale, bad.scale) == (1.0, 1.0)
    assert Cispo().denominators([pair], 99) == {"policy": 6.0}


def test_loss_and_gradient(pair, weighted, total) -> None:
    algorithm = Cispo(epsilon_high=1.0)
    ratios = [[1.5, 3.0, 1.0, 1.0], [0.1, 1.0, 5.0, 2.0]]
    logprobs = [[math.log(ratio) - 2 for ratio in row] for row in ratios]
    rows = weighted(algorithm.weights([pair])[0], logprobs, sampling=[[-2.0] * 4] * 2, mask=LENGTHS)
    loss = total(algorithm, rows, algorithm.denominators([pair], 8))
    loss.backward()
    weights = [[1.5, 2.0, 0.0, 0.0], [0.1, 1.0, 2.0, 2.0]]  # nothing is bounded below
    gain = sum(
        sign * A * weight * logprob
        for sign, row, values in zip((1, -1), weights, logprobs, strict=True)
        for weight, logprob in zip(row, values, strict=True)
    )
    assert loss.item() == pytest.approx(-gain / 6)
    signed = torch.tensor([[-A], [A]], dtype=torch.float64)
    torch.testing.assert_close(rows.policy_logprobs_BT.grad, signed * torch.tensor(weights) / 6)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_tokens_beyond_the_cap_keep_their_gradient_and_are_counted(batch, advantage: float) -> None:
    rows = batch([[-1.0, -1.0]], [[-9.0, -1.0]], advantages=[advantage])
    result = Cispo().loss(rows)
    result.components["policy"].backward()
    assert rows.policy_logprobs_BT.grad.tolist() == [[-5.0 * advantage, -advantage]]
    assert result.stats["clip_high"].item() == 1
