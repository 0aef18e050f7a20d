"""Attention of flat texts against plain attention with a mask and torch's graph, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from groupwise.learner.native import attention
from groupwise.learner.native.attention import attention_of
from groupwise.learner.native.layout import Texts
from groupwise.models.native.weights import Shape

SHAPE = Shape(hidden=24, heads=4, kv_heads=2, head_size=6, vocabulary=10, epsilon=1e-5)
LAYOUTS = {
    "one text": [Texts(0, (7,))],
    "one token": [Texts(0, (1,))],
    "texts of several lengths": [Texts(0, (9, 7, 5))],
    "a group": [Texts(0, (5,)), Texts(5, (6, 6, 6), (0, 5))],
    "uneven completions": [Texts(0, (5,)), Texts(5, (6, 4, 3), (0, 5))],
    "two groups": [
        Texts(0, (19, 17)),
        Texts(36, (8, 8), (19, 17)),
        Texts(52, (9, 7), (0, 19)),
        Texts(68, (2, 1), (0, 19)),
    ],
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
    repeated = [x.repeat_interleave(SHAPE.queries_per_key, dim=1) for x in (keys, values)]
    scores = torch.einsum("nhd,mhd->hnm", queries, repeated[0])
    scores = scores.masked_fill(~visible(texts, len(queries)), -torch.inf)
    return torch.einsum("hnm,mhd->nhd", scores.softmax(-1), repeated[1]).flatten(1)


def inputs(tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values and the gradient of what they find."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*size: int) -> Tensor:
        return torch.randn(tokens, *size, generator=generator, dtype=torch.float64)

    return drawn(4, 6), drawn(2, 6), drawn(2, 6), drawn(24)


@pytest.mark.parametrize(("scores", "queries_at_once"), [(1 << 20, 128), (600, 4), (1, 1)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_values_and_gradients(monkeypatch, name, scores, queries_at_once):
    """However the work is cut into pieces."""
    monkeypatch.setattr(attention, "SCORES", scores)
    monkeypatch.setattr(attention, "QUERIES", queries_at_once)
    texts = LAYOUTS[name]
    queries, keys, values, d_out = inputs(texts[-1].end)
    leaves = [x.clone().requires_grad_() for x in (queries, keys, values)]
    wanted = plain(texts, *leaves)
    wanted_gradients = torch.autograd.grad(wanted, leaves, d_out)

    sets = attention_of(SHAPE, texts, torch.device("cpu"))
    found = torch.full_like(wanted, torch.nan)
    gradient = torch.full((len(found), 8, 6), torch.nan, dtype=torch.float64)
    for each in sets:
        each.forward(queries, keys, values, found)
    for each in sets:
        each.backward(d_out, queries, keys, values, gradient)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(gradient, torch.cat(wanted_gradients, dim=1))


def test_long_texts_are_computed_in_pieces_of_bounded_size():
    shape = Shape(hidden=576, heads=9, kv_heads=3, head_size=64, vocabulary=10, epsilon=1e-5)
    texts = Texts(800, (1024,) * 8, (0, 800))
    (each,) = attention_of(shape, [texts], torch.device("cpu"))
    for piece in each._pieces():
        members = piece.texts.stop - piece.texts.start
        queries = piece.queries.stop - piece.queries.start
        assert members * queries * shape.heads * (800 + piece.queries.stop) <= 3 * attention.SCORES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_setting_of_products_is_put_back(dtype):
    products = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    before = products.fp32_precision
    (each,) = attention_of(SHAPE, LAYOUTS["one text"], torch.device("cpu"))
    queries, keys, values, _ = inputs(7)
    out = torch.empty(7, 24, dtype=dtype)
    each.forward(queries.float(), keys.float(), values.to(dtype), out)
    assert products.fp32_precision == before
