"""The supervised loss: the sum of the teacher's negative log-probabilities, whatever the other tensors hold."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from groupwise.algorithms.base import TokenBatch
from groupwise.algorithms.sft import Sft


def _batch(batch) -> TokenBatch:
    return batch(
        [[-1.0, -0.5, -2.0], [-0.25, -4.0, -0.125]],
        mask=[[1, 0, 1], [1, 1, 0]],
        advantages=[0.0, 0.0],
        scales=[1.0, 0.5],
        entropies=[[1.0, 9.0, 2.0], [3.0, 4.0, 9.0]],
    )


def test_loss_gradient_and_statistics(batch) -> None:
    rows = _batch(batch)
    result = Sft().loss(rows)
    assert {name: value.item() for name, value in result.components.items()} == {
        "sft": 3 + 4.25 / 2
    }
    assert {name: value.item() for name, value in result.stats.items()} == {
        "tokens": 4,
        "entropy": 10,
    }
    result.components["sft"].backward()
    assert rows.policy_logprobs_BT.grad.tolist() == [[-1, 0, -1], [-0.5, -0.5, 0]]


def test_it_is_the_mean_cross_entropy_with_tokens_as_the_denominator() -> None:
    logits_BTV = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    labels_BT = torch.tensor([[1, 2, -100], [3, -100, 0]])
    expected = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten())
    chosen = labels_BT.clamp(min=0).unsqueeze(-1)
    rows = TokenBatch(
        policy_logprobs_BT=logits_BTV.log_softmax(-1).gather(-1, chosen).squeeze(-1),
        sampling_logprobs_BT=torch.zeros(2, 3),
        mask_BT=labels_BT != -100,
        advantages_B=torch.zeros(2),
        scales_B=torch.ones(2),
    )
    result = Sft().loss(rows)
    torch.testing.assert_close(result.components["sft"] / result.stats["tokens"], expected)


@pytest.mark.parametrize("garbage", [math.nan, math.inf])
def test_only_masked_in_tokens_count(batch, garbage: float) -> None:
    rows = _batch(batch)
    outside = rows.mask_BT == 0
    soiled = rows.policy_logprobs_BT.detach().masked_fill(outside, garbage).requires_grad_()
    dirty = replace(
        rows,
        policy_logprobs_BT=soiled,
        sampling_logprobs_BT=torch.full_like(soiled, garbage),
        advantages_B=torch.full_like(rows.advantages_B, garbage),
    )
    result = Sft().loss(dirty)
    assert torch.equal(result.components["sft"], Sft().loss(rows).components["sft"])
    result.components["sft"].backward()
    assert soiled.grad[outside].eq(0).all()
