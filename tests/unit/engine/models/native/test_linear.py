"""One matrix product with the adapters of its parts: exact sums, in either order of the weights, to one rounding."""

from __future__ import annotations

import pytest
import torch

from groupwise.engine.models.native.linear import Factors, Linear, Part

SIZES = (24, 8, 8)
INPUTS = 40
ORDER = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
"""Of the second part's rows."""


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def three_parts(dtype: torch.dtype, *, bias: bool) -> Linear:
    orders, parts, start = (None, ORDER, None), [], 0
    for name, size, order in zip("abc", SIZES, orders, strict=True):
        parts.append(Part(name, start, start + size, order))
        start += size
    weight = (random(sum(SIZES), INPUTS) / INPUTS**0.5).to(dtype)
    return Linear(parts, weight, random(sum(SIZES), seed=1).to(dtype) if bias else None)


def factors(name: str, scaling: float, rank: int) -> Factors:
    rows = SIZES["abc".index(name)]
    return Factors(random(rank, INPUTS, seed=5) / 6, random(rows, rank, seed=6) / 2, scaling)


ADAPTERS = {
    "none": {},
    "one": {"c": factors("c", 0.5, 3)},
    "two": {"a": factors("a", 2.0, 3), "b": factors("b", 1.0, 5)},
    "all": {"a": factors("a", 2.0, 4), "b": factors("b", 3.0, 4), "c": factors("c", 0.5, 4)},
    "others": {"elsewhere": factors("a", 9.0, 2)},
}


def exact(linear: Linear, x: torch.Tensor, adapter: dict[str, Factors]) -> torch.Tensor:
    """By the definition, part by part, in float64."""
    found = x.double() @ linear.weight_OI.double().t()
    if linear.bias_O is not None:
        found = found + linear.bias_O.double()
    for part in linear.parts:
        if part.path in adapter:
            each = adapter[part.path]
            low = each.scaling * (x.double() @ each.down_RI.double().t()) @ each.up_OR.double().t()
            found[:, part.start : part.end] += low if part.order is None else low[:, part.order]
    return found


@pytest.mark.parametrize(("rows", "bias"), [(1, True), (33, False)])
@pytest.mark.parametrize("chosen", ADAPTERS)
def test_a_product_is_the_exact_sum_of_its_parts(chosen, rows, bias):
    """An adapter of other layers adds nothing at all."""
    adapter = ADAPTERS[chosen]
    linear = three_parts(torch.float32, bias=bias)
    x = random(rows, INPUTS, seed=2)
    wanted = exact(linear, x, adapter)
    results = [linear.many(x, linear.low_rank(adapter)), linear.few(x, linear.low_rank(adapter))]
    linear.pack()
    low = linear.packed_low_rank(adapter)
    assert (low is None) == (chosen in ("none", "others"))
    results += [linear.few(x, low), linear.many(x, linear.low_rank(adapter))]
    for found in results:
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chosen", ["none", "all"])
def test_in_bfloat16_many_rows_are_rounded_once_and_few_not_at_all(chosen, bias):
    """Beside the sum, many rows have what the adapter adds rounded by itself."""
    linear = three_parts(torch.bfloat16, bias=bias)
    x = random(64, INPUTS, seed=2).bfloat16()
    rounded = {
        name: Factors(each.down_RI.bfloat16(), (each.up_OR * each.scaling).bfloat16(), 1.0)
        for name, each in ADAPTERS[chosen].items()
    }
    wanted = exact(linear, x, rounded)
    many = linear.many(x, linear.low_rank(ADAPTERS[chosen]))
    linear.pack()
    few = linear.few(x, linear.packed_low_rank(ADAPTERS[chosen]))
    assert (many.dtype, few.dtype) == (torch.bfloat16, torch.float32)
    half_a_step = 2.0**-9 * wanted.abs().mean()
    assert float((many.double() - wanted).abs().mean()) < 1.6 * half_a_step
    torch.testing.assert_close(few.double(), wanted, rtol=1e-5, atol=1e-5)


def test_packed_weights_are_a_copy_and_factors_are_read_at_each_call():
    linear = three_parts(torch.float32, bias=False)
    linear.pack()
    x = random(8, INPUTS, seed=2)
    given = {"a": Factors(random(2, INPUTS), torch.zeros(24, 2), 1.0)}
    assert torch.equal(linear.few(x, linear.packed_low_rank(given)), linear.few(x))
    given["a"].up_OR.fill_(1.0)
    changed = linear.few(x, linear.packed_low_rank(given))
    torch.testing.assert_close(changed.double(), exact(linear, x, given), rtol=1e-5, atol=1e-5)


# Float32 by oneDNN


# Small changes on a base in bfloat16


ROWS = {1e-4: 1 << 11, 1e-5: 1 << 13, 1e-6: 1 << 16}
"""So many that they make a slope sure to about 1 %; products of few rows are not rounded."""


def slope(linear: Linear, learning_rate: float, *, few: bool) -> float:
    """How much reaches the output of a change of B by ± the learning rate, as one AdamW step makes it."""
    outputs, inputs = linear.weight_OI.shape
    down = (torch.rand(16, inputs, generator=torch.Generator().manual_seed(1)) * 2 - 1) / 16
    step = learning_rate * torch.sign(random(outputs, 16, seed=2))
    x = random(1 << 10 if few else ROWS[learning_rate], inputs, seed=3).bfloat16()

    def product(up: torch.Tensor) -> torch.Tensor:
        given = {"x": Factors(down, up, 2.0)}
        if few:
            return linear.few(x, linear.packed_low_rank(given)).double()
        return linear.many(x, linear.low_rank(given)).double()

    wanted = 2.0 * (x.double() @ down.double().t()) @ step.double().t()
    realised = product(step) - product(torch.zeros_like(step))
    return float((realised * wanted).sum() / (wanted * wanted).sum())


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize(("learning_rate", "bias"), [(1e-4, 1.0), (1e-5, 0.0), (1e-6, 0.1)])
def test_a_small_change_acts_in_full_on_a_rounded_base(learning_rate, bias, few):
    """Also beside a bias, whose rounding would swallow it."""
    weight = (random(128, 256) / 16).bfloat16()
    bias_O = (random(128, seed=9) * bias).bfloat16() if bias else None
    linear = Linear([Part("x", 0, 128)], weight, bias_O)
    linear.pack()
    assert 0.95 < slope(linear, learning_rate, few=few) < 1.05
