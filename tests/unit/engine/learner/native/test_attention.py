"""Attention of flat texts, both that of a processor and that of a GPU, against plain attention with a mask and torch's graph.

In float64, and in bfloat16 as near as two ways of rounding are. What a GPU computes by its own kernels is in `tests/gpu`.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from groupwise.engine.learner.native.attention import RotatedAttention
from groupwise.engine.learner.native.compiled_attention import CompiledAttention
from groupwise.engine.learner.native.fused_attention import fused_attention
from groupwise.engine.learner.native.layout import Texts
from groupwise.engine.learner.native.packed_attention import PackedAttention
from groupwise.engine.models import varlen
from groupwise.engine.models.native.forward import text_attention
from groupwise.engine.models.native.weights import Shape

SHAPE = Shape(hidden=24, heads=4, kv_heads=2, head_size=6, vocabulary=10, epsilon=1e-5)
LAYOUTS = {
    "one text": [Texts(0, (7,))], "one token": [Texts(0, (1,))], "texts of several lengths": [Texts(0, (9, 7, 5))],
    "a group": [Texts(0, (5,)), Texts(5, (6, 6, 6), (0, 5))], "uneven completions": [Texts(0, (5,)), Texts(5, (6, 4, 3), (0, 5))],
    "two groups": [Texts(0, (19, 17)), Texts(36, (8, 8), (19, 17)), Texts(52, (9, 7), (0, 19)), Texts(68, (2, 1), (0, 19))],
}  # fmt: skip

LONGER = {
    **LAYOUTS,
    "more queries than one group": [Texts(0, (33,)), Texts(33, (90, 64, 47), (0, 33))],
}


def visible(texts: list[Texts], tokens: int) -> Tensor:
    """[N, N]: which token sees which."""
    found = torch.zeros(tokens, tokens, dtype=torch.bool)
    for each in texts:
        start = each.start
        for length in each.lengths:
            here = slice(start, start + length)
            found[here, here] = torch.ones(length, length, dtype=torch.bool).tril()
            if each.prompt is not None:
                found[here, each.prompt[0] : sum(each.prompt)] = True
            start += length
    return found


def plain(texts: list[Texts], queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Of queries that nothing was divided of yet."""
    queries_per_key = queries.shape[1] // keys.shape[1]
    repeated = [x.repeat_interleave(queries_per_key, dim=1) for x in (keys, values)]
    scores = torch.einsum("nhd,mhd->hnm", queries, repeated[0]) / queries.shape[2] ** 0.5
    scores = scores.masked_fill(~visible(texts, len(queries)), -torch.inf)
    return torch.einsum("hnm,mhd->nhd", scores.softmax(-1), repeated[1]).flatten(1)


