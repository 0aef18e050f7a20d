"""Linear layers and experts whose float32 weights are rounded to bfloat16 for each product, and rounded again for its gradient.

For linear layers torch's autocast computes the same, but keeps every rounded weight until the backward pass: half as much memory again as
the weights take, and whole even if FSDP gathers the float32 weights for one layer at a time. The layers here keep only a reference to the
weight. The grouped products of experts are unknown to autocast, which would leave them in float32.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.engine.models.experts import are_experts, compute_experts


def round_again_in_backward(model: nn.Module) -> None:
    """Change the forward pass of all linear layers and experts, for passes under autocast; others stay as they are."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = MethodType(_linear, module)
        elif are_experts(module):
            module.forward = MethodType(_experts, module)


def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    dtype = _rounding(x)
    if dtype is None:
        return F.linear(x, layer.weight, layer.bias)
    return _RoundedLinear.apply(x.to(dtype), layer.weight, layer.bias)  # pyright: ignore[reportReturnType]


def _experts(layer: nn.Module, x_NH: Tensor, chosen_NK: Tensor, weights_NK: Tensor) -> Tensor:
    dtype = _rounding(x_NH)
    if dtype is None:
        return type(layer).forward(layer, x_NH, chosen_NK, weights_NK)
    return compute_experts(layer, x_NH.to(dtype), chosen_NK, weights_NK, {}).to(x_NH.dtype)


def _rounding(x: Tensor) -> torch.dtype | None:
    """The format that autocast rounds products to; None without autocast."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


class _RoundedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_OI)
        return F.linear(x, weight_OI.to(x.dtype), None if bias_O is None else bias_O.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_OI = ctx.saved_tensors
        (dy,) = grad_outputs
        for_x, for_weight, for_bias = ctx.needs_input_grad
        dx = dy @ weight_OI.to(dy.dtype) if for_x else None
        dy_NO = dy.flatten(0, -2)
        d_weight = (x.flatten(0, -2).t() @ dy_NO).t().to(weight_OI.dtype) if for_weight else None
        d_bias = dy_NO.sum(0).to(weight_OI.dtype) if for_bias else None
        return dx, d_weight, d_bias
