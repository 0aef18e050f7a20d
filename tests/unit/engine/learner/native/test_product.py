"""An adapted product lets small changes act on a rounded base; its values and gradients are in those of the engine."""

from __future__ import annotations

import pytest
import torch

from groupwise.engine.learner.native import product
from groupwise.engine.learner.native.product import Product
from groupwise.engine.models.native.linear import Factors, Linear, Part


def drawn(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(
    ("rate", "bias", "at_once"),
    [(1e-6, True, False), (1e-5, False, False), (1e-4, True, False), (1e-5, True, True)],
)
def test_a_small_change_acts_in_full_on_a_rounded_base(
    monkeypatch, rate: float, bias: bool, at_once: bool
):
    """After one AdamW step every entry of B is ± the learning rate. How much of that reaches the output?

    Rounding makes the answer unsure by about 1 % for so many rows.
    """
    monkeypatch.setattr(product, "rounds_before_adding", lambda x: at_once)
    bias_O = drawn(192, seed=5).bfloat16() if bias else None
    linear = Linear((Part("q", 0, 192),), (drawn(192, 256, seed=1) / 16).bfloat16(), bias_O)
    down, up = drawn(16, 256, seed=2) / 16, rate * drawn(192, 16, seed=3).sign()
    inputs = drawn(1 << (15 if rate == 1e-6 else 13), 256, seed=4).bfloat16()

    def computed(up: torch.Tensor) -> torch.Tensor:
        return Product(linear, {"q": Factors(down.float(), up.float(), 2.0)}).forward(inputs)[0]

    plain, changed = computed(torch.zeros_like(up)), computed(up)
    exact = 2.0 * (inputs.double() @ down.t()) @ up.t()
    realised = changed.double() - plain.double()
    assert changed.dtype == torch.bfloat16
    assert 0.95 < float((realised * exact).sum() / (exact * exact).sum()) < 1.05