def inputs(tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values and the gradient of what they find."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*size: int) -> Tensor:
        return torch.randn(tokens, *size, generator=generator, dtype=torch.float64)

    return drawn(4, 6), drawn(2, 6), drawn(2, 6), drawn(24)


def found_by(
    attention: Sequence[RotatedAttention],
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    d_out: Tensor,
) -> tuple[Tensor, Tensor]:
    """What all sets of texts find, and the gradients of queries, keys and values beside each other."""
    heads = queries.shape[1]
    found = torch.full_like(d_out, torch.nan, dtype=values.dtype)
    gradient = queries.new_full(
        (len(found), heads + 2 * keys.shape[1], queries.shape[2]), torch.nan
    )
    for each in attention:
        each.forward(queries, keys, values, found)
    for each in attention:
        each.backward(d_out.to(values.dtype), queries, keys, values, gradient)
    return found, gradient


def wanted_of(
    texts: list[Texts], queries: Tensor, keys: Tensor, values: Tensor, d_out: Tensor
) -> tuple[Tensor, Tensor]:
    leaves = [x.clone().requires_grad_() for x in (queries, keys, values)]
    wanted = plain(texts, *leaves)
    return wanted.detach(), torch.cat(torch.autograd.grad(wanted, leaves, d_out), dim=1)


def varlen_attn(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    ends: Tensor,
    key_ends: Tensor,
    *_: int,
    window_size: tuple[int, int],
    enable_gqa: bool = False,
    scale: float | None,
) -> Tensor:
    """What torch's function of this name computes on a GPU: the last query of each text sees its last key."""
    assert window_size[1] == 0
    assert enable_gqa == (queries.shape[1] != keys.shape[1])
    found: list[Tensor] = []
    for number in range(len(ends) - 1):
        here, there = (slice(*each[number : number + 2].tolist()) for each in (ends, key_ends))
        given = (x[None].transpose(1, 2) for x in (queries[here], keys[there], values[there]))
        queries_keys = here.stop - here.start, there.stop - there.start
        past = queries_keys[1] - queries_keys[0]
        mask = torch.ones(queries_keys, dtype=torch.bool).tril(past)
        if window_size[0] >= 0:
            mask = mask.triu(past - window_size[0])
        each = F.scaled_dot_product_attention(*given, attn_mask=mask, enable_gqa=True, scale=scale)
        found.append(each[0].transpose(0, 1))
    return torch.cat(found)


WAYS = {"fused": fused_attention, "packed": lambda *given: [PackedAttention(*given)]}


@pytest.fixture(params=WAYS)
def attention_of(request, monkeypatch):
    """Something that makes attention of texts."""
    monkeypatch.setattr(varlen, "varlen_kernel", lambda: varlen_attn)
    return WAYS[request.param]


@pytest.mark.parametrize("name", LAYOUTS)
def test_values_and_gradients(name, attention_of):
    texts = LAYOUTS[name]
    given = inputs(texts[-1].end)
    found = found_by(attention_of(SHAPE, texts, torch.device("cpu")), *given)
    torch.testing.assert_close(found, wanted_of(texts, *given))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize("norms", [True, False], ids=["norms of heads", "no norms"])
@pytest.mark.parametrize("name", LONGER)
def test_compiled_values_and_gradients(name, norms, dtype, close, threads):
    """With rotations and norms of heads; on several threads they have the same bits."""
    texts = LONGER[name]
    tokens = texts[-1].end
    generator = torch.Generator().manual_seed(0)

    def drawn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    qkv, d_out = drawn(tokens, 8 * 6).to(dtype), drawn(tokens, 24).to(dtype)
    rotations = torch.polar(0.5 + torch.rand(tokens, 1, 3, generator=generator), torch.ones(1))
    weights = [1 + 0.1 * drawn(6) for _ in range(2)] if norms else [None, None]
    layer: Any = SimpleNamespace(
        **{
            name: None if weight is None else weight.float()
            for name, weight in zip(("query_norm_D", "key_norm_D"), weights, strict=True)
        }
    )
    leaf = qkv.double().requires_grad_()
    queries, keys, values = leaf.view(tokens, 8, 6).split([4, 2, 2], dim=1)
    rotated = (
        turned(x, weight, rotations) for x, weight in zip((queries, keys), weights, strict=True)
    )
    wanted = plain(texts, next(rotated), next(rotated), values)
    (wanted_gradient,) = torch.autograd.grad(wanted, leaf, d_out.double())

    model: Any = SimpleNamespace(shape=SHAPE)
    before = torch.get_num_threads()
    found: list[tuple[Tensor, Tensor]] = []
    try:
        for count in {1, threads}:
            torch.set_num_threads(count)
            each = CompiledAttention(model, rotations, texts)
            found.append((each.forward(layer, qkv), each.backward(layer, qkv, d_out)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(mine, other) for mine, other in zip(found[0], found[-1], strict=True))
    for mine, expected in zip(found[0], (wanted.detach(), wanted_gradient), strict=True):
        assert mine.dtype == dtype
        scale = float(expected.abs().max())
        torch.testing.assert_close(mine.double(), expected, rtol=close, atol=close * scale)


def turned(x: Tensor, weight: Tensor | None, rotations: Tensor) -> Tensor:
    """Heads after their norm and rotation."""
    if weight is not None:
        x = x * (x.square().mean(-1, keepdim=True) + SHAPE.epsilon).rsqrt() * weight
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * rotations).flatten(-2)


@pytest.mark.parametrize("size", [64, 128])
def test_fused_kernels_find_what_the_sampler_does(size):
    """To the bit: both round queries first and divide afterwards, which matters where the root of the size is not a power of two."""
    shape = Shape(hidden=32, heads=2, kv_heads=1, head_size=size, vocabulary=10, epsilon=1e-5)
    generator = torch.Generator().manual_seed(0)
    queries, keys, values = (
        2 * torch.randn(9, heads, size, generator=generator) for heads in (2, 1, 1)
    )
    values = values.bfloat16()
    (each,) = fused_attention(shape, [Texts(0, (9,))], torch.device("cpu"))
    found = torch.empty(9, 2 * size, dtype=torch.bfloat16)
    each.forward(queries, keys, values, found)
    model: Any = SimpleNamespace(dtype=torch.bfloat16)
    assert torch.equal(found, text_attention(model, queries, keys, values))
