"""Answers of a policy to a few prompts, outside of any training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from groupwise.core.errors import UsageError
from groupwise.core.interruption import gather_all, run_to_end
from groupwise.core.types import Example, Prompt, SamplingParams
from groupwise.engine.distributed import prefork
from groupwise.engine.models.tokens import completion_text, prompt_ids
from groupwise.tasks.rollouts.asking import Ask
from groupwise.tasks.rollouts.prompts import PromptSet
from groupwise.tasks.rollouts.seeds import evaluation_seed
from groupwise.tasks.rollouts.single import Single
from groupwise.training import build, placement
from groupwise.training.config import RunConfig


def answers(
    config: RunConfig,
    prompts: Sequence[Prompt],
    weights: Path | None,
    params: SamplingParams,
    seed: int,
) -> list[str]:
    """A completion of each prompt by the adapter in `weights`, or by the model as it is. The model is loaded for this call.

    Raises UsageError for a prompt that the model has no room for.
    """
    with build.expected_ranks(config):
        return run_to_end(_answers(config, prompts, weights, params, seed))


def _refuse_too_long(asked: PromptSet, steps: int, room: int) -> None:
    """`room`: tokens that the model leaves for a question beside an answer of so many steps."""
    longest = room + steps
    if room < 1:
        raise UsageError(
            f"total_generation_steps is {steps}, but the model reads and writes at most {longest} tokens, question and answer together. "
            "Lower it."
        )
    for place, ids in enumerate(asked.prompts, 1):
        if len(ids) > room:
            which = "The question" if len(asked.prompts) == 1 else f"Prompt {place}"
            lower = (
                ", or lower total_generation_steps (of session.sampler)"
                if len(ids) < longest
                else ""
            )
            raise UsageError(
                f"{which} has {len(ids)} tokens, but the model has room for {room} beside total_generation_steps = {steps}. "
                f"Shorten the question{lower}."
            )


async def _answers(
    config: RunConfig,
    prompts: Sequence[Prompt],
    weights: Path | None,
    params: SamplingParams,
    seed: int,
) -> list[str]:
    longest = config.eval.model_copy(update={"max_completion_length": params.max_tokens})
    config = config.model_copy(update={"eval": longest})
    tokenizer = prefork.load_tokenizer(config.model)
    asked = PromptSet(
        tuple(Example(index, prompt) for index, prompt in enumerate(prompts)),
        tuple(prompt_ids(tokenizer, prompt) for prompt in prompts),
    )
    _refuse_too_long(asked, params.max_tokens, prefork.prompt_room(config.model, params.max_tokens))
    layout = placement.choose_layout(config, asked.longest)
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
