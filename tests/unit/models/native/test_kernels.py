"""The compiled kernels against their definitions in float64: in both number formats, at every size at which a loop ends otherwise."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from groupwise.models.native import compiled, kernels
from groupwise.models.native.compiled import STRETCH, array

FORMATS = [torch.float32, torch.bfloat16]
EPSILON = 1e-5


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """No further than one rounding to the format, and what float32 sums cost."""
    relative = 2.0**-8 if dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(found.double(), wanted, rtol=relative, atol=2e-6)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("size", [1, 15, 64, 577])
def test_norm(size, dtype):
    x, weight = random(5, size), random(size, seed=1)
    wanted = x.double() / (x.double().square().mean(-1, keepdim=True) + EPSILON).sqrt()
    found = compiled.normed(x, weight, EPSILON, dtype)
    assert found.dtype == dtype
    close(found, wanted * weight.double(), dtype)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("size", [1, 24, 129])
def test_swiglu(size, dtype):
    x = random(3, 2 * size, dtype=dtype) * 4
    gate, up = x.double().chunk(2, dim=-1)
    close(compiled.gated(x, dtype), gate / (1 + (-gate).exp()) * up, dtype)


def test_swiglu_of_extremes():
    gate = torch.tensor([-1e30, -100.0, -88.5, -0.0, 100.0, 1e30, torch.inf, torch.nan])
    found = compiled.gated(torch.cat([gate, torch.ones(8)])[None], torch.float32)[0]
    wanted = torch.nn.functional.silu(gate)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-30, equal_nan=True)


def test_bfloat16_is_rounded_to_the_nearest_half_to_even():
    numbers = torch.tensor([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1e-30])
    numbers = torch.cat([numbers, random(2000) * 100])
    weight = torch.ones(1)
    # A norm of rows of one number without epsilon would be ±1; with a huge one it is the number divided by its root.
    found = compiled.normed(numbers[:, None], weight * 2.0**40, 2.0**80, torch.bfloat16)[:, 0]
    exact = numbers.double() / (numbers.double().square() / 2.0**80 + 1).sqrt()
    assert torch.equal(found, exact.float().bfloat16())


# Attention


def in_blocks(keys_BDT: Tensor) -> Tensor:
    """As [B, K, D, STRETCH]."""
    return keys_BDT.unflatten(-1, (-1, STRETCH)).transpose(1, 2).contiguous()


class Attention:
    """Rows with keys and values of their own and of prompts, and what a row's queries find by the definition."""

    def __init__(
        self, dtype: torch.dtype, written: list[int], lengths: list[int], *, norms: bool
    ) -> None:
        self.dtype, self.written, self.lengths = dtype, written, lengths
        self.kv_heads, self.repeat, self.size = 2, 3, 16
        rows, heads = len(written), self.kv_heads * self.repeat
        self.qkv = random(rows, (heads + 2 * self.kv_heads) * self.size, dtype=dtype)
        self.turns = random(rows, self.size // 2, 2, seed=1)
        self.keys = random(rows * self.kv_heads, self.size, 80, seed=2)
        self.values = random(rows * self.kv_heads, 80, self.size, seed=3, dtype=dtype)
        rooms = [-(-length // 16) * 16 for length in lengths]
        self.prompt_keys = [random(self.kv_heads, self.size, room, seed=4 + room) for room in rooms]
        self.prompt_values = [
            random(self.kv_heads, room, self.size, seed=5 + room, dtype=dtype) for room in rooms
        ]
        self.norms = [random(self.size, seed=seed) if norms else torch.empty(0) for seed in (8, 9)]

    def found(self) -> Tensor:
        """By the kernel."""
        rows = len(self.written)
        prompts = np.zeros((rows, 4), np.int64)
        each = zip(self.prompt_keys, self.prompt_values, self.lengths, strict=True)
        blocks = [in_blocks(keys) for keys in self.prompt_keys]
        for n, (keys, values, length) in enumerate(each):
            prompts[n] = blocks[n].data_ptr(), values.data_ptr(), length, keys.shape[-1] // STRETCH
        own = in_blocks(self.keys)
        into = self.qkv.new_empty(rows, self.kv_heads * self.repeat * self.size)
        kernels.attend(
            array(self.qkv),
            array(self.turns),
            array(self.norms[0]),
            array(self.norms[1]),
            np.float32(EPSILON),
            self.kv_heads,
            array(own),
            array(self.values),
            np.array(self.written),
            prompts,
            array(into),
        )
        self.keys = own.transpose(1, 2).flatten(2)
        return into

    def turned(self, row: int, head: int, norm: Tensor) -> Tensor:
        """A query or key in float64, after its norm and at its position."""
        x = self.qkv[row].double().view(-1, self.size)[head]
        if len(norm):
            x = x / (x.square().mean() + EPSILON).sqrt() * norm.double()
        turn = torch.view_as_complex(self.turns[row].double())
        return torch.view_as_real(torch.view_as_complex(x.view(-1, 2)) * turn).flatten()

    def wanted(self, row: int) -> Tensor:
        """By the definition, in float64; called before the kernel writes keys and values."""
        heads, at, length = self.kv_heads * self.repeat, self.written[row], self.lengths[row]
        results: list[Tensor] = []
        for head in range(heads):
            j = head // self.repeat
            own = row * self.kv_heads + j
            value = self.qkv[row].double().view(-1, self.size)[heads + self.kv_heads + j]
            keys = torch.cat(
                [
                    self.keys[own, :, :at].double().t(),
                    self.turned(row, heads + j, self.norms[1])[None],
                    self.prompt_keys[row][j, :, :length].double().t(),
                ]
            )
            values = torch.cat(
                [
                    self.values[own, :at].double(),
                    value[None],
                    self.prompt_values[row][j, :length].double(),
                ]
            )
            scores = keys @ self.turned(row, head, self.norms[0]) / self.size**0.5
            results.append(scores.softmax(0) @ values)
        return torch.cat(results)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("dtype", FORMATS)
def test_attention(dtype, norms):
    case = Attention(dtype, [0, 1, 14, 15, 16, 79], [1, 15, 16, 17, 33, 64], norms=norms)
    wanted = torch.stack([case.wanted(row) for row in range(6)])
    torch.testing.assert_close(
        case.found().double(),
        wanted,
        rtol=2**-8 if dtype == torch.bfloat16 else 1e-5,
        atol=1e-6 if dtype == torch.float32 else 1e-4,
    )


def test_the_new_key_and_value_stand_behind_those_of_the_row():
    case = Attention(torch.float32, [3, 40], [5, 5], norms=False)
    keys, values = case.keys.clone(), case.values.clone()
    wanted = case.turned(1, 6, case.norms[1])
    case.found()
    torch.testing.assert_close(case.keys[2, :, 40].double(), wanted)
    changed = (case.keys != keys).any(1).nonzero().tolist()
    assert changed == [[0, 3], [1, 3], [2, 40], [3, 40]]
    assert (case.values != values).any(2).nonzero().tolist() == changed


@pytest.mark.parametrize("dtype", FORMATS)
def test_what_stands_behind_the_keys_and_in_other_rows_does_not_change_a_bit(dtype):
    one, other = (Attention(dtype, [3, 20], [5, 30], norms=False) for _ in range(2))
    other.keys[:2, :, 4:], other.values[:2, 4:] = 1e4, -1e4
    other.keys[2:], other.values[2:], other.qkv[1] = 9, 9, 9
    other.prompt_keys[0][:, :, 5:], other.prompt_values[0][:, 5:] = 1e4, -1e4
    assert torch.equal(one.found()[0], other.found()[0])


@pytest.mark.parametrize("where", ["query", "own key", "prompt"])
def test_what_is_no_number_is_not_hidden(where):
    case = Attention(torch.float32, [3, 3], [5, 5], norms=False)
    spoilt = {"query": case.qkv, "own key": case.keys, "prompt": case.prompt_keys[0]}[where]
    spoilt[0, 0] = torch.nan
    found = case.found()
    assert found[0, :16].isnan().all()
    assert found[1].isfinite().all()
