"""Tokens that are left out before one is drawn, against their definitions written out for one row at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.core.types import SamplingParams
from groupwise.engine.sampler.draw import draw_tokens
from groupwise.engine.sampler.restrict import truncated, without_early_stops

FREE = SamplingParams(9)


def random_logits(rows: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


# Stop tokens at the beginning


def test_early_stop_tokens_have_no_probability_until_there_are_enough_tokens():
    logits = random_logits(5, 30)
    before = logits.clone()
    least = SamplingParams(9, stop_token_ids=(3, 29, 400), min_tokens=4)
    found = without_early_stops(logits, [least, least, None, FREE, least], [0, 3, 0, 0, 4])
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
def test_what_is_left_is_what_the_definitions_say(params, seed):
    logits = random_logits(len(params), 60, seed)
    temperatures = torch.tensor([each.temperature for each in params])
    found = truncated(logits, temperatures, params)
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
    """Flat logits too, of which the first tokens that are looked at are not enough. Ties are no matter here: there are none."""
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
    found = truncated(logits, torch.ones(4), [params] * 4)
    assert torch.equal(torch.isneginf(found), torch.isneginf(wanted))


def test_tokens_of_one_logit_stay_together():
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    for params in (SamplingParams(9, top_k=2), SamplingParams(9, top_p=0.6)):
        found = truncated(logits, torch.ones(1), [params])
        assert torch.isfinite(found).tolist() == [[True, True, True, True, False]]


def test_the_token_that_crosses_the_threshold_is_kept_and_the_temperature_counts():
    logits = torch.tensor([[0.4, 0.1, 0.3, 0.2]]).log()
    for top_p, left in ((0.39, [0]), (0.41, [0, 2]), (0.69, [0, 2]), (0.71, [0, 2, 3])):
        found = truncated(logits, torch.ones(1), [SamplingParams(9, top_p=top_p)])
        assert torch.isfinite(found[0]).nonzero()[:, 0].tolist() == left
    hot = truncated(logits, torch.full((1,), 9.0), [SamplingParams(9, 9.0, top_p=0.41)])
    assert torch.isfinite(hot[0]).nonzero()[:, 0].tolist() == [0, 2]
    hot = truncated(logits, torch.full((1,), 9.0), [SamplingParams(9, 9.0, top_p=0.69)])
    assert torch.isfinite(hot[0]).nonzero()[:, 0].tolist() == [0, 2, 3]


def test_a_row_has_the_same_bits_beside_any_others():
    params = [
        SamplingParams(9, 0.7, top_p=0.8), FREE, SamplingParams(9, 1.3, top_k=7, min_p=0.01),
        SamplingParams(9, 0.0), SamplingParams(9, 0.7, top_p=0.8), None,
    ]  # fmt: skip
    logits = random_logits(6, 5000)
    temperatures = torch.tensor([each.temperature if each else 1.0 for each in params])
    found = truncated(logits, temperatures, params)
    for row in (1, 3, 5):
        assert torch.equal(found[row], logits[row])
    order = torch.randperm(6, generator=torch.Generator().manual_seed(1))
    shuffled: Any = [params[place] for place in order]
    assert torch.equal(truncated(logits[order], temperatures[order], shuffled), found[order])


def test_logits_that_are_not_numbers_stay_so():
    logits = random_logits(1, 30)
    logits[0, 4] = math.nan
    params = SamplingParams(9, top_k=3, top_p=0.5, min_p=0.1)
    found = truncated(logits, torch.ones(1), [params])
    _, logprob = draw_tokens(found, torch.ones(1), torch.tensor([0.5], dtype=torch.float64))
    assert not math.isfinite(float(logprob))
