"""Losses whose credits are given: closed forms for each surrogate, per token, and nothing from outside the mask."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch

from groupwise.algorithms.base import TokenBatch
from groupwise.algorithms.given import Given, Surrogate

RATIOS = [1.5, 0.5, 1.5, 0.5, 1.1]
CREDITS = [1.0, 2.0, -1.0, -2.0, 3.0]
MEAN_RATIO = math.prod(RATIOS) ** 0.2
"""Within the default clip."""
LOGPROBS = [-0.5, -1.0, -2.0, -0.25, -0.125]


def _batch(batch) -> TokenBatch:
    sampled = [value - math.log(ratio) for value, ratio in zip(LOGPROBS, RATIOS, strict=True)]
    rows = batch([LOGPROBS], sampling=[sampled], advantages=[math.nan], scales=[math.nan])
    return replace(rows, credits_BT=torch.tensor([CREDITS], dtype=torch.float64))


def _sum(values: list[float]) -> float:
    return math.fsum(values)


@pytest.mark.parametrize(
    ("surrogate", "value", "gradient"),
    [
        (
            "log_probability",
            -_sum([c * p for c, p in zip(CREDITS, LOGPROBS, strict=True)]),
            [-c for c in CREDITS],
        ),
        (
            "ratio",
            -_sum([c * r for c, r in zip(CREDITS, RATIOS, strict=True)]),
            [-c * r for c, r in zip(CREDITS, RATIOS, strict=True)],
        ),
        ("clipped_ratio", -(1.2 + 1.0 - 1.5 - 1.6 + 3.3), [0, -1.0, 1.5, 0, -3.3]),
        (
            "clipped_weight",
            -(1.2 * -0.5 + 2 * 0.8 * -1.0 - 1.2 * -2.0 - 2 * 0.8 * -0.25 + 3.3 * -0.125),
            [-1.2, -1.6, 1.2, 1.6, -3.3],
        ),
        (
            "quadratic_penalty",
            -_sum(
                [
                    c * p - 0.5 * 0.3 * math.log(r) ** 2
                    for c, p, r in zip(CREDITS, LOGPROBS, RATIOS, strict=True)
                ]
            ),
            [-c + 0.3 * math.log(r) for c, r in zip(CREDITS, RATIOS, strict=True)],
        ),
        (
            "clipped_sequence_ratio",
            -_sum([c * MEAN_RATIO for c in CREDITS]),
            [-c * MEAN_RATIO for c in CREDITS],
        ),
    ],
)
def test_value_and_gradient(
    batch, surrogate: Surrogate, value: float, gradient: list[float]
) -> None:
    rows = _batch(batch)
    result = Given(surrogate=surrogate, beta=0.3).loss(rows)
    assert list(result.components) == ["policy"]
    assert result.components["policy"].item() == pytest.approx(value)
    result.components["policy"].backward()
    assert rows.policy_logprobs_BT.grad[0].tolist() == pytest.approx(gradient)


@pytest.mark.parametrize("surrogate", get_args(Surrogate))
def test_only_masked_in_tokens_count(batch, surrogate: Surrogate) -> None:
    rows = _batch(batch)
    mask_BT = torch.tensor([[1, 0, 1, 0, 1]])
    rows = replace(rows, mask_BT=mask_BT)
    soiled = rows.policy_logprobs_BT.detach().masked_fill(mask_BT == 0, math.nan).requires_grad_()
    assert rows.credits_BT is not None
    dirty = replace(
        rows,
        policy_logprobs_BT=soiled,
        sampling_logprobs_BT=rows.sampling_logprobs_BT.masked_fill(mask_BT == 0, math.inf),
        credits_BT=rows.credits_BT.masked_fill(mask_BT == 0, math.nan),
    )
    loss = Given(surrogate=surrogate, beta=0.3)
    result = loss.loss(dirty)
    clean = loss.loss(rows)
    assert torch.equal(result.components["policy"], clean.components["policy"])
    assert {k: v.item() for k, v in result.stats.items()} == {
        k: v.item() for k, v in clean.stats.items()
    }
    result.components["policy"].backward()
    assert soiled.grad[mask_BT == 0].eq(0).all()


@pytest.mark.parametrize(("low", "high", "kept"), [(0.9, 1.2, True), (0.95, 1.2, False)])
def test_a_sequence_is_clipped_as_a_whole(batch, low: float, high: float, kept: bool) -> None:
    """By the mean of its log-ratios (0.925 here), at the tokens whose credit the bound takes the gain from."""
    rows = _batch(batch)
    loss = Given(surrogate="clipped_sequence_ratio", clip_low=low, clip_high=high)
    result = loss.loss(rows)
    result.components["policy"].backward()
    moved = [kept or credit > 0 for credit in CREDITS]
    assert [slope != 0 for slope in rows.policy_logprobs_BT.grad[0].tolist()] == moved
    assert result.stats["clip_low"].item() == (0 if kept else 2)


@pytest.mark.parametrize(
    ("surrogate", "low", "high"), [("clipped_ratio", 1, 1), ("clipped_weight", 2, 2)]
)
def test_statistics_count_the_tokens_whose_gradient_a_bound_changed(
    batch, surrogate: Surrogate, low: int, high: int
) -> None:
    stats = Given(surrogate=surrogate, clip_low=0.6, clip_high=1.4).loss(_batch(batch)).stats
    found = {name: stats[name].item() for name in ("tokens", "clip_low", "clip_high")}
    assert found == {"tokens": 5, "clip_low": low, "clip_high": high}
    assert stats["ratio"].item() == pytest.approx(sum(RATIOS))
