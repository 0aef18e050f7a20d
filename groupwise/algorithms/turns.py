"""The turns of a rollout and their returns, for algorithms that give each turn an advantage of its own.

A turn is what the policy writes at a stretch: until the environment answers, or until a new row begins. Its tokens all have the turn's
advantage. Rewards of turns are reward parts with a turn; what a rollout was rewarded beyond them belongs to its last turn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from groupwise.core.types import Rollout


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the policy."""

    state: tuple[int, ...]
    """Tokens of the environment's answer before it; of the first turn, and of one that begins a row, the row's prompt."""
    tokens: int
    """Number of tokens that the policy wrote."""


def turns_of(rollout: Rollout) -> list[Turn]:
    """The turns of a rollout, in order. Turns in which the policy wrote nothing are included, so that turn numbers agree."""
    turns: list[Turn] = []
    state: tuple[int, ...] | None = rollout.prompt_ids
    for segment in rollout.segments:
        if segment.prompt_ids is not None:
            state = segment.prompt_ids
        if segment.source == "environment":
            state = segment.token_ids
        elif segment.source == "policy":
            if state is None:
                turns[-1] = Turn(turns[-1].state, turns[-1].tokens + len(segment.token_ids))
            else:
                turns.append(Turn(state, len(segment.token_ids)))
            state = None
    return turns


def discounted_returns(rollout: Rollout, discount: float) -> list[float]:
    """For each turn, the sum of its reward and those of later turns, each multiplied by `discount` once for every turn in between."""
    assert rollout.reward is not None, f"draw {rollout.draw}, member {rollout.member} has no reward"
    returns = [0.0] * len(turns_of(rollout))
    if not returns:
        return returns
    last = len(returns) - 1
    for part in rollout.parts:
        if part.turn is not None and part.value is not None:
            returns[min(part.turn, last)] += part.weight * part.value
    returns[last] += rollout.reward - math.fsum(returns)
    for turn in reversed(range(last)):
        returns[turn] += discount * returns[turn + 1]
    return returns


def per_token(rollout: Rollout, values: Sequence[float]) -> tuple[float, ...]:
    """The value of its turn for each token that the policy wrote."""
    pairs = zip(turns_of(rollout), values, strict=True)
    return tuple(value for turn, value in pairs for _ in range(turn.tokens))
