"""Linear layers that round their weights again for the gradient, against torch's autocast."""

import copy

import pytest
import torch
from torch import Tensor, nn

from groupwise.engine.learner.rounded_linear import round_again_in_backward

SIZE = 16


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
