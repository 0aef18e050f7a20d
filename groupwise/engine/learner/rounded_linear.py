"""Linear layers whose float32 weights are rounded to bfloat16 for each product, and rounded again for its gradient.

Torch's autocast computes the same, but keeps every rounded weight until the backward pass: half as much memory again as the weights take,
and whole even if FSDP gathers the float32 weights for one layer at a time. The layers here keep only a reference to the weight.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def round_again_in_backward(model: nn.Module) -> None:
    """Change the forward pass of all linear layers, for passes under autocast; others stay as they are."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = MethodType(_linear, module)


def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return F.linear(x, layer.weight, layer.bias)
    dtype = torch.get_autocast_dtype(device)
    return _RoundedLinear.apply(x.to(dtype), layer.weight, layer.bias)  # pyright: ignore[reportReturnType]


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
