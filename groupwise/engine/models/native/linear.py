"""Matrix products of a decoder; the low-rank product of an adapter is added before the result is rounded.

Layers that read the same input form one product: queries, keys and values; gate and up. On a CPU the weights are also kept in a second
order, which is fastest for products with few rows, as in decoding.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from groupwise.engine.models.native.packed import Packed


@dataclass(frozen=True, slots=True)
class Part:
    """One of the model's own linear layers within a product."""

    path: str
    """Its name in the model, which adapters use too."""
    start: int
    end: int
    """`start` and `end` are its rows of the product's weight."""
    order: Tensor | None = None
    """Permutation of its rows: row i is the model's row order[i]. None: unchanged."""


@dataclass(frozen=True, slots=True)
class Factors:
    """An adapter's addition to one linear layer: `scaling · (x Aᵀ) Bᵀ`."""

    down_RI: Tensor
    up_OR: Tensor
    scaling: float


@dataclass(frozen=True, slots=True)
class LowRank:
    """The factors of all parts of a product, in the number format of its weight."""

    down_RI: Tensor
    """The A factors of the parts, stacked."""
    up_OR: Tensor
    """Their B factors multiplied by their scaling, each in its own rows and columns; 0 elsewhere."""

    def added(self, x_NI: Tensor) -> Tensor:
        """The adapter's addition to the product, [N, O]."""
        return (x_NI @ self.down_RI.t()) @ self.up_OR.t()

    def copy_(self, other: LowRank) -> None:
        """Copy the numbers of another adapter's factors in place."""
        self.down_RI.copy_(other.down_RI)
        self.up_OR.copy_(other.up_OR)


class Linear:
    """`x Wᵀ + bias` for one or several of the model's layers."""

    def __init__(
        self, parts: Sequence[Part], weight_OI: Tensor, bias_O: Tensor | None = None
    ) -> None:
        self.parts = tuple(parts)
        self.weight_OI = weight_OI
        self.bias_O = bias_O
        self._packed: Packed | None = None

    @property
    def cache_name(self) -> str:
        """The name of its weight in a cache: that of its first part, or `head`."""
        return self.parts[0].path if self.parts else "head"

    @property
    def packed_tensors(self) -> dict[str, Tensor]:
        """What `pack` computed, by its names in a cache; empty before."""
        tensors = () if self._packed is None else self._packed.tensors
        return dict(zip(self._packed_names, tensors, strict=False))

    @property
    def _packed_names(self) -> tuple[str, str]:
        return self.cache_name, f"{self.cache_name}.scales"

    def pack(self, cached: Mapping[str, Tensor] | None = None, *, int8: bool = False) -> None:
        """Also keep the weights in the order for decoding, from a cache or computed; with `int8` as whole numbers."""
        found = [cached[name] for name in self._packed_names if name in cached] if cached else ()
        self._packed = Packed(self.weight_OI, self.bias_O, found, int8=int8)

    def few(self, x_NI: Tensor, low: Any = None) -> Tensor:
        """The product [N, O] of a few rows, as in decoding, in the format of the weight or float32.

        `low` is a result of `packed_low_rank`.
        """
        return self.many(x_NI, low) if self._packed is None else self._packed.product(x_NI, low)

    def many(self, x_NI: Tensor, low: LowRank | None = None) -> Tensor:
        """The product [N, O] of many rows, in the format of the weight or float32."""
        if low is None:
            if self.bias_O is None:
                return x_NI @ self.weight_OI.t()
            return torch.addmm(self.bias_O, x_NI, self.weight_OI.t())
        if rounds_before_adding(x_NI):
            y_NO = in_float32(x_NI, self.weight_OI, x_NI @ low.down_RI.t(), low.up_OR)
        else:
            y_NO = low.added(x_NI).addmm_(x_NI, self.weight_OI.t())
        # Added last: in `added`, a small addition of the adapter would be rounded to the precision of the larger bias.
        return y_NO if self.bias_O is None else y_NO.add_(self.bias_O)

    def add_many(self, into_NO: Tensor, x_NI: Tensor, low: LowRank | None) -> None:
        """Add the product of many rows to float32 rows, in place."""
        if low is None or self.bias_O is not None or not rounds_before_adding(x_NI):
            into_NO += self.many(x_NI, low)
            return
        for factor, weight in ((x_NI @ low.down_RI.t(), low.up_OR), (x_NI, self.weight_OI)):
            torch.addmm(into_NO, factor, weight.t(), out_dtype=torch.float32, out=into_NO)

    def low_rank(self, factors: Mapping[str, Factors]) -> LowRank | None:
        """The adapter's addition to this product, from its factors by layer name; None if it does not change this product."""
        adapted = list(self._adapter_factors(factors))
        if not adapted:
            return None
        weight = self.weight_OI
        down_RI = torch.cat([down_RI for _, down_RI, _ in adapted])
        up_OR = weight.new_zeros(weight.shape[0], down_RI.shape[0])
        first = 0
        for part, down, up in adapted:
            up_OR[part.start : part.end, first : first + len(down)] = up
            first += len(down)
        return LowRank(down_RI, up_OR)

    def packed_low_rank(self, factors: Mapping[str, Factors]) -> Any:
        """Like `low_rank`, in the form that `few` takes; None if the adapter does not change this product."""
        if self._packed is None:
            return self.low_rank(factors)
        placed = [
            (part.start, part.end, down, up) for part, down, up in self._adapter_factors(factors)
        ]
        return self._packed.low_rank(placed) if placed else None

    def _adapter_factors(
        self, factors: Mapping[str, Factors]
    ) -> Iterator[tuple[Part, Tensor, Tensor]]:
        """A, and B times its scaling in the part's row order, for each part that an adapter changes; in the weight's number format."""
        dtype = self.weight_OI.dtype
        for part in self.parts:
            if part.path in factors:
                part_factors = factors[part.path]
                up_OR = (part_factors.up_OR * part_factors.scaling).to(dtype)
                up_OR = up_OR if part.order is None else up_OR[part.order]
                yield part, part_factors.down_RI.to(dtype), up_OR


