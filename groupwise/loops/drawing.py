"""One draw: an example, sampled as a group by the policy that serves, and scored.

Sampling and scoring are apart, because the sampler may be given other weights as soon as everything is sampled, while
rewards may take longer.
"""

from __future__ import annotations

import time
from dataclasses import replace

from groupwise.errors import PolicyMismatchError
from groupwise.loops.run import Run
from groupwise.models.tokens import rendered
from groupwise.rollouts.asking import Ask
from groupwise.rollouts.score import score_group
from groupwise.rollouts.seeds import member_seed
from groupwise.types import Group, Policy


async def sample(run: Run, draw: int) -> Group:
    """The group of a draw, its rollouts pending."""
    training = run.config.training
    example, prompt = run.prompts.drawn(draw, training.seed, shuffle=run.config.data.shuffle)
    ask = Ask(
        draw=draw,
        example=example,
        prompt_ids=prompt,
        members=training.num_generations,
        seed=lambda member, segment: member_seed(training.seed, draw, member, segment),
        params=run.params,
    )
    policy = run.serving
    group = await run.rollouts.sample(run.sampler, ask)
    check_served(policy, group)
    if isinstance(group.example.prompt, str) or not group.rollouts:
        return group
    return replace(group, prompt_seen=rendered(run.tokenizer, group.rollouts[0].prompt_ids))


async def score(run: Run, group: Group, step: int) -> Group:
    """The group with rewards, shaped as the algorithm wants them. Reward functions see `step`: the one that drew it."""
    if any(part.weight for rollout in group.rollouts for part in rollout.parts):
        run.unrewarded = False
    scored = await score_group(run.scorer, group, step, run.max_steps)
    return run.algorithm.shaped(scored, run.longest_completion)


def check_served(policy: Policy, group: Group) -> None:
    """Raise `PolicyMismatchError` if a policy segment was drawn by other weights than those published last."""
    for rollout in group.rollouts:
        for segment in rollout.segments:
            served = (segment.policy_version, segment.fingerprint)
            if segment.source == "policy" and served != (policy.version, policy.fingerprint):
                raise PolicyMismatchError(
                    f"Draw {group.draw} was sampled by version {served[0]} with fingerprint {served[1]}, but the learner "
                    f"published version {policy.version} with fingerprint {policy.fingerprint}. "
                    "The sampler does not serve what was trained; training on would teach nothing."
                )


async def serve(run: Run, policy: Policy) -> None:
    """Give the sampler these weights, and make sure that they arrived."""
    begun = time.perf_counter()
    if run.schedule is not None:
        await run.schedule.settle()
    await run.sampler.load(policy)
    if run.sampler.fingerprint() != policy.fingerprint:
        raise PolicyMismatchError(
            f"Version {policy.version} was published with fingerprint {policy.fingerprint}, but the sampler serves "
            f"{run.sampler.fingerprint()} after loading it."
        )
    run.serving = policy
    run.timings.publishing += time.perf_counter() - begun
