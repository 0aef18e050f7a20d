"""Attention of texts without a mask against plain attention with a dense one, and the memory that it needs."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from groupwise.engine.models import text_mask, varlen
from groupwise.engine.models.text_mask import TextMask
from tests.unit.engine.learner.native.test_attention import varlen_attn

MASKS = {
    "one text": TextMask(19),
    "a window": TextMask(19, window=5),
    "after a prompt": TextMask(13, past=9),
    "a window after a prompt": TextMask(13, past=9, window=6),
    "packed": TextMask(20, lengths=(11, 9, 17, 1, 2)),
    "packed, with a window": TextMask(20, lengths=(11, 9, 17, 1, 2), window=4),
    "after shared prompts": TextMask(
        20, lengths=(7, 4, 9, 8, 5, 1, 6), prompts=(None, 0, 0, None, 3, 3, 3)
    ),
    "after shared prompts, with a window": TextMask(
        20, lengths=(7, 4, 9, 8, 5, 1, 6), prompts=(None, 0, 0, None, 3, 3, 3), window=4
    ),
}


class Attention(nn.Module):
    num_key_value_groups = 2


def inputs(mask: TextMask, *, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Queries, keys and values of two sequences, four heads and two of keys."""
    generator = torch.Generator().manual_seed(0)
    queries, keys = mask.shape[2:]
    return [
        torch.randn(2, heads, length, 8, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
        for heads, length in ((4, queries), (2, keys), (2, keys))
    ]


@pytest.mark.parametrize("way", ["pieces", "packed kernel"])
@pytest.mark.parametrize("name", MASKS)
def test_values_and_gradients_are_those_of_a_dense_mask(name, way, monkeypatch):
    mask = MASKS[name]
    monkeypatch.setattr(text_mask, "QUERIES", 4)
    if way == "packed kernel":
        monkeypatch.setattr(varlen, "varlen_kernel", lambda: varlen_attn)
        monkeypatch.setattr(varlen, "suits", lambda *_: True)
    given = inputs(mask)
    dense = mask.dense(torch.device("cpu"))[:, None]
    weights = torch.randn(2, mask.queries, 4, 8, dtype=torch.float64)
    results = []
    for each in (mask, dense):
        queries, keys, values = given
        found, _ = text_mask.masked_attention(Attention(), queries, keys, values, each, scaling=0.2)
        results.append((found.detach(), *torch.autograd.grad((found * weights).sum(), given)))
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("name", MASKS)
def test_a_learner_gets_gradients_after_a_sampler_has_computed_the_same_texts(name, monkeypatch):
    """The sampler computes in inference mode, whose tensors no backward pass takes."""
    monkeypatch.setattr(text_mask, "QUERIES", 4)
    for cached in (text_mask._band, text_mask._seen_keys, text_mask._ends):
        cached.cache_clear()
    queries, keys, values = given = inputs(MASKS[name])
    with torch.inference_mode():
        text_mask.masked_attention(Attention(), queries, keys, values, MASKS[name])
    found, _ = text_mask.masked_attention(Attention(), queries, keys, values, MASKS[name])
    assert all(each.any() for each in torch.autograd.grad(found.sum(), given))


class LargestTensor(TorchDispatchMode):
    """Notes the numbers of the largest tensor that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(each, torch.Tensor):
                self.numel = max(self.numel, each.numel())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "mask_of",
    [
        TextMask,
        lambda length: TextMask(length, window=length // 2),
        lambda length: TextMask(length, past=length),
        lambda length: TextMask(length, lengths=(length // 2,) * 4),
        lambda length: TextMask(length, lengths=(length // 2,) * 4, prompts=(None, 0, None, 2)),
    ],
)
def test_memory_grows_with_the_length_and_not_with_its_square(mask_of, dtype, monkeypatch):
    monkeypatch.setattr(text_mask, "QUERIES", 16)
    largest: list[int] = []
    for length in (256, 512):
        mask = mask_of(length)
        with LargestTensor() as seen:
            queries, keys, values = inputs(mask, dtype=dtype)
            found, _ = text_mask.masked_attention(Attention(), queries, keys, values, mask)
            found.sum().backward()
        largest.append(seen.numel)
    assert largest[1] <= 2 * largest[0] < 256**2 * 2
