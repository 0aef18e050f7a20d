"""Products of few rows in each order of the weights: exact sums, one rounding, rows that do not depend on others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from groupwise.models.native import bfloat16_products
from groupwise.models.native.packed import Bfloat16Packed, OrderedPacked, Packed, packed

needs_the_instruction = pytest.mark.skipif(
    not bfloat16_products.usable(), reason="this processor has no AVX512_BF16"
)
ALL = [
    pytest.param(Bfloat16Packed, torch.bfloat16, marks=needs_the_instruction),
    (OrderedPacked, torch.bfloat16),
    (OrderedPacked, torch.float32),
]
OUTPUTS, INPUTS = 64, 50


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def placed(dtype: torch.dtype, ranks: tuple[int, ...], columns: tuple[int, ...]):
    """Parts of an adapter, beside each other from column `columns[0]` on."""
    return [
        (start, end, random(rank, INPUTS, seed=rank).to(dtype), random(end - start, rank).to(dtype))
        for rank, start, end in zip(ranks, columns, columns[1:], strict=False)
    ]


def exact(weight: Tensor, bias: Tensor | None, x: Tensor, parts) -> Tensor:
    found = x.double() @ weight.double().t()
    if bias is not None:
        found += bias.double()
    for start, end, down, up in parts:
        found[:, start:end] += (x.double() @ down.double().t()) @ up.double().t()
    return found


@pytest.mark.parametrize(("kind", "dtype"), ALL)
@pytest.mark.parametrize("rows", [1, 7, 8, 16, 24, 40])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("ranks", "columns"),
    [
        ((), ()),
        ((16,), (0, 64)),
        ((3, 16, 5), (0, 20, 40, 64)),
        ((8,), (30, 31)),
        ((40,), (16, 48)),
    ],
)
def test_a_product_is_the_exact_sum(kind, dtype, rows, bias, ranks, columns):
    weight = (random(OUTPUTS, INPUTS) / 7).to(dtype)
    bias_O = random(OUTPUTS, seed=1).to(dtype) if bias else None
    x = random(rows, INPUTS, seed=2).to(dtype)
    parts = placed(dtype, ranks, columns)
    product: Packed = kind(weight, bias_O)
    found = product.product(x, product.low_rank(parts) if parts else None)
    assert found.dtype == (torch.float32 if kind is Bfloat16Packed else dtype)
    assert found.shape == (rows, OUTPUTS)
    wanted = exact(weight, bias_O, x, parts)
    added = wanted - exact(weight, bias_O, x, [])
    step = 2.0**-8 if dtype == torch.bfloat16 else 1e-4
    # oneDNN is given what the adapter adds rounded by itself: one more rounding of that.
    assert ((found.double() - wanted).abs() <= step * (wanted.abs() + added.abs() + 0.1)).all()


@needs_the_instruction
def test_nothing_is_rounded():
    weight = random(OUTPUTS, INPUTS).bfloat16()
    x = random(8, INPUTS, seed=2).bfloat16()
    parts = placed(torch.bfloat16, (16,), (0, 64))
    bias = random(OUTPUTS, seed=1).bfloat16()
    product = Bfloat16Packed(weight, bias)
    found = product.product(x, product.low_rank(parts))
    torch.testing.assert_close(found.double(), exact(weight, bias, x, parts), rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize(("kind", "dtype"), ALL)
def test_a_row_is_the_same_among_any_others(kind, dtype):
    weight = random(OUTPUTS, INPUTS).to(dtype)
    product: Packed = kind(weight, None)
    low = product.low_rank(placed(dtype, (8, 8), (0, 32, 64)))
    x = random(40, INPUTS, seed=2).to(dtype)
    whole = product.product(x, low)
    for rows in (8, 16, 24, 32):
        assert torch.equal(product.product(x[-rows:].contiguous(), low), whole[-rows:])


@needs_the_instruction
def test_our_own_order_is_taken_where_it_fits():
    assert isinstance(packed(random(64, 50).bfloat16(), None), Bfloat16Packed)
    for weight in (random(64, 50), random(63, 50).bfloat16(), random(64, 51).bfloat16()):
        assert isinstance(packed(weight, None), OrderedPacked)


@pytest.mark.parametrize(("kind", "dtype"), ALL)
def test_what_is_no_number_is_not_hidden(kind, dtype):
    product: Packed = kind(random(OUTPUTS, INPUTS).to(dtype), None)
    x = random(8, INPUTS).to(dtype)
    x[3, 7] = torch.nan
    found = product.product(x, None)
    assert found[3].isnan().all()
    assert found[[0, 1, 2, 4, 5, 6, 7]].isfinite().all()
