"""An adapted product: values and gradients against torch's graph, and that small changes act on a rounded base."""

from __future__ import annotations

import pytest
import torch

from groupwise.learner.native.product import Product
from groupwise.models.native.linear import Factors, Linear, Part

ORDER = torch.tensor([2, 0, 3, 1])
PARTS = (Part("q", 0, 4, ORDER), Part("k", 4, 6), Part("v", 6, 9))


def drawn(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def factors(names: str) -> dict[str, Factors]:
    sizes = {"q": (4, 3), "k": (2, 1), "v": (3, 2)}
    return {
        name: Factors(
            drawn(sizes[name][1], 5, seed=1 + index).requires_grad_(),
            drawn(*sizes[name], seed=11 + index).requires_grad_(),
            0.5 + index,
        )
        for index, name in enumerate(names)
    }


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("names", ["", "q", "kv", "qkv"])
def test_values_and_gradients(names: str, bias: bool):
    linear = Linear(PARTS, drawn(9, 5, seed=21), drawn(9, seed=22) if bias else None)
    adapter = factors(names)
    x, dy = drawn(7, 5, seed=31).requires_grad_(), drawn(7, 9, seed=32)
    columns = [x @ linear.weight_OI[part.start : part.end].t() for part in PARTS]
    for number, part in enumerate(PARTS):
        if part.path in adapter:
            each = adapter[part.path]
            added = each.scaling * (x @ each.down_RI.t()) @ each.up_OR.t()
            columns[number] = columns[number] + (
                added if part.order is None else added[:, part.order]
            )
    wanted = torch.cat(columns, dim=1) + (linear.bias_O if linear.bias_O is not None else 0.0)
    wanted.backward(dy)

    with torch.no_grad():
        product = Product(linear, adapter)
        found, low = product.forward(x)
        u = product.low_gradient(dy)
        gradients = product.factor_gradients(x, dy, low, u)
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(product.input_gradient(dy, u), x.grad)
    trained = [
        factor
        for each in product.adapted
        for factor in (adapter[each.part.path].down_RI, adapter[each.part.path].up_OR)
    ]
    assert len(trained) == len(gradients) == 2 * len(names)
    for factor, gradient in zip(trained, gradients, strict=True):
        assert factor.grad is not None
        torch.testing.assert_close(gradient, factor.grad.float())


@pytest.mark.parametrize(("rate", "bias"), [(1e-6, True), (1e-5, False), (1e-4, True)])
def test_a_small_change_acts_in_full_on_a_rounded_base(rate: float, bias: bool):
    """After one AdamW step every entry of B is ± the learning rate. How much of that reaches the output?

    Rounding makes the answer unsure by about 1 % for so many rows.
    """
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
