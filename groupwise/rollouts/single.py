"""The plain rollout: one prompt, one completion, asked for a whole group at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from groupwise.types import (
    Completion,
    Example,
    Group,
    GroupRequest,
    Rollout,
    Sampler,
    SamplingParams,
    Segment,
)


async def sample_group(
    sampler: Sampler,
    example: Example,
    draw: int,
    prompt_ids: Sequence[int],
    seeds: Sequence[int],
    params: SamplingParams,
    to_text: Callable[[Sequence[int]], str],
) -> Group:
    """One completion for each seed, as a group whose rollouts are pending."""
    request = GroupRequest(draw, tuple(prompt_ids), tuple(seeds), params)
    completions = await sampler.generate(request)
    rollouts = [
        _rollout(request, member, completion, to_text(completion.token_ids))
        for member, completion in enumerate(completions)
    ]
    return Group(draw=draw, example=example, rollouts=tuple(rollouts))


def _rollout(request: GroupRequest, member: int, completion: Completion, text: str) -> Rollout:
    segment = Segment(
        source="policy",
        token_ids=completion.token_ids,
        sampling_logprobs=completion.logprobs,
        policy_version=completion.policy_version,
        fingerprint=completion.fingerprint,
        params=request.params,
        seed=completion.seed,
        finish_reason=completion.finish_reason,
    )
    return Rollout(
        draw=request.draw,
        member=member,
        attempt=0,
        prompt_ids=request.prompt_ids,
        segments=(segment,),
        completion=text,
    )
