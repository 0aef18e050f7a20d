"""The plain rollout: one prompt, one completion; a whole group is sampled in one request."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from groupwise.core.types import (
    Completion,
    Example,
    Group,
    GroupRequest,
    Rollout,
    Sampler,
    SamplingParams,
    Segment,
)
from groupwise.tasks.rollouts.rollout_request import RolloutRequest

ToText = Callable[[Sequence[int]], str]
"""Converts token ids to the text that rewards see."""


class Single:
    """One completion for each member; a `RolloutKind`."""

    unrepeatable = None

    def __init__(self, to_text: ToText) -> None:
        self._to_text = to_text

    async def start(self) -> None:
        """Does nothing."""

    async def sample(self, sampler: Sampler, request: RolloutRequest) -> Group:
        """See `RolloutKind.sample`."""
        seeds = [request.seed(member, 0) for member in range(request.members)]
        return await sample_group(
            sampler,
            request.example,
            request.draw,
            request.prompt_ids,
            seeds,
            request.params,
            self._to_text,
        )

    async def close(self) -> None:
        """Does nothing."""


async def sample_group(
    sampler: Sampler,
    example: Example,
    draw: int,
    prompt_ids: Sequence[int],
    seeds: Sequence[int],
    params: SamplingParams,
    to_text: ToText,
) -> Group:
    """One completion for each seed, as a group whose rollouts are pending."""
    request = GroupRequest(draw, tuple(prompt_ids), tuple(seeds), params)
    return group_of(example, request, await sampler.generate(request), to_text)


def group_of(
    example: Example, request: GroupRequest, completions: Sequence[Completion], to_text: ToText
) -> Group:
    """The sampled completions as a group whose rollouts are pending."""
    rollouts = [
        Rollout(
            draw=request.draw,
            member=member,
            attempt=0,
            prompt_ids=request.prompt_ids,
            segments=(policy_segment(completion, request.params),),
            completion=to_text(completion.token_ids),
        )
        for member, completion in enumerate(completions)
    ]
    return Group(draw=request.draw, example=example, rollouts=tuple(rollouts))


def policy_segment(
    completion: Completion, params: SamplingParams, prompt_ids: tuple[int, ...] | None = None
) -> Segment:
    """The sampler's completion as a segment; `prompt_ids` if it starts a new row."""
    return Segment(
        source="policy",
        token_ids=completion.token_ids,
        sampling_logprobs=completion.logprobs,
        policy_version=completion.policy_version,
        fingerprint=completion.fingerprint,
        params=params,
        seed=completion.seed,
        finish_reason=completion.finish_reason,
        prompt_ids=prompt_ids,
        routed_experts=completion.routed_experts,
    )
