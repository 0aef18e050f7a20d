"""One uniform number, one token: the exact inverse of the cumulative distribution."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.core.types import SamplingParams
from groupwise.engine.models.native import compiled
from groupwise.engine.models.native.facts import VOCABULARY_BLOCK
from groupwise.engine.sampler.draw import draw_tokens, mask_early_stops, truncate
from groupwise.engine.sampler.rules import uniform

SEEDS = st.integers(0, 2**64 - 1)
SIZES = (1, VOCABULARY_BLOCK - 1, VOCABULARY_BLOCK, VOCABULARY_BLOCK + 1, 300)
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


@pytest.mark.parametrize("vocabulary", [300, 2 * VOCABULARY_BLOCK])
@pytest.mark.parametrize("temperature", [0.01, 1.0])
def test_tokens_with_probability_zero_are_never_drawn(vocabulary, temperature):
    logits = random_logits(1, vocabulary, spread=5)
    logits[0, ::2] = -torch.inf
    logits[0, :5] = -torch.inf
    logits[0, VOCABULARY_BLOCK : VOCABULARY_BLOCK + 90] = -torch.inf
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


@pytest.mark.parametrize("vocabulary", SIZES)
def test_the_kernel_draws_what_torch_draws(vocabulary, monkeypatch):
    logits, temperatures = random_logits(60, vocabulary), torch.linspace(0.2, 2, 60)
    temperatures[::7] = 0
    logits[::3, 1::5] = -torch.inf
    uniforms = torch.tensor([uniform(5, row) for row in range(60)], dtype=torch.float64)
    tokens, logprobs = draw_tokens(logits, temperatures, uniforms)
    monkeypatch.setattr(compiled, "numba_works", lambda: False)
    wanted, wanted_logprobs = draw_tokens(logits, temperatures, uniforms)
    assert torch.equal(tokens, wanted)
    torch.testing.assert_close(logprobs, wanted_logprobs, atol=2e-6, rtol=1e-6)


FREE = SamplingParams(9)


def wide_logits(rows: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


# Stop tokens at the beginning


def test_early_stop_tokens_have_no_probability_until_there_are_enough_tokens():
    logits = wide_logits(5, 30)
    before = logits.clone()
    least = SamplingParams(9, stop_token_ids=(3, 29, 400), min_tokens=4)
    found = mask_early_stops(logits, [least, least, None, FREE, least], [0, 3, 0, 0, 4])
    assert torch.equal(logits, before), "a group's first logits are used again"
    left_out = torch.zeros(5, 30, dtype=torch.bool)
    left_out[:2, [3, 29]] = True
    assert torch.equal(torch.isneginf(found), left_out)
    assert torch.equal(found[~left_out], before[~left_out])


# Improbable tokens


def kept(
    logits: list[float], temperature: float, params: SamplingParams, *, slack: float = 0.0
) -> set[int]:
    """By the definitions: the most probable top_k, of these those that reach top_p, of these those with the share min_p."""
    scaled = [value / temperature for value in logits]
    peak = max(scaled)
    chances = {token: math.exp(value - peak) for token, value in enumerate(scaled)}
    order = sorted(chances, key=lambda token: -chances[token])
    if params.top_k is not None:
        order = order[: params.top_k]
    if params.top_p is not None:
        total, reached, taken = math.fsum(chances[token] for token in order), 0.0, []
        for token in order:
            taken.append(token)
            reached += chances[token] / total
            if reached >= params.top_p + slack:
                break
        order = taken
    if params.min_p is not None:
        order = [token for token in order if chances[token] >= params.min_p - slack]
    return set(order)


TRUNCATIONS = st.builds(
    SamplingParams,
    max_tokens=st.just(9),
    temperature=st.sampled_from([0.4, 1.0, 1.7]),
    top_k=st.none() | st.integers(1, 70),
    top_p=st.none() | st.floats(0.01, 0.999),
    min_p=st.none() | st.floats(0.001, 1.0),
)


@given(st.lists(TRUNCATIONS, min_size=1, max_size=6), st.integers(0, 1000))
def test_truncation_keeps_the_tokens_of_its_definition(params, seed):
    logits = wide_logits(len(params), 60, seed)
    temperatures = torch.tensor([each.temperature for each in params])
    found = truncate(logits, temperatures, params)
    for row, each in enumerate(params):
        left = set(torch.isfinite(found[row]).nonzero()[:, 0].tolist())
        values = logits[row].double().tolist()
        # A sum that meets the threshold to the last bit of float32 may go either way.
        loose, tight = (kept(values, each.temperature, each, slack=by) for by in (1e-5, -1e-5))
        assert left in (loose, tight, kept(values, each.temperature, each))
        assert left, "at least one token is kept"
        assert int(logits[row].argmax()) in left
        stays = torch.isfinite(found[row])
        assert torch.equal(found[row][stays], logits[row][stays]), "the rest keeps its bits"


@pytest.mark.parametrize("spread", [0.0, 3.0])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(9, top_p=0.95),
        SamplingParams(9, top_k=700, top_p=0.6),
        SamplingParams(9, top_p=0.999, min_p=0.01),
    ],
    ids=str,
)
def test_a_large_vocabulary_keeps_what_transformers_keeps(params, spread):
    """Flat logits too, of which the first tokens that are looked at are not enough. Ties do not matter here: there are none."""
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    rng = torch.Generator().manual_seed(3)
    logits = torch.rand(4, 20_000, generator=rng, dtype=torch.float64) * 1e-3
    logits += spread * torch.randn(4, 20_000, generator=rng, dtype=torch.float64)
    wanted: Any = logits
    no_ids: Any = None
    for warper, value in (
        (TopKLogitsWarper, params.top_k),
        (TopPLogitsWarper, params.top_p),
        (MinPLogitsWarper, params.min_p),
    ):
        wanted = wanted if value is None else warper(value)(no_ids, wanted)
    found = truncate(logits, torch.ones(4), [params] * 4)
    assert torch.equal(torch.isneginf(found), torch.isneginf(wanted))


def test_tokens_of_one_logit_stay_together():
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    for params in (SamplingParams(9, top_k=2), SamplingParams(9, top_p=0.6)):
        found = truncate(logits, torch.ones(1), [params])
        assert torch.isfinite(found).tolist() == [[True, True, True, True, False]]


def test_the_token_that_crosses_the_threshold_is_kept_and_the_temperature_counts():
    logits = torch.tensor([[0.4, 0.1, 0.3, 0.2]]).log()
    for top_p, left in ((0.39, [0]), (0.41, [0, 2]), (0.69, [0, 2]), (0.71, [0, 2, 3])):
        found = truncate(logits, torch.ones(1), [SamplingParams(9, top_p=top_p)])
        assert torch.isfinite(found[0]).nonzero()[:, 0].tolist() == left
    hot = truncate(logits, torch.full((1,), 9.0), [SamplingParams(9, 9.0, top_p=0.41)])
    assert torch.isfinite(hot[0]).nonzero()[:, 0].tolist() == [0, 2]
    hot = truncate(logits, torch.full((1,), 9.0), [SamplingParams(9, 9.0, top_p=0.69)])
    assert torch.isfinite(hot[0]).nonzero()[:, 0].tolist() == [0, 2, 3]


def test_a_row_has_the_same_bits_beside_any_others():
    params = [
        SamplingParams(9, 0.7, top_p=0.8), FREE, SamplingParams(9, 1.3, top_k=7, min_p=0.01),
        SamplingParams(9, 0.0), SamplingParams(9, 0.7, top_p=0.8), None,
    ]  # fmt: skip
    logits = wide_logits(6, 5000)
    temperatures = torch.tensor([each.temperature if each else 1.0 for each in params])
    found = truncate(logits, temperatures, params)
    for row in (1, 3, 5):
        assert torch.equal(found[row], logits[row])
    order = torch.randperm(6, generator=torch.Generator().manual_seed(1))
    shuffled: Any = [params[place] for place in order]
    assert torch.equal(truncate(logits[order], temperatures[order], shuffled), found[order])


def test_logits_that_are_not_numbers_stay_so():
    logits = wide_logits(1, 30)
    logits[0, 4] = math.nan
    params = SamplingParams(9, top_k=3, top_p=0.5, min_p=0.1)
    found = truncate(logits, torch.ones(1), [params])
    _, logprob = draw_tokens(found, torch.ones(1), torch.tensor([0.5], dtype=torch.float64))
    assert not math.isfinite(float(logprob))
