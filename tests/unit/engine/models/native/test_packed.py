"""Products of few rows, by each kind of code: exact sums, nothing rounded, rows that do not depend on others."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from groupwise.engine.models.native import products
from groupwise.engine.models.native.packed import Packed, in_parts, quantized, rotated

HALVES, FLOATS, INT8 = "float32 of bfloat16 numbers", "float32", "int8"
NEEDS_VNNI = pytest.mark.skipif(not products.HAS_VNNI, reason="needs a CPU with AVX512_VNNI")
KINDS = ["pairs", "widened", HALVES, FLOATS, pytest.param(INT8, marks=NEEDS_VNNI)]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=KINDS)
def kind(request, monkeypatch) -> str:
    """Numbers in bfloat16 are multiplied in pairs, where the processor has an instruction for it, or widened."""
    monkeypatch.setattr(products, "USE_PAIRS", request.param in ("pairs", INT8))
    return request.param


def numbers_of(kind: str, *shape: int, seed: int = 0) -> Tensor:
    """Numbers in the format of a kind."""
    numbers = random(*shape, seed=seed)
    if kind == FLOATS:
        return numbers
    return numbers.bfloat16().float() if kind == HALVES else numbers.bfloat16()


def placed(kind: str, inputs: int, ranks: tuple[int, ...], columns: tuple[int, ...]):
    """Parts of an adapter, beside each other from column `columns[0]` on, whose numbers are not those of another format."""
    wide = torch.float32 if kind in (HALVES, FLOATS) else torch.bfloat16
    return [
        (start, end, random(rank, inputs, seed=rank).to(wide), random(end - start, rank).to(wide))
        for rank, start, end in zip(ranks, columns, columns[1:], strict=False)
    ]


def packed(kind: str, weight: Tensor, bias: Tensor | None = None) -> Packed:
    return Packed(weight, bias, int8=kind == INT8)


def by_whole_numbers(weight: Tensor, x: Tensor) -> Tensor:
    """The product with weights and rows in int8, by torch: whole sums, and then two roundings."""
    q_OI, scales_O = quantized(weight)
    rotated_NI = rotated(x)
    peaks_N1 = rotated_NI.abs().amax(1, keepdim=True)
    sums_NO = (rotated_NI * (127 / peaks_N1)).round().double() @ q_OI.double().t()
    return sums_NO.float() * (peaks_N1 / 127) * scales_O


def exact(kind: str, weight: Tensor, bias: Tensor | None, x: Tensor, parts) -> Tensor:
    found = x.double() @ weight.double().t()
    if kind == INT8:
        found = by_whole_numbers(weight, x).double()
    if bias is not None:
        found += bias.double()
    for start, end, down, up in parts:
        found[:, start:end] += (x.double() @ down.double().t()) @ up.double().t()
    return found


def assert_exact(kind: str, product: Packed, weight: Tensor, bias: Tensor | None, x: Tensor, parts):
    found = product.product(x, product.low_rank(parts) if parts else None)
    assert found.dtype == torch.float32
    assert found.is_contiguous()
    torch.testing.assert_close(
        found.double(), exact(kind, weight, bias, x, parts), rtol=1e-5, atol=3e-4
    )


@pytest.mark.parametrize(("rows", "bias"), [(1, True), (7, False), (8, True), (40, True)])
@pytest.mark.parametrize(
    ("ranks", "columns"),
    [((), ()), ((16,), (0, 64)), ((3, 16, 5), (0, 20, 40, 64)), ((40,), (16, 48))],
)
def test_a_product_is_the_exact_sum(kind, rows, bias, ranks, columns):
    weight = numbers_of(kind, 64, 150) / 8
    bias_O = numbers_of(kind, 64, seed=1) if bias else None
    x = numbers_of(FLOATS, rows, 150, seed=2).to(weight.dtype)
    parts = placed(kind, 150, ranks, columns)
    assert_exact(kind, packed(kind, weight, bias_O), weight, bias_O, x, parts)


def test_several_threads_make_the_same_bits(kind):
    weight = numbers_of(kind, 16 * 50 + 3, 30)
    x = numbers_of(FLOATS, 16, 30, seed=2).to(weight.dtype)
    product = packed(kind, weight)
    low = product.low_rank(placed(kind, 30, (5, 7), (0, 400, 803)))
    wanted = product.product(x, low)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.equal(product.product(x, low), wanted)
    finally:
        torch.set_num_threads(before)


def test_a_row_is_the_same_among_any_others(kind):
    weight = numbers_of(kind, 64, 150)
    product = packed(kind, weight)
    low = product.low_rank(placed(kind, 150, (8, 8), (0, 32, 64)))
    x = numbers_of(FLOATS, 40, 150, seed=2).to(weight.dtype)
    whole = product.product(x, low)
    for rows in (8, 16, 24, 32):
        assert torch.equal(product.product(x[-rows:].contiguous(), low), whole[-rows:])


def test_nan_and_infinity_are_not_hidden(kind):
    weight = numbers_of(kind, 64, 150)
    x = numbers_of(FLOATS, 8, 150).to(weight.dtype)
    x[3, 7] = torch.nan
    found = packed(kind, weight).product(x, None)
    assert found[3].isnan().all()
    assert found[[0, 1, 2, 4, 5, 6, 7]].isfinite().all()
    weight[5, 1] = torch.inf
    assert not packed(kind, weight).product(x, None)[:, 5].isfinite().any()


@NEEDS_VNNI
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_is_equal_to_torch_and_near_to_the_exact_product(dtype):
    """With an outlier in the input, whose scale would leave the others without steps if the row were not rotated."""
    weight, x = random(96, 900).to(dtype), random(24, 900, seed=1)
    x[:, 7] += 100
    x[0] = 0
    x = x.to(dtype)
    found = Packed(weight, None, int8=True).product(x, None)
    assert torch.equal(found[0], torch.zeros(96))
    assert torch.equal(found[1:], by_whole_numbers(weight, x[1:]))
    exact_NO = x.double() @ weight.double().t()
    assert (found - exact_NO).square().mean().sqrt() < 0.015 * exact_NO.std()


@pytest.fixture(params=[1, 2, 3])
def threads(request) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("count", [0, 5, 6, 40])
def test_all_is_done_once(threads, count):
    done: list[int] = []
    parts: list[tuple[int, int]] = []

    def work(first: int, last: int) -> None:
        done.extend(range(first, last))
        parts.append((first, last))

    in_parts(work, count, least=3)
    assert sorted(done) == list(range(count))
    assert len(parts) == max(1, min(threads, count // 3))
    assert all(last - first >= min(3, count) for first, last in parts)


def test_parts_are_done_beside_each_other(threads):
    together = threading.Barrier(threads, timeout=60)
    in_parts(lambda *_: together.wait(), threads, least=1)


def test_an_error_of_any_part_is_reported(threads):
    def work(first: int, last: int) -> None:
        if last == 12:
            raise ArithmeticError("the last part")

    with pytest.raises(ArithmeticError, match="the last part"):
        in_parts(work, 12, least=1)


def test_a_fork_has_threads_of_its_own(threads):
    in_parts(lambda *_: None, 12, least=1)
    child = os.fork()
    if child == 0:
        done: list[int] = []
        in_parts(lambda first, last: done.extend(range(first, last)), 12, least=1)
        os._exit(0 if sorted(done) == list(range(12)) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
