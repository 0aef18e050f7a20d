"""Scoring a group: its rollouts are sent to the rewards, and returned with parts, total and outcome.

Only pending rollouts are scored: a rollout that failed or timed out in its environment has no reward. Rewards of the environment
and of the reward functions add up. If there are no reward functions, an environment without a reward counts as 0: skipping such
rollouts would skip exactly the lost games.
"""

from __future__ import annotations

from dataclasses import replace

from groupwise.core.reward_call.request import ORIGIN, MemberScore, Scorer, ScoreRequest
from groupwise.core.reward_call.text import CompletionText, as_completion
from groupwise.core.types import Group, Prompt, RewardPart, Rollout
from groupwise.tasks.environment import DEFAULT_PART
from groupwise.tasks.rewards.rubric import NO_REWARD


async def score_group(
    scorer: Scorer,
    group: Group,
    global_step: int,
    max_steps: int,
    steps_per_epoch: float | None = None,
) -> Group:
    """The group with every rollout scored, failed or timed out."""
    pending = [rollout for rollout in group.rollouts if rollout.outcome == "pending"]
    if not pending:
        return group
    score = await scorer.score(score_request(group, global_step, max_steps, steps_per_epoch))
    scored = {
        rollout.member: _with_score(rollout, member)
        for rollout, member in zip(pending, score.members, strict=True)
    }
    rollouts = [scored.get(rollout.member, rollout) for rollout in group.rollouts]
    return replace(group, rollouts=tuple(rollouts), metrics=score.metrics)


def score_request(
    group: Group, global_step: int, max_steps: int, steps_per_epoch: float | None = None
) -> ScoreRequest:
    """The pending rollouts of a group in the form for reward functions: every column repeated for each rollout."""
    pending = [rollout for rollout in group.rollouts if rollout.outcome == "pending"]
    prompt = group.example.prompt
    columns = {ORIGIN: group.origin, **group.example.columns}
    return ScoreRequest(
        draw=group.draw,
        prompts=[prompt] * len(pending),
        completions=[transcript(prompt, rollout) for rollout in pending],
        completion_ids=[list(rollout.written_ids) for rollout in pending],
        columns={name: [value] * len(pending) for name, value in columns.items()},
        global_step=global_step,
        max_steps=max_steps,
        prompt_ids=[list(rollout.prompt_ids) for rollout in pending],
        prompts_seen=[group.prompt_seen or prompt] * len(pending),
        notes=[rollout.notes for rollout in pending],
        steps_per_epoch=steps_per_epoch,
    )


def transcript(prompt: Prompt, rollout: Rollout) -> CompletionText:
    """The conversation after the prompt: text for a text prompt, messages for a chat, including the environment's."""
    if rollout.messages is not None:
        return list(rollout.messages)
    return as_completion(prompt, rollout.completion)


def _with_score(rollout: Rollout, score: MemberScore) -> Rollout:
    """The rollout with its score. A part of its environment that has the name of a reward function is renamed `environment/…`."""
    names = {part.name for part in score.parts}
    environment_parts = tuple(
        replace(part, name=f"environment/{part.name}") if part.name in names else part
        for part in rollout.parts
    )
    counting = [
        part.value * part.weight
        for part in environment_parts
        if part.weight and part.value is not None
    ]
    if not counting and not score.parts and score.reason == NO_REWARD:
        environment_parts, counting = (*environment_parts, RewardPart(DEFAULT_PART, 0.0)), [0.0]
    outcome, reason, reward = score.outcome, score.reason, score.reward
    if counting and (outcome == "scored" or reason == NO_REWARD):
        outcome, reason, reward = "scored", None, (reward or 0.0) + sum(counting)
    return replace(
        rollout,
        outcome=outcome,
        reason=reason,
        reward=reward,
        parts=(*score.parts, *environment_parts),
        notes={**rollout.notes, **score.notes},
    )
