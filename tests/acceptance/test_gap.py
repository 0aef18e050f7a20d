"""The gap between the log-probabilities of sampler and learner, on the bundled model, while an adapter is trained.

In bfloat16 both round, each in its own way. What they differ by must be small from the beginning, and stay so while the adapter grows.
"""

import asyncio
from pathlib import Path
from statistics import fmean

import pytest

from groupwise.algorithms.registry import make
from groupwise.core.types import GroupRequest, OptimiserParams, Row, SamplingParams
from groupwise.engine.learner.torch_learner import TorchLearner
from groupwise.engine.learner.weights import TrainedAdapter
from groupwise.engine.models.config import Dtype, LoraConfig, ModelConfig
from groupwise.engine.models.load import load_model
from groupwise.engine.models.lora import AdaptedModel
from groupwise.engine.models.lora_config import new_lora_config
from groupwise.engine.models.tokenizer import load_tokenizer
from groupwise.engine.sampler.queued import DecodeLayout
from groupwise.engine.sampler.torch_sampler import TorchSampler
from groupwise.engine.sampler.weights import ServedAdapter

MODEL = ModelConfig(name="smollm2-135m-instruct")
PROMPTS = ("Sort these words: pear apple fig", "Once upon a time, in a small house by the sea")
RATE = 6e-4
SOAK = pytest.mark.soak(suite="learning")


@pytest.mark.parametrize(
    ("dtype", "updates", "size", "moves", "most"),
    [
        pytest.param("bfloat16", 1, (8, 12), 0.01, 0.03, marks=pytest.mark.slow),
        pytest.param("bfloat16", 3, (8, 16), 0.2, 0.025, marks=SOAK),
        pytest.param("float32", 1, (8, 16), 0.01, 1e-4, marks=SOAK),
    ],
)
def test_it_is_small_and_does_not_grow_with_training(
    tmp_path: Path, dtype: Dtype, updates: int, size: tuple[int, int], moves: float, most: float
) -> None:
    """In bfloat16 0.021 was measured over three updates, 0.041 between transformers' modules; means of one step vary by a third."""
    gaps, moved = asyncio.run(trained(*engines(dtype, tmp_path, size), updates, size))
    assert moved > moves, "the adapter changes what the model says by more than rounding does"
    assert fmean(gaps) < most
    half = len(gaps) // 2
    assert dtype == "float32" or fmean(gaps[half:]) < 1.6 * fmean(gaps[:half]), gaps


def engines(dtype: Dtype, folder: Path, size: tuple[int, int]) -> tuple[TorchLearner, TorchSampler]:
    """Learner and sampler of one fresh adapter."""
    lora = new_lora_config(LoraConfig(r=16, alpha=32))
    adapted = AdaptedModel(load_model(MODEL, dtype), lora)
    policy = TrainedAdapter(adapted, seed=0)
    learner = TorchLearner(
        policy, run="r", publish_folder=folder, max_tokens_per_microbatch=2000, seed=0
    )
    layout = DecodeLayout(slots=len(PROMPTS) * size[0], key_length=128)
    return learner, TorchSampler(ServedAdapter(adapted), load_tokenizer(MODEL), layout)


async def trained(
    learner: TorchLearner, sampler: TorchSampler, updates: int, size: tuple[int, int]
) -> tuple[list[float], float]:
    """Their mean absolute difference (nats) before each update and after the last one, and by how much all of these change what the
    learner says of the first completions.
    """
    tokenizer = load_tokenizer(MODEL)
    prompts = [tuple(tokenizer(prompt)["input_ids"]) for prompt in PROMPTS]
    gaps: list[float] = []
    first: list[Row] = []
    for number in range(updates + 1):
        await sampler.load(await learner.publish(number))
        rows = await sampled(sampler, prompts, number, *size)
        first = first or rows
        gaps.append(await gap(learner, rows))
        if number < updates:
            weights = {"policy": float(sum(len(row.completion_ids) for row in rows))}
            await learner.forward_backward(rows, make("dr_grpo", {}).loss_spec(), weights)
            await learner.update(OptimiserParams(learning_rate=RATE))
    return gaps, await gap(learner, first)


async def sampled(
    sampler: TorchSampler, prompts: list[tuple[int, ...]], number: int, members: int, tokens: int
) -> list[Row]:
    """Completions of all prompts, half of them to be learnt and half to be avoided."""
    seeds = tuple(range(members * number, members * (number + 1)))
    asked = [
        GroupRequest(draw, ids, seeds, SamplingParams(tokens)) for draw, ids in enumerate(prompts)
    ]
    groups = await asyncio.gather(*map(sampler.generate, asked))
    return [
        Row(
            request.prompt_ids,
            each.token_ids,
            (1,) * len(each.token_ids),
            each.logprobs,
            advantage=(-1.0) ** member,
            scale=1.0,
        )
        for request, group in zip(asked, groups, strict=True)
        for member, each in enumerate(group)
    ]


async def gap(learner: TorchLearner, rows: list[Row]) -> float:
    """The mean absolute difference of the learner's log-probabilities from those that the rows were sampled with."""
    found = await learner.logprobs(rows)
    return fmean(
        abs(ours - theirs)
        for row, values in zip(rows, found, strict=True)
        for ours, theirs in zip(values, row.sampling_logprobs, strict=True)
    )
