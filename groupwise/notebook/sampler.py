"""A session's sampler: it completes prompts with the newest weights, outside of any training. The model is loaded for each call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

from groupwise.core.errors import UsageError
from groupwise.core.interruption import gather_all, run_to_end
from groupwise.core.types import Example, Prompt, SamplingParams
from groupwise.engine.distributed import prefork
from groupwise.engine.models.tokens import completion_text, prompt_ids
from groupwise.notebook.config import TrainingConfig
from groupwise.notebook.core import by_own_names
from groupwise.notebook.friendly_errors import is_count, plain_number
from groupwise.tasks.rollouts.prompts import PromptSet
from groupwise.tasks.rollouts.rollout_request import RolloutRequest
from groupwise.tasks.rollouts.seeds import evaluation_seed
from groupwise.tasks.rollouts.single import Single
from groupwise.training import placement
from groupwise.training.assembly.prepare import expected_ranks
from groupwise.training.config import LoadedConfig, RunConfig


class Session(Protocol):
    """The parts of a `notebook.session.Session` that a sampler reads."""

    @property
    def config(self) -> TrainingConfig: ...
    @property
    def core(self) -> LoadedConfig: ...
    @property
    def weights(self) -> Path | None: ...


@dataclass(frozen=True, slots=True)
class Sampler:
    """Completes prompts with the newest weights of a session. The model is loaded for each call."""

    session: Session

    def __call__(
        self,
        prompts: Sequence[Prompt],
        total_generation_steps: int = 256,
        temperature: float = 0.7,
        top_k: int | None = 50,
        top_p: float | None = 0.95,
        seed: int | None = None,
    ) -> list[str]:
        """A completion of each prompt. A text is what the user says; messages are a chat. Raises UsageError for an invalid prompt."""
        if isinstance(prompts, str):
            raise UsageError("prompts is one text; give a list of them.")
        if not isinstance(prompts, list | tuple):
            raise UsageError(
                f"prompts is of the type {type(prompts).__name__}; give a list of texts."
            )
        chats = [_to_chat(prompt) for prompt in cast("Sequence[Any]", prompts)]
        session = self.session
        seed_value = session.config.seed if seed is None else seed
        max_tokens, temperature_value, top_k_value, top_p_value, seed_number = map(
            plain_number, (total_generation_steps, temperature, top_k, top_p, seed_value)
        )
        checks = {
            f"total_generation_steps is {max_tokens!r}; it must be a whole number, at least 1": is_count(
                max_tokens
            ),
            f"temperature is {temperature_value!r}; it must be a number, at least 0": _is_number(
                temperature_value
            )
            and temperature_value >= 0,
            f"top_k is {top_k_value!r}; it must be a whole number, at least 1, or None": top_k_value
            is None
            or is_count(top_k_value),
            f"top_p is {top_p_value!r}; it must be a number above 0 and at most 1, or None": top_p_value
            is None
            or (_is_number(top_p_value) and 0 < top_p_value <= 1),
            f"seed is {seed_number!r}; it must be a whole number, or None": type(seed_number)
            is int,
        }
        if problems := [message for message, is_valid in checks.items() if not is_valid]:
            raise UsageError("; ".join(problems) + ".")
        weights = session.weights
        if not chats:
            return []
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature_value,
            top_k=top_k_value,
            top_p=top_p_value,
        )
        core = session.core.config
        with by_own_names(session.config), expected_ranks(core):
            return run_to_end(complete(core, chats, weights, params, seed_number))


def _to_chat(prompt: Any) -> Prompt:
    if isinstance(prompt, str) and prompt.strip():
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, list) and prompt:
        messages = cast("list[Any]", prompt)
        if all(isinstance(message, dict) for message in messages):
            return messages
    raise UsageError(
        f"A prompt is {prompt!r}. Expected a text, or messages such as {{'role': 'user', 'content': …}}."
    )


def _is_number(value: object) -> bool:
    return type(value) is int or (isinstance(value, float) and math.isfinite(value))


async def complete(
    config: RunConfig,
    prompts: Sequence[Prompt],
    weights: Path | None,
    params: SamplingParams,
    seed: int,
) -> list[str]:
    """A completion of each prompt by the adapter in `weights`, or by the model as it is; loads the model, and closes it again.

    Raises UsageError for a prompt that the model has no room for.
    """
    from groupwise.training.assembly.start import start_serving

    length = {"max_completion_length": params.max_tokens}
    config = config.model_copy(update={"eval": config.eval.model_copy(update=length)})
    tokenizer = prefork.load_tokenizer(config.model)
    prompt_set = PromptSet(
        tuple(Example(index, prompt) for index, prompt in enumerate(prompts)),
        tuple(prompt_ids(tokenizer, prompt) for prompt in prompts),
    )
    _refuse_too_long(
        prompt_set, params.max_tokens, prefork.prompt_room(config.model, params.max_tokens)
    )
    layout = placement.choose_layout(config, prompt_set.longest)
    parts = await start_serving(config, layout, weights)
    stops = tuple(sorted({*params.stop_token_ids, *parts.stop_token_ids}))
    try:
        rollouts = Single(partial(completion_text, tokenizer))

        async def answer(index: int) -> str:
            example, ids = prompt_set.at(index)
            request = RolloutRequest(
                draw=index,
                example=example,
                prompt_ids=ids,
                members=1,
                seed=partial(evaluation_seed, seed, index),
                params=replace(params, stop_token_ids=stops),
            )
            group = await rollouts.sample(parts.sampler, request)
            return group.rollouts[0].completion

        return await gather_all(answer(index) for index in range(len(prompts)))
    finally:
        parts.close()


def _refuse_too_long(prompts: PromptSet, steps: int, room: int) -> None:
    """Raise UsageError for a prompt longer than `room` tokens: what remains of the model's context after a completion of `steps` tokens."""
    longest = room + steps
    if room < 1:
        raise UsageError(
            f"total_generation_steps is {steps}, but the model reads and writes at most {longest} tokens, question and answer together. "
            "Lower it."
        )
    for position, ids in enumerate(prompts.prompts, 1):
        if len(ids) > room:
            label = "The question" if len(prompts.prompts) == 1 else f"Prompt {position}"
            lower = ", or lower total_generation_steps (of session.sampler)"
            raise UsageError(
                f"{label} has {len(ids)} tokens, but the model has room for {room} beside total_generation_steps = {steps}. "
                f"Shorten the question{lower if len(ids) < longest else ''}."
            )
