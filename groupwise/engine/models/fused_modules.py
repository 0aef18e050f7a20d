"""Norms, SwiGLUs and rotary positions of a transformers model on a GPU, each computed by one Triton kernel forward and one backward.

Transformers takes five to ten kernels of torch for each. `fuse` gives single modules another forward pass; the classes and functions of
transformers stay as they are, for other models in this process. A module is changed only if its own forward pass follows the kernel's
formula on a few numbers. Where the kernels cannot be used, as on a CPU, a changed module computes as before
(`groupwise.engine.models.native.fused`).
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.engine.models.experts import are_experts
from groupwise.engine.models.native.fused import kernels_for

ROTARY = "apply_rotary_pos_emb"
"""Name of the function, in each of transformers' model files, that turns queries and keys."""
CLOSE = 1e-4
"""Largest accepted difference to the formulas, in float32 on numbers of about 1."""


@torch.no_grad()
def fuse(model: nn.Module) -> None:
    """Change the modules of a model that the kernels can compute. May be repeated."""
    known: dict[tuple[type, str], Any] = {}
    for module in model.modules():
        for name, find in _FUSED.items():
            if name in vars(module):
                continue
            kind = (type(module), name)
            if kind not in known:
                known[kind] = find(module)
            if known[kind] is not None:
                setattr(module, name, MethodType(known[kind], module))


# --- norms


def _norm_of(module: nn.Module) -> Callable[..., Tensor] | None:
    """The forward pass of a root-mean-square norm whose factor is its weight, or 1 more than that; None for other modules."""
    weight, epsilon = getattr(module, "weight", None), _epsilon(module)
    if not isinstance(weight, Tensor) or weight.ndim != 1 or epsilon is None:
        return None
    if not type(module).__name__.endswith("RMSNorm"):
        return None
    x_NH = torch.linspace(-2, 3, 2 * len(weight), device=weight.device).view(2, -1)
    own = type(module).forward(module, x_NH)
    for forward, more in ((_norm, 0.0), (_norm_from_one, 1.0)):
        if _agree(own, F.rms_norm(x_NH, (len(weight),), weight.float() + more, epsilon)):
            return forward
    return None


def _epsilon(module: nn.Module) -> float | None:
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return epsilon if isinstance(epsilon, float) else None


def _norm(module: Any, x: Tensor) -> Tensor:
    if kernels_for(x) is None:
        return type(module).forward(module, x)
    dtype = torch.result_type(module.weight, x)
    return cast("Tensor", _Norm.apply(x, module.weight, _epsilon(module), dtype))


def _norm_from_one(module: Any, x: Tensor) -> Tensor:
    if kernels_for(x) is None:
        return type(module).forward(module, x)
    return cast("Tensor", _Norm.apply(x, 1.0 + module.weight.float(), _epsilon(module), x.dtype))


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_H: Tensor, epsilon: float, dtype: torch.dtype
    ) -> Tensor:
        x_NH = x.reshape(-1, x.shape[-1]).contiguous()
        ctx.save_for_backward(x_NH, weight_H)
        ctx.epsilon = epsilon
        return _kernels(x).normed(x_NH, weight_H, epsilon, dtype).view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x_NH, weight_H = ctx.saved_tensors
        (dy,) = grad_outputs
        dx_NH, d_H = _kernels(x_NH).norm_gradients(
            x_NH, weight_H, ctx.epsilon, dy.reshape(x_NH.shape).contiguous(), of_weight=ctx.needs_input_grad[1]
        )  # fmt: skip
        return dx_NH.view(dy.shape), None if d_H is None else d_H.to(weight_H.dtype), None, None


# --- SwiGLUs


def _mlp_of(module: nn.Module) -> Callable[..., Tensor] | None:
    """The forward pass of a SwiGLU with its three products; None for other modules."""
    products = [getattr(module, f"{name}_proj", None) for name in ("gate", "up", "down")]
    weight = getattr(products[0], "weight", None)
    if not all(isinstance(each, nn.Module) for each in products) or not isinstance(weight, Tensor):
        return None
    x_NH = torch.linspace(-1, 1, 2 * weight.shape[1], device=weight.device, dtype=weight.dtype)
    x_NH = x_NH.view(2, -1)
    gate, up, down = cast("list[nn.Module]", products)
    try:
        own = type(module).forward(module, x_NH)
    except (AttributeError, TypeError, ValueError, RuntimeError):  # code of any model
        return None
    return _mlp if _agree(own, down(F.silu(gate(x_NH)) * up(x_NH))) else None


def _mlp(module: Any, x: Tensor) -> Tensor:
    if kernels_for(x) is None:
        return type(module).forward(module, x)
    return module.down_proj(_gated(module.gate_proj(x), module.up_proj(x)))


