"""Answers of a policy to a few prompts, outside of any training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from groupwise import build, machine_layout
from groupwise.awaiting import run_to_end
from groupwise.config import RunConfig
from groupwise.models.tokens import completion_text
from groupwise.ranks import ahead
from groupwise.rollouts.asking import Ask, gather_all
from groupwise.rollouts.prompts import tokenise
from groupwise.rollouts.seeds import evaluation_seed
from groupwise.rollouts.single import Single
from groupwise.types import Example, Prompt, SamplingParams


def answers(
    config: RunConfig,
    prompts: Sequence[Prompt],
    weights: Path | None,
    params: SamplingParams,
    seed: int,
) -> list[str]:
    """A completion of each prompt by the adapter in `weights`, or by the model as it is. The model is loaded for this call."""
    with build.expected_ranks(config):
        return run_to_end(_answers(config, prompts, weights, params, seed))


async def _answers(
    config: RunConfig,
    prompts: Sequence[Prompt],
    weights: Path | None,
    params: SamplingParams,
    seed: int,
) -> list[str]:
    longest = config.eval.model_copy(update={"max_completion_length": params.max_tokens})
    config = config.model_copy(update={"eval": longest})
    tokenizer = ahead.load_tokenizer(config.model)
    asked = tokenise(
        tokenizer,
        [Example(index, prompt) for index, prompt in enumerate(prompts)],
        max_prompt_length=None,
        room=ahead.prompt_room(config.model, params.max_tokens),
        where="the question",
    )
    layout = machine_layout.choose_layout(config, asked.longest)
    parts = await build.start_serving(config, layout, weights)
    stops = tuple(sorted({*params.stop_token_ids, *parts.stop_token_ids}))
    try:
        rollouts = Single(partial(completion_text, tokenizer))

        async def answer(index: int) -> str:
            example, ids = asked.at(index)
            ask = Ask(
                draw=index,
                example=example,
                prompt_ids=ids,
                members=1,
                seed=partial(evaluation_seed, seed, index),
                params=replace(params, stop_token_ids=stops),
            )
            group = await rollouts.sample(parts.sampler, ask)
            return group.rollouts[0].completion

        return await gather_all(answer(index) for index in range(len(prompts)))
    finally:
        parts.close()
