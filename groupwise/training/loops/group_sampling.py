"""Samples the group of one draw with the served policy, scores it, and loads weights into the sampler.

Sampling and scoring are separate functions, because the sampler may load other weights as soon as all completions are sampled, while
rewards may take longer.
"""

from __future__ import annotations

import time
from dataclasses import replace

from groupwise.core.errors import PolicyMismatchError
from groupwise.core.types import Group, Policy, Rollout, SharesDevice
from groupwise.runs import routed_experts
from groupwise.tasks.data.selection import Choice
from groupwise.tasks.rollouts.prompts import as_seen
from groupwise.tasks.rollouts.rollout_request import RolloutRequest
from groupwise.tasks.rollouts.score import score_group
from groupwise.tasks.rollouts.seeds import member_seed
from groupwise.training.loops.run import Run, TaskRun


async def sample(run: TaskRun, draw: int, choice: Choice, step: int) -> Group:
    """Sample the group of a draw, without rewards. If the draw repeats an earlier one, return that group's recorded rollouts."""
    training = run.config.training
    example, prompt = run.pool(choice.pool).at(choice.index)
    if choice.again is not None:
        # The recorded group of the earlier draw is used again, with its rewards, but without advantages.
        group = run.folder.store.group(choice.again)
        assert group is not None, f"draw {choice.again} is in the record"
        group = routed_experts.read(run.folder.path, group)
        rollouts: list[Rollout] = []
        for rollout in group.rollouts:  # drop the results of the step that trained on it
            segments = tuple(
                replace(segment, learner_logprobs=None) for segment in rollout.segments
            )
            rollouts.append(replace(rollout, draw=draw, advantage=None, segments=segments))
        return replace(
            group,
            draw=draw,
            example=example,
            rollouts=tuple(rollouts),
            origin="replay",
            again=choice.again,
        )
    request = RolloutRequest(
        draw=draw,
        example=example,
        prompt_ids=prompt,
        members=training.num_generations,
        seed=lambda member, segment: member_seed(training.seed, draw, member, segment),
        params=run.params_at(step),
    )
    policy = run.serving
    group = replace(await run.rollouts.sample(run.sampler, request), origin=choice.origin)
    check_served(policy, group)
    return as_seen(run.tokenizer, group)


async def score(run: TaskRun, group: Group, step: int) -> Group:
    """Score the group, shape its rewards as the algorithm requires, and add what the teacher contributes.

    Reward functions receive `step`, at which it was sampled.
    """
    if group.again is not None:
        return group
    if any(part.weight for rollout in group.rollouts for part in rollout.parts):
        run.unrewarded = False
    scored_group = await score_group(run.scorer, group, step, run.max_steps, run.steps_per_epoch)
    shaped_group = run.algorithm.shaped(scored_group, run.longest_completion)
    return shaped_group if run.teaching is None else await run.teaching.add(shaped_group)


def check_served(policy: Policy, group: Group) -> None:
    """Raise `PolicyMismatchError` if a policy segment was sampled by weights other than those of `policy`."""
    for rollout in group.rollouts:
        for segment in rollout.segments:
            identity = (segment.policy_version, segment.fingerprint)
            if segment.source == "policy" and identity != (policy.version, policy.fingerprint):
                raise PolicyMismatchError(
                    f"Group {group.draw + 1} was sampled by version {identity[0]} with fingerprint {identity[1]}, but the learner "
                    f"published version {policy.version} with fingerprint {policy.fingerprint}. "
                    "The sampler does not serve what was trained; training on would teach nothing."
                )


async def load_policy(run: Run, policy: Policy) -> None:
    """Load these weights into the sampler when nothing is being sampled, and verify by fingerprint that it serves them."""
    await run.settle()
    await load_into_sampler(run, policy)


async def load_into_sampler(run: Run, policy: Policy) -> None:
    """See `load_policy`; the caller ensures that nothing is being sampled. Raises PolicyMismatchError."""
    started_at = time.perf_counter()
    await run.sampler.load(policy)
    if run.sampler.fingerprint() != policy.fingerprint:
        raise PolicyMismatchError(
            f"Version {policy.version} was published with fingerprint {policy.fingerprint}, but the sampler serves "
            f"{run.sampler.fingerprint()} after loading it."
        )
    run.serving = policy
    run.timings.publishing += time.perf_counter() - started_at


async def release_sampler_memory(run: Run) -> None:
    """Let the sampler release its memory while the learner computes, if they share a device."""
    if isinstance(run.sampler, SharesDevice):
        await run.sampler.release_memory()
