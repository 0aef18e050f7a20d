"""Log-probabilities and entropies of given tokens by the head of a transformers model, without holding the logits of a batch.

Logits exist for one chunk of tokens at a time, in the number format of the head's products (`groupwise.engine.learner.head_numbers`). If
the head is a frozen matrix, the forward pass also computes the gradient of its input. Any other head (one that is trained, has an adapter
or caps its logits) is computed again in the backward pass, and torch takes the gradient of the logits through it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from groupwise.engine.learner.head_numbers import HeadNumbers
from groupwise.engine.learner.targets import Targets, TokenNumbers
from groupwise.engine.models.decoder import Decoder
from groupwise.engine.models.native.facts import CHUNK


def token_numbers(decoder: Decoder, hidden_NH: Tensor, targets: Targets) -> TokenNumbers:
    """The numbers of the targets, from the last hidden states. Entropies have a gradient only on request."""
    # What a model multiplies its logits with is the same as another temperature.
    targets = replace(targets, temperatures_N=targets.temperatures_N / decoder.logit_factor)
    head = decoder.head
    frozen = type(head) is nn.Linear and not head.weight.requires_grad and not decoder.caps_logits
    gradient = torch.is_grad_enabled()
    if frozen or not gradient:
        weight_VH = head.weight if gradient and hidden_NH.requires_grad else None
        numbers: tuple[Tensor, ...] = _FrozenHead.apply(hidden_NH, decoder, targets, weight_VH)  # pyright: ignore[reportAssignmentType]
    else:
        parts = [
            checkpoint(
                _chunk_numbers,
                decoder,
                hidden_NH[start:end],
                targets.part(start, end),
                use_reentrant=False,
            )
            for start, end in _chunks(len(hidden_NH))
        ]
        numbers = tuple(map(torch.cat, zip(*parts, strict=True)))
    logprobs_N, entropies_N, right_N, *top = numbers
    right = right_N if targets.outputs.accuracy else None
    return TokenNumbers(logprobs_N, entropies_N, right, *(top if targets.outputs.top else ()))


def _chunks(count: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + CHUNK, count)) for start in range(0, count, CHUNK))


class _FrozenHead(torch.autograd.Function):
    """The numbers of all targets; with the weight given, also the gradient of the hidden states."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, decoder: Decoder, targets: Targets, weight_VH: Tensor | None
    ) -> tuple[Tensor, ...]:
        numbers = HeadNumbers(hidden_NH, targets, weight_VH)
        for start, end in _chunks(len(hidden_NH)):
            numbers.compute(start, end, decoder.unscaled_logits(hidden_NH[start:end]))
        ctx.input_gradients, ctx.dtype = numbers.input_gradients, hidden_NH.dtype
        ctx.mark_non_differentiable(*numbers.constant())
        return numbers.outputs()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        d_NH = ctx.input_gradients.gradient(*grad_outputs[:2])
        return d_NH.to(ctx.dtype), None, None, None


def _chunk_numbers(decoder: Decoder, hidden_CH: Tensor, targets: Targets) -> tuple[Tensor, ...]:
    """The numbers of a chunk, with a gradient of whatever computes its logits."""
    logits_CV = decoder.unscaled_logits(hidden_CH)
    return _OfLogits.apply(logits_CV, hidden_CH, targets)  # pyright: ignore[reportReturnType]


class _OfLogits(torch.autograd.Function):
    """The numbers of a chunk's targets. They take the memory of the logits for the gradient: nothing else needs these."""

    @staticmethod
    def forward(
        ctx: Any, logits_CV: Tensor, hidden_CH: Tensor, targets: Targets
    ) -> tuple[Tensor, ...]:
        numbers = HeadNumbers(hidden_CH, targets, None)
        entropy_CV = numbers.overwrite(0, len(logits_CV), logits_CV, gradient=True)
        ctx.targets = targets
        ctx.save_for_backward(logits_CV, entropy_CV)
        ctx.mark_non_differentiable(*numbers.constant())
        return numbers.outputs()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        d_logprobs_C, d_entropies_C, *_ = grad_outputs
        factors_CV, entropy_CV = ctx.saved_tensors
        targets: Targets = ctx.targets
        temperatures_C1 = targets.temperatures_N[:, None]
        single = targets.ids_N.ndim == 1
        weights_CK = (d_logprobs_C[:, None] if single else d_logprobs_C) / temperatures_C1
        factors_CV *= -weights_CK.sum(-1, keepdim=True).to(factors_CV.dtype)
        if not single:
            factors_CV.scatter_add_(1, targets.ids_N, weights_CK.to(factors_CV.dtype))
        if entropy_CV is not None:
            weights_C1 = d_entropies_C[:, None] / temperatures_C1
            factors_CV -= entropy_CV.mul_(weights_C1.to(entropy_CV.dtype))
        return factors_CV, None, None
