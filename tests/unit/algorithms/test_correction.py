"""The contract of the importance weights: as named, detached, multiplied onto the surrogate, and counted."""

from __future__ import annotations

import math

import pytest
import torch

from groupwise.algorithms.correction import Correction, importance_weights
from groupwise.algorithms.registry import make

LOG2 = math.log(2)
PROXIMAL = [[LOG2, -LOG2, 2 * LOG2, 9.0], [-LOG2, 0.0, 0.0, 0.0]]
"""Weights 2, 1/2, 4 of the first row (4 for the row), and 1/2, 1 of the second; the last tokens are masked."""
MASK = [[1, 1, 1, 0], [1, 1, 0, 0]]


@pytest.mark.parametrize(("mode", "bounds", "expected"), [
    ("token_truncate", 3.0, [[2, 0.5, 3, 1], [0.5, 1, 1, 1]]), ("token_mask", 3.0, [[2, 0.5, 0, 1], [0.5, 1, 1, 1]]),
    ("token_mask", 1.5, [[0, 0.5, 0, 1], [0.5, 1, 1, 1]]), ("sequence_truncate", 3.0, [[3, 3, 3, 1], [0.5, 0.5, 1, 1]]),
    ("token_truncate", (0.7, 3.0), [[2, 0.7, 3, 1], [0.7, 1, 1, 1]]), ("token_mask", (0.7, 3.0), [[2, 0, 0, 1], [0, 1, 1, 1]]),
    ("sequence_truncate", (0.7, 9.0), [[4, 4, 4, 1], [0.7, 0.7, 1, 1]]), ("sequence_mask", (0.7, 9.0), [[4, 4, 4, 1], [0, 0, 1, 1]]),
    ("sequence_mask", 3.0, [[0, 0, 0, 1], [0.5, 0.5, 1, 1]]), ("sequence_mask", 5.0, [[4, 4, 4, 1], [0.5, 0.5, 1, 1]]),
])  # fmt: skip
def test_weights_by_hand(
    mode: Correction, bounds: float | tuple[float, float], expected: list[list[float]]
) -> None:
    """Bounds are floor and cap, or the cap alone."""
    floor, cap = bounds if isinstance(bounds, tuple) else (0.0, bounds)
    zeros = torch.zeros(2, 4)
    weights, clipped = importance_weights(
        torch.tensor(PROXIMAL), zeros, torch.tensor(MASK), mode, (floor, cap)
    )
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float32))
    unbounded, _ = importance_weights(
        torch.tensor(PROXIMAL), zeros, torch.tensor(MASK), mode, (0.0, 1e9)
    )
    assert torch.equal(clipped, (unbounded > cap) | (unbounded < floor))


def test_the_ratio_is_that_of_the_updates_alone(batch) -> None:
    """Policy 1.5 times the proximal one, which is twice the sampler's: clipped at 1.2, weighted by 2."""
    start = -1.0
    rows = batch(
        [[start + LOG2 + math.log(1.5)]], [[start]], proximal=[[start + LOG2]], advantages=[1.0]
    )
    corrected = make("grpo", {"importance_sampling_correction": "token_truncate"}).loss(rows)
    assert corrected.components["policy"].item() == pytest.approx(-2 * 1.2)
    assert corrected.stats["ratio"].item() == pytest.approx(1.5)
    plain = make("grpo", {"epsilon": 9.0}).loss(rows)
    assert plain.components["policy"].item() == pytest.approx(-3.0)
    assert plain.stats["logprob_gap"].item() == corrected.stats["logprob_gap"].item()
