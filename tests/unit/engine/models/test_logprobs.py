"""Log-probabilities in chunks, against log_softmax in float64."""

import pytest
import torch

from groupwise.engine.models import logprobs
from groupwise.engine.models.decoder import Decoder
from groupwise.engine.models.tiny import tiny_model

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
    found, entropies, *_ = logprobs.token_logprobs(DECODER, *inputs)
    wanted, wanted_entropies = expected(*inputs)
    torch.testing.assert_close(found.double(), wanted, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(entropies.double(), wanted_entropies, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("chunk", [1, 10, 36])
def test_chunks_change_neither_values_nor_gradients(inputs, monkeypatch, chunk):
    def computed(size):
        monkeypatch.setattr(logprobs, "CHUNK", size)
        hidden = inputs[0].clone().requires_grad_(True)
        found, entropies, *_ = logprobs.token_logprobs(DECODER, hidden, *inputs[1:])
        (found * torch.arange(COUNT)).sum().backward()
        return found, entropies, hidden.grad

    for whole, cut in zip(computed(10**6), computed(chunk), strict=True):
        torch.testing.assert_close(cut, whole, atol=1e-6, rtol=1e-5)


def test_a_target_is_right_where_it_is_the_likeliest_token(inputs, monkeypatch):
    monkeypatch.setattr(logprobs, "CHUNK", 10)
    hidden, targets, temperatures = inputs
    likeliest = DECODER.logits(hidden).argmax(-1)
    mixed = torch.where(torch.arange(COUNT) % 3 == 0, likeliest, targets)
    right = logprobs.token_logprobs(DECODER, hidden, mixed, temperatures, accuracy=True).right_N
    assert right is not None
    assert torch.equal(right, mixed == likeliest)
    assert 0 < int(right.sum()) < COUNT
    assert logprobs.token_logprobs(DECODER, *inputs).right_N is None


WITHHELD = torch.tensor([[0, 5], [0, 7], [3, 7], [10, 5], [10, 7], [10, 101], [36, 0], [20, 5000]])
"""Places and tokens, at both ends of chunks; the last pair names a token that the vocabulary does not have."""


def expected_without(hidden, targets, temperatures):
    logits = DECODER.logits(hidden).double() / temperatures.double()[:, None]
    barred = torch.zeros_like(logits, dtype=torch.bool)
    barred[WITHHELD[:-1, 0], WITHHELD[:-1, 1]] = True
    logits = logits.masked_fill(barred, -torch.inf)
    everything = logits.log_softmax(-1)
    plogp = torch.where(barred, 0.0, everything.exp() * everything.masked_fill(barred, 0.0))
    return everything.gather(1, targets[:, None])[:, 0], -plogp.sum(-1)


@pytest.mark.parametrize("chunk", [1, 10])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_withheld_tokens_have_probability_0(inputs, monkeypatch, chunk, entropy_gradient):
    """In values and gradients, of entropies too: against the softmax over the other tokens in float64."""
    monkeypatch.setattr(logprobs, "CHUNK", chunk)
    hidden = inputs[0].clone().requires_grad_(True)
    targets = inputs[1].where(inputs[1] > 10, 11) - (inputs[1] == 101).long()
    found = logprobs.token_logprobs(
        DECODER, hidden, targets, inputs[2], entropy_gradient=entropy_gradient, withheld_X2=WITHHELD
    )
    wanted = expected_without(hidden, targets, inputs[2])
    weights = torch.linspace(-1, 1, COUNT)
    torch.testing.assert_close(found.logprobs_N.double(), wanted[0], atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(found.entropies_N.double(), wanted[1], atol=1e-5, rtol=1e-5)
    for mine, theirs in zip(found[: 1 + entropy_gradient], wanted, strict=False):
        (gradient,) = torch.autograd.grad((mine * weights).sum(), hidden, retain_graph=True)
        (oracle,) = torch.autograd.grad((theirs * weights).sum(), hidden, retain_graph=True)
        torch.testing.assert_close(gradient, oracle, atol=1e-5, rtol=1e-4)
    plain, *_ = logprobs.token_logprobs(DECODER, hidden, targets, inputs[2])
    changed = (found.logprobs_N != plain).nonzero()[:, 0]
    assert changed.tolist() == [0, 3, 10, 36]


def test_the_gradient_is_that_of_log_softmax(inputs):
    hidden = inputs[0].clone().requires_grad_(True)
    found, entropies, *_ = logprobs.token_logprobs(DECODER, hidden, *inputs[1:])
    assert not entropies.requires_grad
    (mine,) = torch.autograd.grad(found.sum(), hidden)
    (wanted,) = torch.autograd.grad(expected(hidden, *inputs[1:])[0].sum(), hidden)
    torch.testing.assert_close(mine, wanted, atol=1e-5, rtol=1e-4)


def test_an_entropy_gradient_is_that_of_the_entropy(inputs):
    hidden = inputs[0].clone().requires_grad_(True)
    found, entropies, *_ = logprobs.token_logprobs(
        DECODER, hidden, *inputs[1:], entropy_gradient=True
    )
    plain = logprobs.token_logprobs(DECODER, *inputs)
    torch.testing.assert_close((found, entropies), tuple(plain[:2]), atol=1e-6, rtol=1e-5)
    (mine,) = torch.autograd.grad(entropies.sum(), hidden)
    (wanted,) = torch.autograd.grad(expected(hidden, *inputs[1:])[1].sum(), hidden)
    torch.testing.assert_close(mine, wanted, atol=1e-5, rtol=1e-4)
