"""A product of a layer plus its adapter, and the gradient of the adapter's factors.

`y = x Wᵀ + t Bᵀ + bias` with `t = x Aᵀ`. W is frozen. Several of the model's layers may form one product; A then stacks the factors of all
of them, and B has each in its own rows and columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from groupwise.engine.models.native.linear import (
    Factors,
    Linear,
    LowRank,
    Part,
    at_once,
    rounds_before_adding,
)


@dataclass(frozen=True, slots=True)
class AdaptedPart:
    """One of the model's layers that an adapter changes."""

    part: Part
    start: int
    end: int
    """`start` and `end` are its columns of t."""
    scaling: float


class Product:
    """One product of the model with the current factors of an adapter."""

    def __init__(self, linear: Linear, factors: Mapping[str, Factors]) -> None:
        self.linear = linear
        self.low: LowRank | None = linear.low_rank(factors)
        self.adapted: list[AdaptedPart] = []
        start = 0
        for part in linear.parts:
            if part.path in factors:
                part_factors = factors[part.path]
                end = start + part_factors.down_RI.shape[0]
                self.adapted.append(AdaptedPart(part, start, end, part_factors.scaling))
                start = end

    def forward(self, x_NI: Tensor) -> tuple[Tensor, Tensor | None]:
        """y [N, O] and t [N, R]."""
        if self.low is None:
            return self.linear.many(x_NI), None
        low_NR = x_NI @ self.low.down_RI.t()
        weight_OI, up_OR = self.linear.weight_OI, self.low.up_OR
        if rounds_before_adding(x_NI):
            y_NO = at_once(x_NI, weight_OI, low_NR, up_OR)
        else:
            y_NO = (low_NR @ up_OR.t()).addmm_(x_NI, weight_OI.t())
        if self.linear.bias_O is not None:  # last, as in `Linear.many`
            y_NO += self.linear.bias_O
        return y_NO, low_NR

    def low_gradient(self, dy_NO: Tensor) -> Tensor | None:
        """Gradient of t: `u = dy B`."""
        return None if self.low is None else dy_NO @ self.low.up_OR

    def input_gradient(self, dy_NO: Tensor, u_NR: Tensor | None) -> Tensor:
        """Gradient of x: `dx = dy W + u A`. On a GPU the first term is rounded before the sum, which is precise enough here."""
        if self.low is None or u_NR is None:
            return dy_NO @ self.linear.weight_OI
        return (u_NR @ self.low.down_RI).addmm_(dy_NO, self.linear.weight_OI)

    def factor_gradients(
        self, x_NI: Tensor, dy_NO: Tensor, low_NR: Tensor | None, u_NR: Tensor | None
    ) -> list[Tensor]:
        """Gradients of A and B of each part in turn, `dA = uᵀ x` and `dB = scaling · dyᵀ t`, in float32."""
        if low_NR is None or u_NR is None:
            return []
        d_down_RI = (u_NR.t() @ x_NI).float()
        gradients: list[Tensor] = []
        for adapted in self.adapted:
            part = adapted.part
            # The transpose of dB: in this order the product takes two thirds of the time.
            d_up_RO = low_NR[:, adapted.start : adapted.end].t() @ dy_NO[:, part.start : part.end]
            d_up_OR = d_up_RO.t().float().mul_(adapted.scaling)
            if part.order is not None:
                d_up_OR = torch.empty_like(d_up_OR).index_copy_(0, part.order, d_up_OR)
            gradients += d_down_RI[adapted.start : adapted.end], d_up_OR
        return gradients
