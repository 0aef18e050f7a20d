"""Gradients by hand of what stands between products, against torch's graph, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from groupwise.learner.native import elementwise
from groupwise.learner.native.elementwise import (
    add_norm_gradient,
    norm_scale,
    norm_with_gradient,
    swiglu,
    swiglu_with_gradient,
    turn_back_,
)
from groupwise.models.native import compiled


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_norm():
    x, weight, dy, before = drawn(5, 8), drawn(8, seed=1), drawn(5, 8, seed=2), drawn(5, 8, seed=3)
    x[2] = 0.0
    x.requires_grad_()
    y = F.rms_norm(x, (8,), weight, 1e-3)
    y.backward(dy)
    scale = norm_scale(x.detach(), 1e-3)
    torch.testing.assert_close(x.detach() * scale * weight, y.detach())
    found = before.clone()
    add_norm_gradient(found, dy, x.detach(), scale, weight)
    assert x.grad is not None
    torch.testing.assert_close(found, before + x.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norm_once_more_with_its_gradient(dtype):
    """Compiled in float32; without a gradient only the norm."""
    x, weight, dy, before = drawn(5, 24), drawn(24, seed=1), drawn(5, 24, seed=2), drawn(5, 24)
    x.requires_grad_()
    y = F.rms_norm(x, (24,), weight, 1e-3)
    y.backward(dy)
    assert x.grad is not None
    x_NH, weight_H, dy_NH = (each.detach().to(dtype) for each in (x, weight, dy))
    found = before.to(dtype, copy=True)
    again = norm_with_gradient(x_NH, weight_H, 1e-3, dtype, dy_NH, found)
    torch.testing.assert_close(again.double(), y.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.double(), before + x.grad, rtol=1e-5, atol=1e-5)
    alone = norm_with_gradient(x_NH, weight_H, 1e-3, dtype, None, None)
    torch.testing.assert_close(alone, again, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("threads", [1, 2])
def test_swiglu_by_either_way(threads):
    """One thread has kernels, several have torch's operations; both round once."""
    before = torch.get_num_threads()
    gate_up, dy = drawn(70, 24).bfloat16(), drawn(70, 12, seed=1).bfloat16()
    exact, slopes = swiglu_with_gradient(gate_up.double(), dy.double())
    try:
        torch.set_num_threads(threads)
        assert compiled.suits(gate_up) == (threads == 1)
        found = swiglu(gate_up)
        again, gradient = swiglu_with_gradient(gate_up, dy)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(again, found)
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(gradient.double(), slopes, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("rows", [2, 64])
def test_swiglu(monkeypatch, rows):
    monkeypatch.setattr(elementwise, "ROWS_IN_CACHE", rows)
    gate_up, dy = drawn(5, 12).requires_grad_(), drawn(5, 6, seed=1)
    gate, up = gate_up.chunk(2, dim=-1)
    y = F.silu(gate) * up
    y.backward(dy)
    torch.testing.assert_close(swiglu(gate_up.detach()), y.detach())
    again, gradient = swiglu_with_gradient(gate_up.detach(), dy)
    torch.testing.assert_close(again, y.detach())
    torch.testing.assert_close(gradient, gate_up.grad)


def test_rotary_positions():
    x, dy = drawn(5, 3, 8).requires_grad_(), drawn(5, 3, 8, seed=1)
    angles = drawn(5, 4, seed=2)
    rotations = torch.polar(torch.full_like(angles, 0.3), angles)[:, None]
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * rotations
    torch.view_as_real(turned).flatten(-2).backward(dy)
    turn_back_(dy, rotations)
    torch.testing.assert_close(dy, x.grad)