def rounds_before_adding(x: Tensor) -> bool:
    """True if a product of such numbers is rounded before something is added to it.

    cuBLAS does so: an adapter's addition below half of the last bit is lost, and of an update of 1e-6 only 0.04 % took effect (an H100,
    torch 2.11). `at_once` computes the same sum with one rounding, and `in_float32` with none.
    """
    on_nvidia = x.device.type == "cuda" and torch.version.hip is None
    return on_nvidia and x.dtype in (torch.bfloat16, torch.float16)


def adapted_product(x_NI: Tensor, weight_OI: Tensor, low_NR: Tensor, up_OR: Tensor) -> Tensor:
    """`x Wᵀ + t Bᵀ`, rounded once, with a gradient of all but the frozen weight; t is `x Aᵀ`."""
    if not rounds_before_adding(x_NI):
        return torch.addmm(low_NR @ up_OR.t(), x_NI, weight_OI.t())
    if torch.is_grad_enabled():
        return cast("Tensor", _AtOnce.apply(x_NI, weight_OI, low_NR, up_OR))
    return in_float32(x_NI, weight_OI, low_NR, up_OR).to(x_NI.dtype)


def at_once(x_NI: Tensor, weight_OI: Tensor, low_NR: Tensor, up_OR: Tensor) -> Tensor:
    """`x Wᵀ + t Bᵀ` as one product, `[x t] [W B]ᵀ`, rounded once; it copies the weight, which is worth it for many rows."""
    return torch.cat((x_NI, low_NR), dim=1) @ torch.cat((weight_OI, up_OR), dim=1).t()


def in_float32(x_NI: Tensor, weight_OI: Tensor, low_NR: Tensor, up_OR: Tensor) -> Tensor:
    """`x Wᵀ + t Bᵀ` in float32, of bfloat16 numbers on a GPU; has no gradient."""
    added_NO = torch.mm(low_NR, up_OR.t(), out_dtype=torch.float32)
    # In place: otherwise torch first copies `added_NO`, which takes as long as the product of few rows.
    return torch.addmm(added_NO, x_NI, weight_OI.t(), out_dtype=torch.float32, out=added_NO)


class _AtOnce(torch.autograd.Function):
    """`at_once`, without a gradient of the frozen weight, which torch would compute only to discard it."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor, low_NR: Tensor, up_OR: Tensor) -> Tensor:
        ctx.save_for_backward(weight_OI, low_NR, up_OR)
        return at_once(x_NI, weight_OI, low_NR, up_OR)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        weight_OI, low_NR, up_OR = ctx.saved_tensors
        (dy_NO,) = grad_outputs
        return dy_NO @ weight_OI, None, dy_NO @ up_OR, dy_NO.t() @ low_NR


@contextmanager
def quick_float32(enabled: bool) -> Generator[None]:
    """Let oneDNN compute float32 products; on AMD CPUs that is twice as fast as MKL.

    Torch uses oneDNN only if rounding to bfloat16 is allowed, so this allows it where oneDNN would not actually round. On other CPUs
    nothing changes: the sampler's scores are float32, and rounded ones would be the largest difference from them. Torch still gives
    products of up to 4,096 multiplications to MKL, which may add in another order.
    """
    products = cast("Any", torch.backends.mkldnn).matmul
    previous = products.fp32_precision
    if enabled and not _would_round():
        products.fp32_precision = "bf16"
    try:
        yield
    finally:
        products.fp32_precision = previous


def _would_round() -> bool:
    """True if oneDNN rounds float32 to bfloat16 when allowed to: it does with AMX, and non-x86 CPUs may have something similar."""
    capabilities = torch.cpu.get_capabilities()
    return capabilities.get("architecture") != "x86_64" or bool(capabilities.get("amx_bf16"))


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer; norms are float32."""

    attention_norm_H: Tensor
    qkv: Linear
    query_norm_D: Tensor | None
    """Norm within each head of the queries, if the model has one; likewise for the keys."""
    key_norm_D: Tensor | None
    output: Linear
    mlp_norm_H: Tensor
    gate_up: Linear
    down: Linear

    @property
    def products(self) -> tuple[Linear, ...]:
        """The products that adapters may change, in the order of computation."""
        return self.qkv, self.output, self.gate_up, self.down
