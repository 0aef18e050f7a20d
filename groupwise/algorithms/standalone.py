"""The loss of one step from tensors, for a training loop that is not ours.

    loss, stats = step_loss("dr_grpo", rewards_PG, policy_logprobs_BT, sampling_logprobs_BT, mask_BT)
    loss.backward()

B = P · G rows: the members of the first prompt, then those of the second. What our own loop does for whole steps (credits, denominators,
sums) is done here for tensors that are in memory at once.
"""

from __future__ import annotations

import math
from typing import Any

from groupwise.algorithms.base import Tensor, TokenBatch
from groupwise.algorithms.registry import make
from groupwise.core.types import Example, Group, RewardPart, Rollout, Segment


def step_loss(
    algorithm: str,
    rewards_PG: Tensor,
    policy_logprobs_BT: Tensor,
    sampling_logprobs_BT: Tensor,
    mask_BT: Tensor,
    *,
    reference_logprobs_BT: Tensor | None = None,
    entropies_BT: Tensor | None = None,
    max_completion_length: int | None = None,
    **knobs: Any,
) -> tuple[Tensor, dict[str, float]]:
    """The scalar loss to minimise, with gradient to `policy_logprobs_BT`, and means over the trained tokens (`LossResult.stats`).

    The mask is 1 for tokens that are trained. A reward of NaN is that of a member that failed: it teaches nothing and is in no mean.
    `max_completion_length` (default: T) is the constant of `dr_grpo`. `knobs` are those of the algorithm, such as `epsilon` or `beta`.
    Raises ValueError for unknown names, shapes that do not fit, and tensors that are missing.
    """
    prompts, members = rewards_PG.shape
    rows, length = mask_BT.shape
    if rows != prompts * members:
        raise ValueError(
            f"There are {prompts} × {members} rewards and {rows} rows; each reward needs one row, those of a prompt one after another."
        )
    chosen = make(algorithm, knobs)
    counts = [int(count) for count in (mask_BT != 0).sum(-1).tolist()]
    groups = [
        _make_group(prompt, rewards, counts[prompt * members : (prompt + 1) * members])
        for prompt, rewards in enumerate(rewards_PG.tolist())
    ]
    credits = [credit for group in chosen.credits(groups) for credit in group]
    if chosen.needs_teacher or any(credit and credit.token_advantages for credit in credits):
        raise ValueError(
            f"{algorithm} needs more than rewards and log-probabilities: a teacher, or the turns of an environment."
        )
    trained = policy_logprobs_BT.new_tensor([credit is not None for credit in credits])
    batch = TokenBatch(
        policy_logprobs_BT=policy_logprobs_BT,
        sampling_logprobs_BT=sampling_logprobs_BT,
        mask_BT=mask_BT * trained.unsqueeze(-1),
        advantages_B=policy_logprobs_BT.new_tensor([c.advantage if c else 0.0 for c in credits]),
        scales_B=policy_logprobs_BT.new_tensor([c.scale if c else 0.0 for c in credits]),
        entropies_BT=entropies_BT,
        reference_logprobs_BT=reference_logprobs_BT,
    )
    sums = chosen.loss(batch)
    denominators = chosen.denominators(groups, max_completion_length or length)
    loss = sum(value / (denominators[name] or 1.0) for name, value in sums.components.items())
    stats = {name: float(value) for name, value in sums.stats.items()}
    tokens = stats.pop("tokens") or 1.0
    return loss, {name: value / tokens for name, value in stats.items()}


def _make_group(draw: int, rewards: list[float], counts: list[int]) -> Group:
    """The record of a group of which only rewards and lengths are known."""
    rollouts: list[Rollout] = []
    for member, (reward, count) in enumerate(zip(rewards, counts, strict=True)):
        scored = math.isfinite(reward)
        rollouts.append(
            Rollout(
                draw=draw,
                member=member,
                attempt=0,
                prompt_ids=(),
                segments=(Segment("policy", (0,) * count),),
                completion="",
                outcome="scored" if scored else "failed",
                reward=reward if scored else None,
                parts=(RewardPart("reward", reward if scored else None),),
            )
        )
    return Group(draw, Example(draw, ""), tuple(rollouts))
