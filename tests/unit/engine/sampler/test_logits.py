"""Penalties, biases and the most probable tokens: each number against a plain forward pass in float64, with the formulas written out.

1. A drawn token has the log-probability of the changed distribution; the draws differ from those without.
2. A group beside one that changes its logits keeps every bit, and what changes nothing changes no bit.
3. The most probable tokens are the reference's, and the drawn one has the same number among them.
4. A prompt's log-probabilities are those of a forward pass, whatever its length.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from groupwise.core.errors import RunError, UsageError
from groupwise.core.types import GroupRequest, LogitsProcessing, SamplingParams
from groupwise.engine.models.tiny import tiny_model, tiny_tokenizer
from groupwise.engine.sampler import queued
from groupwise.engine.sampler.rules import refuse_changed_draws

TOKENIZER: Any = tiny_tokenizer()
VOCABULARY = tiny_model(seed=4).config.vocab_size
BOTH_ENGINES = pytest.mark.usefixtures("engine")


def request(
    draw=0, members=4, max_tokens=20, top_logprobs=0, prompt="sort these", **params
) -> GroupRequest:
    ids = tuple(TOKENIZER(prompt)["input_ids"])
    seeds = tuple(1000 * draw + member for member in range(members))
    return GroupRequest(draw, ids, seeds, SamplingParams(max_tokens, **params), top_logprobs)


def reference(model: Any, asked: GroupRequest, token_ids: tuple[int, ...]) -> torch.Tensor:
    """Log-probabilities [T, V] in float64, by transformers' forward and the formulas of the penalties."""
    with torch.no_grad():
        whole = torch.tensor([[*asked.prompt_ids, *token_ids]])
        logits_TV = model(input_ids=whole, use_cache=False).logits[0].double()
    logits_TV = logits_TV[len(asked.prompt_ids) - 1 : -1].clone()
    changes = asked.params.processing or LogitsProcessing()
    for position, logits_V in enumerate(logits_TV):
        written = token_ids[:position]
        for token, bias in changes.logit_bias:
            logits_V[token] += bias
        for token in {*asked.prompt_ids, *written}:
            value = logits_V[token].item()
            rate = changes.repetition_penalty
            logits_V[token] = value / rate if value > 0 else value * rate
        for token in {*written}:
            logits_V[token] -= changes.frequency_penalty * written.count(token)
            logits_V[token] -= changes.presence_penalty
    return (logits_TV / (asked.params.temperature or 1.0)).log_softmax(-1)


CHANGES = [
    LogitsProcessing(presence_penalty=1.5),
    LogitsProcessing(frequency_penalty=-0.7),
    LogitsProcessing(repetition_penalty=1.8),
    LogitsProcessing(logit_bias=((5, 4.5), (9, -100.0))),
    LogitsProcessing(1.0, 0.5, 1.3, ((7, 3.0),)),
]


@BOTH_ENGINES
@pytest.mark.parametrize("changes", CHANGES)
async def test_log_probabilities_are_those_of_the_changed_distribution(make_sampler, changes):
    model: Any = tiny_model(seed=4)
    group_request = request(members=6, temperature=0.8, processing=changes)
    sampler = make_sampler(model)
    found = await sampler.generate(group_request)
    for each in found:
        wanted_TV = reference(model, group_request, each.token_ids)
        expected = [float(row[token]) for row, token in zip(wanted_TV, each.token_ids, strict=True)]
        assert each.logprobs == pytest.approx(expected, abs=3e-5)
    unchanged = await sampler.generate(
        replace(group_request, params=replace(group_request.params, processing=None))
    )
    assert [each.token_ids for each in found] != [each.token_ids for each in unchanged]


async def test_the_repetition_penalty_sees_the_models_own_logits(make_sampler):
    """Native logits in bfloat16 are lower by a shift, and the penalty depends on their sign."""
    model: Any = tiny_model(seed=4)
    sampler = make_sampler(model, dtype=torch.bfloat16)
    assert sampler._engine.shift > 0
    group_request = request(members=2, processing=LogitsProcessing(repetition_penalty=4.0))
    for each in await sampler.generate(group_request):
        wanted_TV = reference(model, group_request, each.token_ids)
        expected = [float(row[token]) for row, token in zip(wanted_TV, each.token_ids, strict=True)]
        assert each.logprobs == pytest.approx(expected, abs=0.05)


