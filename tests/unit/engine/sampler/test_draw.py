"""One uniform number, one token: the exact inverse of the cumulative distribution."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.engine.sampler.chance import uniform
from groupwise.engine.sampler.draw import BLOCK, draw_tokens

SEEDS = st.integers(0, 2**64 - 1)
SIZES = (1, BLOCK - 1, BLOCK, BLOCK + 1, 300)
LAST = 1 - 2**-53
"""The largest number that `uniform` can give."""


def random_logits(rows: int, vocabulary: int, spread: float = 2.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocabulary, generator=generator) * spread


def draw(logits, uniforms, temperature=1.0):
    rows = len(uniforms)
    return draw_tokens(
        logits.expand(rows, -1),
        torch.full((rows,), temperature),
        torch.as_tensor(uniforms, dtype=torch.float64),
    )


# The uniform number


@given(SEEDS, st.integers(0, 10**6))
def test_a_uniform_number_is_in_range_and_a_function_of_its_counter(seed, position):
    found = uniform(seed, position)
    assert 0 <= found < 1
    assert found == uniform(seed, position)
    assert (found * 2**53).is_integer()


@given(SEEDS, SEEDS, st.integers(0, 1000), st.integers(0, 1000))
def test_other_counters_give_other_numbers(seed, other, position, later):
    if (seed, position) != (other, later):
        assert uniform(seed, position) != uniform(other, later)


@pytest.mark.parametrize("numbers", [
    [uniform(7, position) for position in range(20_000)],
    [uniform(seed, 0) for seed in range(20_000)],
])  # fmt: skip
def test_they_are_spread_evenly_and_do_not_follow_each_other(numbers):
    counts = torch.histc(torch.tensor(numbers), bins=50, min=0, max=1)
    chi_square = float(((counts - 400) ** 2 / 400).sum())
    assert chi_square < 94, "beyond 1 in 10,000 for 49 degrees of freedom"
    pairs = torch.tensor([numbers[:-1], numbers[1:]])
    assert abs(float(torch.corrcoef(pairs)[0, 1])) < 0.03


# The inverse


@pytest.mark.parametrize("vocabulary", SIZES)
@pytest.mark.parametrize("temperature", [0.3, 1.7])
def test_over_a_grid_every_token_comes_as_often_as_it_is_probable(vocabulary, temperature):
    logits, grid = random_logits(1, vocabulary), 20_000
    tokens, _ = draw(logits, (torch.arange(grid).double() + 0.5) / grid, temperature)
    counts = torch.bincount(tokens, minlength=vocabulary).double()
    wanted = (logits[0].double() / temperature).softmax(0) * grid
    assert float((counts - wanted).abs().max()) < 1.02, "an exact inverse is off by one at most"
    assert torch.equal(tokens, tokens.sort().values), "the tokens are in the order of the numbers"


@pytest.mark.parametrize("vocabulary", SIZES)
@pytest.mark.parametrize(("spread", "rounding"), [(0.0, 2e-6), (2.0, 2e-6), (1000.0, 2e-3)])
def test_log_probabilities_are_those_of_the_distribution_drawn_from(vocabulary, spread, rounding):
    logits = random_logits(40, vocabulary, spread)
    temperatures = torch.linspace(0.2, 3, 40)
    uniforms = torch.tensor([uniform(1, row) for row in range(40)], dtype=torch.float64)
    tokens, logprobs = draw_tokens(logits, temperatures, uniforms)
    wanted = (logits.double() / temperatures.double()[:, None]).log_softmax(-1)
    wanted = wanted.gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), wanted, atol=rounding, rtol=1e-6)


@pytest.mark.parametrize("vocabulary", [300, 2 * BLOCK])
@pytest.mark.parametrize("temperature", [0.01, 1.0])
def test_what_has_no_probability_is_never_drawn(vocabulary, temperature):
    logits = random_logits(1, vocabulary, spread=5)
    logits[0, ::2] = -torch.inf
    logits[0, :5] = -torch.inf
    logits[0, BLOCK : BLOCK + 90] = -torch.inf
    logits[0, -30:] = -torch.inf
    edges = [0.0, 2**-53, 1e-12, 1 - 1e-12, LAST]
    tokens, logprobs = draw(
        logits, torch.tensor([*edges, *torch.linspace(0, LAST, 3000).tolist()]), temperature
    )
    assert bool(torch.isfinite(logits[0, tokens]).all())
    assert bool(torch.isfinite(logprobs).all())


@pytest.mark.parametrize("vocabulary", SIZES)
def test_the_ends_of_the_range_are_the_ends_of_the_vocabulary(vocabulary):
    tokens, _ = draw(torch.zeros(1, vocabulary), [0.0, LAST])
    assert tokens.tolist() == [0, vocabulary - 1]
    certain = torch.full((1, vocabulary), -torch.inf)
    certain[0, vocabulary // 2] = -5.0
    tokens, logprobs = draw(certain, [0.0, 0.5, LAST])
    assert (tokens.tolist(), logprobs.tolist()) == ([vocabulary // 2] * 3, [0.0] * 3)


def test_greedy_takes_the_most_probable_with_its_log_probability_at_temperature_1():
    logits = random_logits(20, 300)
    uniforms = torch.linspace(0, LAST, 20, dtype=torch.float64)
    tokens, logprobs = draw_tokens(logits, torch.zeros(20), uniforms)
    assert torch.equal(tokens, logits.argmax(-1))
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).amax(-1))


@given(st.permutations(range(9)))
def test_a_row_does_not_see_its_mates(order):
    logits, temperatures = random_logits(9, 300), torch.linspace(0.1, 2, 9)
    uniforms = torch.tensor([uniform(2, row) for row in range(9)], dtype=torch.float64)
    tokens, logprobs = draw_tokens(logits, temperatures, uniforms)
    moved, moved_logprobs = draw_tokens(logits[order], temperatures[order], uniforms[order])
    assert torch.equal(moved, tokens[order])
    assert torch.equal(moved_logprobs, logprobs[order])


def test_logits_that_are_no_numbers_show_in_the_log_probability():
    logits = random_logits(3, 300)
    logits[1, 7] = torch.nan
    tokens, logprobs = draw_tokens(logits, torch.ones(3), torch.full((3,), 0.99).double())
    assert int(tokens.max()) < 300
    assert torch.isfinite(logprobs).tolist() == [True, False, True]
