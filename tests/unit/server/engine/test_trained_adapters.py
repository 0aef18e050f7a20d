"""Models over a base, in the engine: sampling uses the saved weights, and a model is created again from a stored state."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from groupwise.core.errors import UsageError
from groupwise.core.types import (
    Completion,
    GroupRequest,
    LossSpec,
    OptimiserParams,
    Row,
    SamplingParams,
    TopTokens,
)
from groupwise.engine.sampler.torch_sampler import TorchSampler
from groupwise.server.engine import trained_adapters
from groupwise.server.engine.engine_protocol import OpenModels
from groupwise.server.engine.hosted_parts import EngineParts
from groupwise.server.engine.saved_adapters import SavedFolders
from groupwise.server.engine.tinker_protocol import ModelSpec, SampleRequest, SampleResult, Stored
from groupwise.server.engine.trained_adapters import EngineModels
from tests.meanwhile import right_after

MODEL = "s-1:train:0"
SPEC = ModelSpec("tiny", 4, 1, train_unembed=False)
HEAD = ModelSpec("tiny", 2, 1, train_attn=False, train_mlp=False)
LOSS = LossSpec("given", {"surrogate": "log_probability"})
STEP = OptimiserParams(0.1, None)
PROMPT = (11, 12, 13)
SAMPLE_REQUEST = SampleRequest(PROMPT, (1, 2), SamplingParams(max_tokens=5), prompt_logprobs=True)


def row(*tokens: int) -> Row:
    after = tokens[1:]
    return Row(
        tokens[:1],
        after,
        (0, *[1] * (len(after) - 1)),
        (0.0,) * len(after),
        0.0,
        1.0,
        credits=(0.0, *[1.0] * (len(after) - 1)),
    )


ROWS = [row(11, 12, 13, 14, 15), row(20, 21, 22)]


async def opened(folder: Path, scope: AsyncExitStack, base: str = "tiny") -> EngineModels:
    models = EngineModels(lambda: None, scope)
    await models.open(OpenModels(base, str(folder), 2, 128))
    return models


@pytest.fixture
async def models(tmp_path: Path) -> AsyncGenerator[EngineModels]:
    async with AsyncExitStack() as scope:
        models = await opened(tmp_path, scope)
        await models.create_model(MODEL, SPEC)
        yield models


async def learn(models: EngineModels, keep_as: int | None = None) -> tuple[float, float]:
    result = await models.forward_backward(MODEL, ROWS, LOSS)
    return result.sums["loss/policy"], (await models.optim_step(MODEL, STEP, keep_as)).grad_norm


def tokens(sampled: SampleResult) -> list[tuple[int, ...]]:
    return [each.token_ids for each in sampled.completions]


async def test_a_forward_pass_tells_every_token_and_the_same_sums(models: EngineModels) -> None:
    without = await models.forward(MODEL, ROWS, LOSS)
    with_gradient = await models.forward_backward(MODEL, ROWS, LOSS)
    assert [len(each) for each in without.logprobs] == [4, 2]
    assert with_gradient.logprobs == without.logprobs
    assert with_gradient.sums == pytest.approx(without.sums)
    taught = [value for each in without.logprobs for value in each[1:]]
    assert without.sums["loss/policy"] == pytest.approx(-sum(taught))
    assert (await models.optim_step(MODEL, STEP)).grad_norm > 0


async def test_given_targets_and_several_of_them(models: EngineModels) -> None:
    """Each has its log-probability, and a sum of credits teaches as one pass for each target would."""
    first, second = (30, 31, 32, 33), (40, 41, 42, 43)
    plain = replace(ROWS[0], mask=(1,) * 4, credits=(1.0, 2.0, 3.0, 4.0))
    single = [replace(plain, targets=targets) for targets in (first, second)]
    pairs = tuple(token for both in zip(first, second, strict=True) for token in both)
    several = replace(
        plain,
        targets=pairs,
        mask=(1,) * 8,
        sampling_logprobs=(0.0,) * 8,
        credits=tuple(credit for credit in (1.0, 2.0, 3.0, 4.0) for _ in range(2)),
    )
    apart = await models.forward_backward(MODEL, single, LOSS)
    norm = (await models.optim_step(MODEL, replace(STEP, learning_rate=0.0))).grad_norm
    together = await models.forward_backward(MODEL, [several], LOSS)
    assert (await models.optim_step(MODEL, STEP)).grad_norm == pytest.approx(norm, rel=2e-3)
    assert together.logprobs[0][::2] == pytest.approx(apart.logprobs[0], abs=1e-5)
    assert together.logprobs[0][1::2] == pytest.approx(apart.logprobs[1], abs=1e-5)
    assert together.sums["loss/policy"] == pytest.approx(apart.sums["loss/policy"], rel=1e-5)
    with pytest.raises(
        UsageError, match=r"data\[0\].target_tokens has the token 102; those of tiny"
    ):
        await models.forward(MODEL, [replace(plain, targets=(1, 2, 3, 102))], LOSS)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize("spec", [SPEC, HEAD])
async def test_the_likeliest_and_given_tokens_of_a_sample(
    models: EngineModels, spec: ModelSpec
) -> None:
    """With and without an adapter of the head. Of the whole vocabulary they are a distribution: the one that the other numbers are of."""
    await models.create_model("other", spec)
    await models.forward_backward("other", ROWS, LOSS)
    await models.optim_step("other", STEP)
    await models.save_for_sampler("other", "one", 3)
    stored = Stored("other", "sampler_weights", "one")
    everything = tuple(range(102))
    order = SampleRequest(
        PROMPT,
        (1, 2),
        SamplingParams(max_tokens=5, temperature=0.7),
        prompt_logprobs=True,
        prompt_top=3,
        completion_top=102,
        prompt_targets=(*everything, *(-1 if token == 13 else token for token in everything)),
    )
    result = await models.sample(stored, order)
    assert result.prompt_logprobs is not None
    assert result.target_logprobs is not None
    assert result.prompt_top is not None
    assert result.completion_tops is not None
    places = [result.target_logprobs[:102], result.target_logprobs[102:]]
    assert sum(math.exp(value) for value in places[0]) == pytest.approx(1.0, abs=1e-4)
    assert places[0][12] == pytest.approx(result.prompt_logprobs[0], abs=1e-5)
    assert places[1][13] == 0.0
    best = sorted(range(102), key=places[0].__getitem__, reverse=True)[:3]
    assert result.prompt_top.token_ids[:3] == tuple(best)
    assert result.prompt_top.logprobs[:3] == pytest.approx([places[0][token] for token in best])
    assert len(result.prompt_top.token_ids) == 6
    for completion, top in zip(result.completions, result.completion_tops, strict=True):
        at = {
            (index // 102, token): logprob
            for index, (token, logprob) in enumerate(zip(top.token_ids, top.logprobs, strict=True))
        }
        drawn = [at[place, token] for place, token in enumerate(completion.token_ids)]
        assert drawn == pytest.approx(list(completion.logprobs), abs=2e-2)
    single = await models.sample(
        stored, replace(order, prompt_ids=PROMPT[:1], prompt_targets=(), completion_top=0)
    )
    assert (single.prompt_logprobs, single.completion_tops) == ((), None)
    assert single.prompt_top == TopTokens(3, (), ())
    for wrong, message in (
        (replace(order, prompt_targets=(102,) * 2), "target_prompt_logprobs has the token 102"),
        (replace(order, prompt_top=103), "The 103 most likely tokens are wanted; tiny has 102"),
    ):
        with pytest.raises(UsageError, match=message):
            await models.sample(stored, wrong)


async def test_sampling_uses_the_saved_weights(models: EngineModels) -> None:
    base = await models.sample(None, SAMPLE_REQUEST)
    await learn(models)
    await models.save_for_sampler(MODEL, "one", 3)
    one = Stored(MODEL, "sampler_weights", "one")
    first = await models.sample(one, SAMPLE_REQUEST)
    assert first.prompt_logprobs != base.prompt_logprobs
    trained = await models.forward(MODEL, [row(*PROMPT)], LOSS)
    assert first.prompt_logprobs == trained.logprobs[0]
    for _ in range(3):
        await learn(models)
    assert await models.sample(one, SAMPLE_REQUEST) == first
    again = await models.sample(None, SAMPLE_REQUEST)
    assert (tokens(again), again.prompt_logprobs) == (tokens(base), base.prompt_logprobs)


async def test_weights_saved_again_under_their_name_are_sampled(
    models: EngineModels, tmp_path: Path
) -> None:
    stored = Stored(MODEL, "sampler_weights", "one")
    await models.save_for_sampler(MODEL, "one", 1)
    before = (await models.sample(stored, SAMPLE_REQUEST)).prompt_logprobs
    await learn(models)
    SavedFolders(tmp_path).forget(stored)  # deleted, or expired
    await models.save_for_sampler(MODEL, "one", 4)
    assert (await models.sample(stored, SAMPLE_REQUEST)).prompt_logprobs != before


async def test_more_sets_of_weights_than_samplers(
    models: EngineModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trained_adapters, "SAMPLERS", 2)
    names = [f"n{number}" for number in range(5)]
    alone: list[SampleResult] = []
    for number, name in enumerate(names):
        await learn(models)
        await models.save_for_sampler(MODEL, name, number)
        alone.append(await models.sample(Stored(MODEL, "sampler_weights", name), SAMPLE_REQUEST))
    orders = [Stored(MODEL, "sampler_weights", name) for name in names] * 2
    together = await asyncio.gather(*(models.sample(stored, SAMPLE_REQUEST) for stored in orders))
    assert together == alone * 2


async def test_a_sample_that_is_cancelled_frees_its_sampler(
    models: EngineModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trained_adapters, "SAMPLERS", 1)
    await models.save_for_sampler(MODEL, "one", 1)
    long = SampleRequest(PROMPT, (1,), SamplingParams(max_tokens=100))
    began, generate = asyncio.Event(), TorchSampler.generate

    async def noted(sampler: TorchSampler, request: GroupRequest) -> tuple[Completion, ...]:
        began.set()
        return await generate(sampler, request)

    monkeypatch.setattr(TorchSampler, "generate", noted)
    under_way = asyncio.create_task(models.sample(None, long))
    await began.wait()
    under_way.cancel()
    with pytest.raises(asyncio.CancelledError):
        await under_way
    result = await models.sample(Stored(MODEL, "sampler_weights", "one"), SAMPLE_REQUEST)
    assert len(result.completions) == 2


async def test_a_model_is_made_again(models: EngineModels, tmp_path: Path) -> None:
    one = Stored(MODEL, "weights", "one")
    await learn(models, keep_as=2)
    await models.save_state(MODEL, "one", False, 3)
    expected = [await learn(models) for _ in range(2)]
    async with AsyncExitStack() as scope:
        other = await opened(tmp_path, scope)
        await other.create_model(MODEL, SPEC, 2)
        assert [await learn(other) for _ in range(2)] == expected
        await other.load_state(MODEL, one, True)
        assert [await learn(other) for _ in range(2)] == expected
        await other.load_state(MODEL, one, False)
        fresh = [await learn(other) for _ in range(2)]
        assert (fresh[0] == expected[0], fresh[1] == expected[1]) == (True, False)
        await other.forward_backward(MODEL, ROWS, LOSS)
        await other.load_state(MODEL, one, False)  # which takes the place of the gradient
        assert (await other.optim_step(MODEL, STEP)).grad_norm == 0


@pytest.mark.parametrize("with_optimiser", [True, False])
async def test_weights_that_expire_while_they_are_loaded_are_missing(
    with_optimiser: bool, models: EngineModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await models.save_state(MODEL, "one", False, 1)
    stored = Stored(MODEL, "weights", "one")
    folders = SavedFolders(tmp_path)
    right_after(monkeypatch, SavedFolders, "read", lambda: folders.forget(stored))
    with pytest.raises(UsageError, match="nothing saved as weights/one"):
        await models.load_state(MODEL, stored, with_optimiser)
    assert not folders.path_of(stored).exists()


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
async def test_invalid_requests_are_refused(models: EngineModels, tmp_path: Path) -> None:
    def drawn(most: int, *prompt: int) -> SampleRequest:
        return SampleRequest(prompt or PROMPT, (1,), SamplingParams(max_tokens=most))

    async def expect_refusal(message: str, call: Awaitable[Any]) -> None:
        with pytest.raises(UsageError, match=message):
            await call

    unknown, negative = [ROWS[0], row(1, 900, 2)], [row(1, -5, 2)]
    await expect_refusal(
        r"data\[1\] has the token 900", models.forward_backward(MODEL, unknown, LOSS)
    )
    await expect_refusal(
        r"data\[0\] has the token -5", models.forward_backward(MODEL, negative, LOSS)
    )
    await expect_refusal("3000 tokens", models.forward(MODEL, [row(*[5] * 3000)], LOSS))
    assert (await models.optim_step(MODEL, STEP)).grad_norm == 0
    await expect_refusal("there is room for 128", models.sample(None, drawn(126)))
    await expect_refusal("prompt has the token 900", models.sample(None, drawn(1, 900)))
    other = OpenModels("smollm2-135m-instruct", str(tmp_path), 2, 128)
    await expect_refusal("tiny is in memory", models.open(other))
    await models.create_model("other", HEAD)
    await expect_refusal("End the session", models.create_model("third", SPEC))
    await models.save_state("other", "head", False, 1)
    head = Stored("other", "weights", "head")
    await expect_refusal("They must be equal", models.load_state(MODEL, head, True))
    await models.save_for_sampler("other", "head", 2)
    for_samplers = Stored("other", "sampler_weights", "head")
    await expect_refusal("for samplers alone", models.load_state("other", for_samplers, True))
    await expect_refusal("head already", models.save_state("other", "head", False, 3))
    await models.save_state("other", "head", True, 3)
    await models.drop("other")
    await models.drop("other")
    await expect_refusal("no model 'other'", models.forward("other", ROWS, LOSS))
    assert len((await models.sample(head, SAMPLE_REQUEST)).completions) == 2


async def test_an_engine_asks_no_other_server_for_a_client() -> None:
    sampler = {"engine": "vllm", "url": "http://169.254.169.254"}
    config = {"model": {"name": "tiny"}, "sampler": sampler}
    async with AsyncExitStack() as scope:
        with pytest.raises(UsageError, match="samples itself"):
            await EngineParts(scope).plan("training", config, 20)
