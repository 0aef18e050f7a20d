"""Linear layers and experts round their weights again in the backward pass: same results as torch's autocast and as bfloat16 weights."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GptOssConfig, Qwen3MoeConfig

from groupwise.engine.learner.rounded_linear import round_again_in_backward
from groupwise.engine.models.experts import experts_of
from tests.unit.engine.models.native.families import SMALL, made

SIZE = 16
HEADS: dict[str, Any] = {"head_dim": 8}


def passed(model: nn.Module, x: Tensor, *, rounding: bool = True) -> tuple[Tensor, list[Tensor]]:
    """Output, and gradients of input and parameters."""
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False, enabled=rounding):
        y = model(x)
        (y.float() ** 2).sum().backward()
    assert x.grad is not None
    return y.detach(), [x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.fixture
def model():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(SIZE, 3 * SIZE), nn.SiLU(), nn.Linear(3 * SIZE, 5, bias=False))
    changed = copy.deepcopy(layers)
    round_again_in_backward(changed)
    return layers, changed


@pytest.mark.parametrize("rounding", [True, False])
@pytest.mark.parametrize("shape", [(7, SIZE), (2, 7, SIZE)])
def test_outputs_and_gradients_are_those_of_autocast(model, rounding, shape):
    x = torch.randn(shape)
    (expected, wanted), (found, gradients) = (passed(each, x, rounding=rounding) for each in model)
    assert found.dtype == expected.dtype == (torch.bfloat16 if rounding else torch.float32)
    torch.testing.assert_close(found, expected, atol=0, rtol=0)
    for mine, theirs in zip(gradients, wanted, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, theirs, atol=0, rtol=0)


def test_no_rounded_weight_is_kept_for_the_backward_pass(model):
    weights = {each.weight.shape for each in model[0] if isinstance(each, nn.Linear)}
    weights |= {shape[::-1] for shape in weights}
    kept: list[list[Tensor]] = []
    for each in model:
        kept.append([])
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: kept[-1].append(t) or t, lambda t: t
        ):
            passed(each, torch.randn(2, 7, SIZE))
    rounded = [
        [t for t in tensors if t.shape in weights and t.dtype == torch.bfloat16] for tensors in kept
    ]
    assert (len(rounded[0]), rounded[1]) == (2, [])


@pytest.mark.parametrize("config", [
    Qwen3MoeConfig(**SMALL, num_experts_per_tok=2, num_experts=4, moe_intermediate_size=24, **HEADS),
    GptOssConfig(**SMALL, num_experts_per_tok=2, num_local_experts=4, **HEADS),
], ids=["qwen3_moe", "gpt_oss"])  # fmt: skip
def test_experts_multiply_in_bfloat16(monkeypatch, config):
    """Outputs and gradients are those of weights that were rounded before; the factors of every product are rounded."""
    layer = next(iter(experts_of(made(config).requires_grad_(True)).values()))
    rounded = copy.deepcopy(layer).to(torch.bfloat16)
    round_again_in_backward(layer)
    formats: set[torch.dtype] = set()
    grouped_mm = F.grouped_mm

    def multiply(one: Tensor, other: Tensor, **options: Any) -> Tensor:
        formats.update((one.dtype, other.dtype))
        return grouped_mm(one, other, **options)

    monkeypatch.setattr(F, "grouped_mm", multiply)
    x_NH = torch.randn(9, SMALL["hidden_size"], generator=torch.Generator().manual_seed(3))
    chosen_NK = torch.tensor([[0, 3], [3, 1], [0, 1]] * 3)
    found: list[list[Tensor]] = []
    for each, given in ((layer, x_NH), (rounded, x_NH.to(torch.bfloat16))):
        given = given.clone().requires_grad_()
        shares_NK = torch.full((9, 2), 0.5, dtype=given.dtype)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False, enabled=each is layer):
            y_NH = each(given, chosen_NK, shares_NK)
        assert y_NH.dtype == given.dtype
        slopes = torch.autograd.grad((y_NH.float() ** 2).sum(), [given, *each.parameters()])
        assert {slope.dtype for slope in slopes} == {given.dtype}
        found.append([y_NH, *slopes])
        assert formats == {torch.bfloat16}
    for one, other in zip(*found, strict=True):
        largest = float(other.detach().abs().max())
        torch.testing.assert_close(one, other.float(), atol=0.02 * largest, rtol=0)
