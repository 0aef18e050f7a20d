"""The head natively, against `plain_head`."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from groupwise.engine.learner import head_numbers as shared
from groupwise.engine.learner.native import head
from groupwise.engine.learner.native.head import token_numbers
from groupwise.engine.learner.targets import ForwardOutputs, Targets
from groupwise.engine.models.decoder import Decoder
from groupwise.engine.models.native import compiled
from groupwise.engine.models.native.weights import NativeModel
from groupwise.engine.models.tiny import tiny_model
from tests.unit.engine.learner.plain_head import plain_numbers

COUNT = 21


@pytest.fixture(scope="module")
def model():
    made = tiny_model(hidden_size=32, seed=3)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(3.0)
    return made


def asked(
    *,
    entropy_gradient: bool = False,
    accuracy: bool = False,
    withheld: bool = False,
    several: int | None = None,
):
    generator = torch.Generator().manual_seed(1)
    pairs = [[0, 5], [0, 6], [7, 5], [20, 101], [20, 500]]
    return Targets(
        torch.randint(10, 100, (COUNT, *filter(None, [several])), generator=generator),
        torch.rand(COUNT, generator=generator) + 0.5,
        torch.tensor(pairs) if withheld else None,
        ForwardOutputs(entropy_gradient, accuracy),
    )


def residuals() -> torch.Tensor:
    return torch.randn(COUNT, 32, generator=torch.Generator().manual_seed(2)).requires_grad_()


def by_graph(model, residual_NH, wanted: Targets):
    return plain_numbers(Decoder(model).logits(model.model.norm(residual_NH)), wanted)


def head_numbers(logits_CV, temperatures_C, targets_C, *, gradient, entropy_CV):
    """What the kernel of this name computes on a GPU; `tests/device_checks.py` holds that against torch."""
    scaled = logits_CV / temperatures_C[:, None]
    p, normaliser = scaled.softmax(-1), scaled.logsumexp(-1)
    logs = torch.where(p > 0, scaled - normaliser[:, None], 0.0)
    entropies = -(p * logs).sum(-1)
    if gradient:
        if entropy_CV is not None:
            entropy_CV.copy_(p * (logs + entropies[:, None]))
        logits_CV.copy_(p)
        if targets_C is not None:
            logits_CV[torch.arange(len(p)), targets_C] -= 1
    return normaliser, entropies, scaled.argmax(-1)


@pytest.mark.parametrize(("chunk", "rows"), [(5, 2), (256, 16), (5, "numba"), (5, "triton")])
@pytest.mark.parametrize("withheld", [False, True])
@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("several", [None, 3])
def test_values_and_gradients(monkeypatch, model, several, entropy_gradient, withheld, chunk, rows):
    monkeypatch.setattr(head, "CHUNK", chunk)
    monkeypatch.setattr(shared, "CHUNK", chunk)
    if rows == "triton":
        kernels = SimpleNamespace(head_numbers=head_numbers)
        monkeypatch.setattr(shared, "_kernels_for", lambda _: kernels)
    elif rows != "numba":
        monkeypatch.setattr(shared, "ROWS_IN_CACHE", rows)
        monkeypatch.setattr(compiled, "numba_works", lambda: False)
    wanted = asked(
        entropy_gradient=entropy_gradient, withheld=withheld, accuracy=True, several=several
    )
    native = NativeModel(model)
    weights = torch.randn(2, COUNT, generator=torch.Generator().manual_seed(4))
    factors = torch.randn(wanted.ids_N.shape, generator=torch.Generator().manual_seed(5))
    results, slopes = [], []
    for compute in (by_graph, token_numbers):
        residual_NH = residuals()
        found = compute(native if compute is token_numbers else model, residual_NH, wanted)
        total = (found.logprobs_N * factors).sum()
        if entropy_gradient:
            total = total + (found.entropies_N * weights[1]).sum()
        elif compute is token_numbers:
            assert not found.entropies_N.requires_grad
        total.backward()
        results.append(found)
        slopes.append(residual_NH.grad)
    torch.testing.assert_close(
        results[1].logprobs_N.double(), results[0].logprobs_N, atol=4e-6, rtol=1e-5
    )
    torch.testing.assert_close(
        results[1].entropies_N.double(), results[0].entropies_N, atol=1e-5, rtol=1e-5
    )
    assert torch.equal(results[1].right_N, results[0].right_N)
    torch.testing.assert_close(slopes[1], slopes[0], rtol=1e-4, atol=1e-5)


def test_a_token_that_is_all_but_impossible_has_a_finite_logprob(model):
    """Its probability is 0 in float32."""
    native, wanted = NativeModel(model), asked()
    cold = replace(wanted, temperatures_N=torch.full((COUNT,), 1e-3))
    with torch.no_grad():
        found = token_numbers(native, residuals(), cold)
        graph = by_graph(model, residuals(), cold)
    assert float(found.logprobs_N.min()) < -200
    torch.testing.assert_close(found.logprobs_N.double(), graph.logprobs_N, rtol=1e-4, atol=1e-2)
