"""Completions drawn while Unsloth generates are those that the default sampler draws."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from groupwise.core.types import GroupRequest, SamplingParams
from groupwise.engine.backends.unsloth.library import load
from groupwise.engine.backends.unsloth.sampler import UnslothSampler
from groupwise.engine.models.load import load_model
from groupwise.engine.models.tiny import tiny_tokenizer
from groupwise.engine.sampler.queued import DecodeLayout
from groupwise.engine.sampler.torch_sampler import TorchSampler
from groupwise.engine.sampler.weights import ServedModel
from tests import unsloth

TOKENIZER: Any = tiny_tokenizer()
END = (TOKENIZER.eos_token_id,)
MIXED = [
    GroupRequest(1, (3, 1, 4), (10, 11, 12), SamplingParams(12, stop_token_ids=END)),
    GroupRequest(2, (2,), (20,), SamplingParams(1, 0.0, END)),
    GroupRequest(3, (7, 7, 7, 7, 7, 9), (30, 31), SamplingParams(9, 0.7, END, min_tokens=3)),
    GroupRequest(4, (5, 6), (40, 41, 42, 43, 44), SamplingParams(20, 1.3, END, stop=("ab",))),
]


def sampler(longest: int = 48) -> UnslothSampler:
    served = ServedModel(load(unsloth.TINY, "float32", longest))
    return UnslothSampler(served, TOKENIZER, DecodeLayout(8, longest))


async def all_of(chosen: Any, requests: list[GroupRequest] = MIXED) -> list[Any]:
    groups = await asyncio.gather(*map(chosen.generate, requests))
    return [each for group in groups for each in group]


async def test_it_draws_what_the_default_sampler_draws() -> None:
    reference = TorchSampler(
        ServedModel(load_model(unsloth.TINY, "float32")), TOKENIZER, DecodeLayout(8, 48), native=False
    )  # fmt: skip
    found, wanted = await all_of(sampler()), await all_of(reference)
    assert [each.token_ids for each in found] == [each.token_ids for each in wanted]
    assert [each.finish_reason for each in found] == [each.finish_reason for each in wanted]
    for each, other in zip(found, wanted, strict=True):
        assert each.logprobs == pytest.approx(other.logprobs, abs=1e-5)


async def test_prompts_and_completions_that_do_not_fit_together_are_drawn_apart() -> None:
    """The longest prompt beside the longest completion would be longer than the model is laid out for."""
    long, short = (5,) * 40, (3,)
    asked = [
        GroupRequest(1, long, (1,), SamplingParams(8, 1.0)),
        GroupRequest(2, short, (2,), SamplingParams(47, 1.0)),
    ]
    found = await all_of(sampler(), asked)
    assert [len(each.token_ids) for each in found] == [8, 47]


async def test_a_program_that_ends_does_not_wait_for_long_completions() -> None:
    chosen = sampler(4096)
    steps = 0
    model: Any = chosen._weights.model
    forward, begun = model.forward, asyncio.Event()
    loop = asyncio.get_running_loop()

    def counted(*words: Any, **more: Any) -> Any:
        nonlocal steps
        steps += 1
        loop.call_soon_threadsafe(begun.set)
        return forward(*words, **more)

    model.forward = counted
    endless = GroupRequest(1, (3,), (1,), SamplingParams(4000, 1.0))
    asking = asyncio.create_task(chosen.generate(endless))
    await begun.wait()
    assert chosen._driver is not None
    chosen._driver.cancel()
    await asyncio.wait([chosen._driver])
    await loop.shutdown_default_executor()
    assert steps < 1000
    asking.cancel()