@BOTH_ENGINES
async def test_changed_logits_do_not_affect_other_requests(make_sampler):
    sampler = make_sampler()
    plain = [request(0, 5), request(1, 3, top_p=0.8), request(2, 2, temperature=0.5, min_tokens=3)]
    alone = [await sampler.generate(each) for each in plain]
    changed = [request(9 + n, 2, processing=changes) for n, changes in enumerate(CHANGES)]
    together = await asyncio.gather(*map(sampler.generate, [*changed, *plain]))
    assert list(together[len(changed) :]) == alone
    neutral = replace(plain[0], params=replace(plain[0].params, processing=LogitsProcessing()))
    assert await sampler.generate(neutral) == alone[0]


async def test_logits_are_not_processed_unless_requested(make_sampler, monkeypatch):
    def never(*_: object) -> None:
        raise AssertionError("it was asked for nothing")

    for name in ("process_row", "top_logprobs"):
        monkeypatch.setattr(queued, name, never)
    assert len(await make_sampler().generate(request())) == 4


@BOTH_ENGINES
@pytest.mark.parametrize(
    "params",
    [{"temperature": 0.7}, {"temperature": 0.0}, {"processing": CHANGES[-1]}],
)
async def test_the_most_probable_tokens(make_sampler, params):
    model: Any = tiny_model(seed=4)
    group_request = request(top_logprobs=5, **params)
    for each in await make_sampler(model).generate(group_request):
        assert len(each.top_logprobs) == len(each.token_ids)
        wanted_TV = reference(model, group_request, each.token_ids)
        rows = zip(wanted_TV, each.token_ids, each.logprobs, each.top_logprobs, strict=True)
        for wanted_V, token, logprob, best in rows:
            expected = wanted_V.topk(5)
            assert [value for _, value in best] == pytest.approx(expected.values.tolist(), abs=3e-5)
            assert dict(best).get(token, logprob) == logprob
            if params.get("temperature") == 0:
                assert best[0][0] == token


async def test_tokens_that_cannot_be_drawn_are_no_alternatives(make_sampler):
    (each,) = await make_sampler().generate(request(members=1, top_logprobs=5, top_k=3))
    assert {len(best) for best in each.top_logprobs} == {3}
    for best in each.top_logprobs:
        assert math.fsum(math.exp(value) for _, value in best) == pytest.approx(1, abs=1e-5)
    group_request = request(members=1, top_logprobs=2 * VOCABULARY)
    (each,) = await make_sampler().generate(group_request)
    assert {len(best) for best in each.top_logprobs} == {VOCABULARY}


@BOTH_ENGINES
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 66, 130])
async def test_the_log_probabilities_of_a_prompt(make_sampler, length):
    model: Any = tiny_model(seed=4)
    prompt = tuple(3 + (7 * position) % 60 for position in range(length))
    found = await make_sampler(model, key_length=192).prompt_logprobs(prompt, 3)
    with torch.no_grad():
        logits_TV = model(input_ids=torch.tensor([prompt])).logits[0].double()
    logprobs_TV = logits_TV[:-1].log_softmax(-1)
    expected = [float(row[token]) for row, token in zip(logprobs_TV, prompt[1:], strict=True)]
    assert found.logprobs == pytest.approx(expected, abs=3e-5)
    assert len(found.top_logprobs) == length - 1
    for best, row in zip(found.top_logprobs, logprobs_TV, strict=True):
        assert [value for _, value in best] == pytest.approx(row.topk(3).values.tolist(), abs=3e-5)


async def test_a_prompt_is_scored_beside_completions_and_refused_if_it_is_too_long(make_sampler):
    sampler = make_sampler()
    alone = await sampler.generate(request())
    drawing = asyncio.create_task(sampler.generate(request()))
    await asyncio.sleep(0)
    assert (await sampler.prompt_logprobs((5, 6, 7), 0)).top_logprobs == ()
    assert await drawing == alone
    for prompt in ((), (5,) * 49):
        with pytest.raises(RunError, match=str(len(prompt))):
            await sampler.prompt_logprobs(prompt, 0)


def test_samplers_without_them_refuse_them_by_name():
    refuse_changed_draws(request(top_p=0.5, min_tokens=2), "it")
    for group_request, name in (
        (request(processing=CHANGES[0]), "presence_penalty"),
        (request(processing=CHANGES[3]), "logit_bias"),
        (request(top_logprobs=1), "top_logprobs"),
    ):
        with pytest.raises(UsageError, match=name):
            refuse_changed_draws(group_request, "it")
