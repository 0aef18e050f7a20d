"""Log-probabilities and entropies of given tokens after the last layer of a native model, with their gradients, without keeping logits.

The final norm and the head are one step: the forward pass computes the gradient of the head's input
(`groupwise.engine.learner.head_numbers`), and the backward pass takes it through the norm.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from groupwise.engine.learner.head_numbers import HeadNumbers, InputGradients
from groupwise.engine.learner.native.elementwise import add_norm_gradient, norm_scale
from groupwise.engine.learner.targets import Targets, TokenNumbers
from groupwise.engine.models.native.facts import CHUNK
from groupwise.engine.models.native.weights import NativeModel


def token_numbers(model: NativeModel, residual_NH: Tensor, targets: Targets) -> TokenNumbers:
    """The numbers of the targets, from the residual stream [N, H] after all layers.

    They equal those of `groupwise.engine.learner.head.token_numbers`.
    """
    gradient = torch.is_grad_enabled() and residual_NH.requires_grad
    logprobs_N, entropies_N, right_N, *top = _Head.apply(residual_NH, model, targets, gradient)  # pyright: ignore[reportGeneralTypeIssues]
    right = right_N if targets.outputs.accuracy else None
    return TokenNumbers(logprobs_N, entropies_N, right, *(top if targets.outputs.top else ()))


def logits_of(model: NativeModel, residual_NH: Tensor) -> Tensor:
    """Float32 logits [N, V] after the last layer, with a gradient by autograd: for losses over the whole vocabulary."""
    shape = model.shape
    normed_NH = rms_norm(residual_NH, (shape.hidden,), model.norm_H, shape.epsilon).to(model.dtype)
    return model.head.many(normed_NH).float()


class _Head(torch.autograd.Function):
    """Final norm and head; see the module's docstring."""

    @staticmethod
    def forward(
        ctx: Any, residual_NH: Tensor, model: NativeModel, targets: Targets, gradient: bool
    ) -> tuple[Tensor, ...]:
        numbers = HeadNumbers(residual_NH, targets, model.head.weight_OI if gradient else None)
        for start in range(0, len(residual_NH), CHUNK):
            end = min(start + CHUNK, len(residual_NH))
            normed_CH = model.normed(residual_NH[start:end], model.norm_H)
            numbers.compute(start, end, model.head.many(normed_CH))
        ctx.model, ctx.input_gradients = model, numbers.input_gradients
        ctx.save_for_backward(residual_NH)
        ctx.mark_non_differentiable(*numbers.constant())
        return numbers.outputs()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        d_logprobs_N, d_entropies_N, *_ = grad_outputs
        (residual_NH,) = ctx.saved_tensors
        model: NativeModel = ctx.model
        input_gradients: InputGradients = ctx.input_gradients
        d_NH = input_gradients.gradient(d_logprobs_N, d_entropies_N)
        d_residual_NH = torch.zeros_like(residual_NH)
        scale_N1 = norm_scale(residual_NH, model.shape.epsilon)
        add_norm_gradient(d_residual_NH, d_NH, residual_NH, scale_N1, model.norm_H)
        return d_residual_NH, None, None, None
