"""The value and gradient of a loss for given log-probabilities, without a model: for checks of algorithms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from groupwise.algorithms.base import Loss
from groupwise.core.types import Row
from groupwise.engine.learner.layout import longest_completion
from groupwise.engine.learner.targets import ForwardResult
from groupwise.engine.learner.torch_learner import token_batch


@dataclass(frozen=True, slots=True)
class _Batch:
    """Rows as a micro-batch (`groupwise.engine.learner.layout.Batch`), `padding` tokens wider than the longest of them."""

    rows: tuple[Row, ...]
    padding: int

    @property
    def indices(self) -> tuple[int, ...]:
        return tuple(range(len(self.rows)))

    @property
    def width(self) -> int:
        return longest_completion(self.rows) + self.padding


def loss_gradient(
    rows: Sequence[Row],
    logprobs: Sequence[Sequence[float]],
    entropies: Sequence[Sequence[float]],
    loss: Loss,
    denominators: Mapping[str, float],
    *,
    padding: int = 0,
) -> tuple[float, list[list[float]]]:
    """`Σ component / denominator` of one micro-batch, and its derivative by the log-probability of each token of each row.

    Logprobs and entropies (nats) are those of each row's completion; padding has NaN, which must have no effect.
    """
    batch = _Batch(tuple(rows), padding)

    def padded(values: Sequence[Sequence[float]]) -> torch.Tensor:
        gaps = [[float("nan")] * (batch.width - len(row)) for row in values]
        return torch.tensor([[*row, *gap] for row, gap in zip(values, gaps, strict=True)])

    logprobs_BT = padded(logprobs).requires_grad_()
    entropies_BT = padded(entropies)
    tokens = token_batch(batch, ForwardResult(logprobs_BT, entropies_BT))
    result = loss.loss(replace(tokens, mask_BT=tokens.mask_BT != 0))
    total = torch.stack(
        [value / denominators[name] for name, value in result.components.items()]
    ).sum()
    (gradient_BT,) = torch.autograd.grad(
        total, (logprobs_BT,), allow_unused=True, materialize_grads=True
    )
    lengths = [len(row.completion_ids) for row in rows]
    return total.item(), [
        gradient[:length] for gradient, length in zip(gradient_BT.tolist(), lengths, strict=True)
    ]
