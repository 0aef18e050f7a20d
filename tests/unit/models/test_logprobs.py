"""Log-probabilities in chunks, against log_softmax in float64."""

import pytest
import torch

from groupwise.models import logprobs
from groupwise.models.decoder import Decoder
from groupwise.models.tiny import tiny_model

DECODER = Decoder(tiny_model(seed=2).requires_grad_(False))
COUNT = 37


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(COUNT, 16, generator=generator) * 3
    targets = torch.randint(0, 102, (COUNT,), generator=generator)
    temperatures = torch.linspace(0.3, 2.0, COUNT)
    return hidden, targets, temperatures


def expected(hidden, targets, temperatures):
    logits = DECODER.logits(hidden).double() / temperatures.double()[:, None]
    everything = logits.log_softmax(-1)
    entropies = -(everything.exp() * everything).sum(-1)
    return everything.gather(1, targets[:, None])[:, 0], entropies


def test_values_are_those_of_log_softmax_at_the_temperature(inputs):
    found, entropies = logprobs.token_logprobs(DECODER, *inputs)
    wanted, wanted_entropies = expected(*inputs)
    torch.testing.assert_close(found.double(), wanted, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(entropies.double(), wanted_entropies, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("chunk", [1, 10, 36, 37, 38])
def test_chunks_change_neither_values_nor_gradients(inputs, monkeypatch, chunk):
    def computed(size):
        monkeypatch.setattr(logprobs, "CHUNK", size)
        hidden = inputs[0].clone().requires_grad_(True)
        found, entropies = logprobs.token_logprobs(DECODER, hidden, *inputs[1:])
        (found * torch.arange(COUNT)).sum().backward()
        return found, entropies, hidden.grad

    for whole, cut in zip(computed(10**6), computed(chunk), strict=True):
        torch.testing.assert_close(cut, whole, atol=1e-6, rtol=1e-5)


def test_the_gradient_is_that_of_log_softmax(inputs):
    hidden = inputs[0].clone().requires_grad_(True)
    found, entropies = logprobs.token_logprobs(DECODER, hidden, *inputs[1:])
    assert not entropies.requires_grad
    (mine,) = torch.autograd.grad(found.sum(), hidden)
    (wanted,) = torch.autograd.grad(expected(hidden, *inputs[1:])[0].sum(), hidden)
    torch.testing.assert_close(mine, wanted, atol=1e-5, rtol=1e-4)


def test_an_entropy_gradient_is_that_of_the_entropy(inputs):
    hidden = inputs[0].clone().requires_grad_(True)
    found, entropies = logprobs.token_logprobs(DECODER, hidden, *inputs[1:], entropy_gradient=True)
    plain = logprobs.token_logprobs(DECODER, *inputs)
    torch.testing.assert_close((found, entropies), plain, atol=1e-6, rtol=1e-5)
    (mine,) = torch.autograd.grad(entropies.sum(), hidden)
    (wanted,) = torch.autograd.grad(expected(hidden, *inputs[1:])[1].sum(), hidden)
    torch.testing.assert_close(mine, wanted, atol=1e-5, rtol=1e-4)


def test_without_a_gradient_the_values_are_the_same(inputs):
    with_gradient = logprobs.token_logprobs(DECODER, *inputs)
    with torch.no_grad():
        without = logprobs.token_logprobs(DECODER, *inputs)
    assert torch.equal(with_gradient[0], without[0])
    assert torch.equal(with_gradient[1], without[1])


def test_half_precision_hidden_states_give_float32():
    model = tiny_model(seed=2).bfloat16()
    hidden = torch.randn(3, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    found, entropies = logprobs.token_logprobs(
        Decoder(model), hidden, torch.tensor([1, 2, 3]), torch.ones(3)
    )
    assert found.dtype == entropies.dtype == torch.float32