def _experts_gate_of(module: nn.Module) -> Callable[..., Tensor] | None:
    """The gate of experts that are SwiGLUs; None for other modules."""
    if not are_experts(module):
        return None
    gate_up = torch.linspace(-2, 3, 24).view(2, 12)
    gate, up = gate_up.chunk(2, dim=-1)
    own = cast("Any", type(module))._apply_gate(module, gate_up)
    return _experts_gate if _agree(own, F.silu(gate) * up) else None


def _experts_gate(module: Any, gate_up: Tensor) -> Tensor:
    if kernels_for(gate_up) is None:
        return type(module)._apply_gate(module, gate_up)
    return _gated(*gate_up.chunk(2, dim=-1))


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) · up`; the two may be halves of one tensor."""
    width = gate.shape[-1]
    rows = [each.reshape(-1, width) for each in (gate, up)]
    if any(each.stride() != (2 * width, 1) for each in rows):
        rows = [each.contiguous() for each in rows]
    return cast("Tensor", _Gated.apply(*rows)).view(gate.shape)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_NF: Tensor, up_NF: Tensor) -> Tensor:
        ctx.save_for_backward(gate_NF, up_NF)
        return _kernels(gate_NF).swiglu_pair(gate_NF, up_NF)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        gate_NF, up_NF = ctx.saved_tensors
        rows, width = gate_NF.shape
        halves = gate_NF.stride(0) == 2 * width
        d_gate_NF, d_up_NF = (
            gate_NF.new_empty(rows, 2 * width).chunk(2, dim=1)
            if halves
            else (torch.empty_like(gate_NF), torch.empty_like(up_NF))
        )
        _kernels(gate_NF).swiglu_pair_gradient(
            gate_NF, up_NF, grad_outputs[0].contiguous(), d_gate_NF, d_up_NF
        )
        return d_gate_NF, d_up_NF


# --- rotary positions


def _attention_of(module: nn.Module) -> Callable[..., Any] | None:
    """The forward pass of attention, in which another function turns queries and keys; None for other modules.

    It is the module's own code, which finds this function under the name of transformers'.
    """
    forward = type(module).forward
    if not isinstance(forward, FunctionType) or ROTARY not in forward.__code__.co_names:
        return None
    own = forward.__globals__.get(ROTARY)
    if own is None or not _turns_halves(own):
        return None

    def turn(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        fits = q.ndim == 4 and cos.ndim == 3 and q.shape[-1] == cos.shape[-1] == k.shape[-1]
        if rest or options or not fits or kernels_for(q) is None:
            return own(q, k, cos, sin, *rest, **options)
        turns = cos.contiguous(), sin.contiguous()
        return cast("tuple[Tensor, Tensor]", tuple(_Turned.apply(x, *turns) for x in (q, k)))

    changed = FunctionType(
        forward.__code__,
        {**forward.__globals__, ROTARY: turn},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    changed.__kwdefaults__ = forward.__kwdefaults__
    return changed


def _turns_halves(turn: Callable[..., Any]) -> bool:
    """True if each number turns with the one half a head after it."""
    x_BJTD = torch.linspace(-2, 3, 24).view(1, 2, 3, 4)
    angles_BTD = torch.linspace(0, 2, 6).view(1, 3, 2).repeat(1, 1, 2)
    cos, sin = angles_BTD.cos(), angles_BTD.sin()
    first, second = x_BJTD.chunk(2, dim=-1)
    expected = x_BJTD * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]
    try:
        found = turn(x_BJTD, x_BJTD, cos, sin)
    except (TypeError, RuntimeError):  # a function of other arguments
        return False
    return isinstance(found, tuple) and all(_agree(each, expected) for each in found)


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BJTD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor) -> Tensor:
        ctx.save_for_backward(cos_BTD, sin_BTD)
        return _kernels(x_BJTD).rotary_halves(_dense(x_BJTD), cos_BTD, sin_BTD)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        d_BJTD = _dense(grad_outputs[0])
        return (
            _kernels(d_BJTD).rotary_halves(d_BJTD, *ctx.saved_tensors, gradient=True),
            None,
            None,
        )


def _dense(x_BJTD: Tensor) -> Tensor:
    """The tensor, with the numbers of a head beside each other, and none twice."""
    strides = x_BJTD.stride()
    return x_BJTD if strides[-1] == 1 and 0 not in strides else x_BJTD.contiguous()


def _kernels(tensor: Tensor) -> Any:
    kernels = kernels_for(tensor)
    assert kernels is not None, "the forward pass of a module asks before"
    return kernels


def _agree(found: object, expected: Tensor) -> bool:
    if not isinstance(found, Tensor) or found.shape != expected.shape:
        return False
    close = CLOSE if expected.dtype == torch.float32 else 0.05
    return torch.allclose(found.float(), expected.float(), rtol=close, atol=close)


_FUSED: dict[str, Callable[[nn.Module], Callable[..., Any] | None]] = {
    "forward": lambda module: _norm_of(module) or _mlp_of(module) or _attention_of(module),
    "_apply_gate": _experts_gate_of,
}
"""What finds the function, by the name of the method that it replaces in a module."""
