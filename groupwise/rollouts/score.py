"""Scoring a group: its rollouts go to the rewards, and come back with parts, total and outcome."""

from __future__ import annotations

from dataclasses import replace

from groupwise.rewards.scoring import MemberScore, Scorer, ScoreRequest
from groupwise.rewards.text import as_completion
from groupwise.types import Group, Rollout


async def score_group(scorer: Scorer, group: Group, global_step: int, max_steps: int) -> Group:
    """The group with every rollout scored, failed or timed out."""
    score = await scorer.score(score_request(group, global_step, max_steps))
    rollouts = [
        _scored(rollout, member)
        for rollout, member in zip(group.rollouts, score.members, strict=True)
    ]
    return replace(group, rollouts=tuple(rollouts), metrics=score.metrics)


def score_request(group: Group, global_step: int, max_steps: int) -> ScoreRequest:
    """The group as reward functions see it: every column repeated for each member."""
    members = len(group.rollouts)
    prompt = group.example.prompt
    return ScoreRequest(
        draw=group.draw,
        prompts=[prompt] * members,
        completions=[as_completion(prompt, rollout.completion) for rollout in group.rollouts],
        completion_ids=[list(rollout.completion_ids) for rollout in group.rollouts],
        columns={name: [value] * members for name, value in group.example.columns.items()},
        global_step=global_step,
        max_steps=max_steps,
    )


def _scored(rollout: Rollout, score: MemberScore) -> Rollout:
    return replace(
        rollout,
        outcome=score.outcome,
        reason=score.reason,
        reward=score.reward,
        parts=score.parts,
        notes=score.notes,
    )
