"""GiGPO, group-in-group policy optimisation: https://arxiv.org/abs/2505.10978.

    G_k  = Σ_{j ≥ k} turn_discount^(j − k) · reward of turn j
    E_i  = (r_i − mean(r)) / (std(r) + 1e-4)                       of the rollout, within its group
    S_ik = (G_ik − mean(G)) / (std(G) + 1e-4)                      of turn k, among the turns of the group that met the same state
    A_ik = E_i + step_advantage_weight · S_ik
    loss = 1/(Σ_i |o_i|) · Σ_i Σ_t −min(ratio · A_ik, clip(ratio) · A_ik)

For agents of many turns: a hierarchy of two advantages, one for the whole rollout and one for the step. Attempts at one task come to the
same state again and again; the turns that began there, in whichever rollout and at whichever time, are alternatives to each other and are
compared by what followed them. This needs no further sampling and no critic.

Two turns met the same state if the environment's answers before them have the same tokens; the first turns of a group, if their prompts do.
Rewards of turns come from the environment; what is rewarded at the end belongs to the last turn.

Assumes an environment whose answer shows its state, and enough attempts that states repeat; where none does, only the first turns are
compared with each other.

Degenerate cases: those of `grpo` for E. A state that was met once gives S exactly 0, and so do equal returns. With one turn in each rollout
S is E. A failed member is in no mean, spread or denominator.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from groupwise.algorithms.advantages import (
    Advantages,
    centred,
    deviation,
    group_relative,
    scaled,
)
from groupwise.algorithms.clipped import Clipped
from groupwise.algorithms.knobs import TURN_DISCOUNT
from groupwise.algorithms.turns import discounted_returns, per_token, turns_of
from groupwise.core.types import Group, RolloutCredit


@dataclass(frozen=True, slots=True, kw_only=True)
class Gigpo(Clipped):
    """The advantage of the rollout plus that of the turn among turns from the same state, mean over the tokens of the step."""

    name: ClassVar[str] = "gigpo"

    turn_discount: float = field(
        default=0.95,
        metadata={
            **TURN_DISCOUNT,
            "description": "Share of the next turn's return in a turn's own.",
        },
    )
    step_advantage_weight: float = field(
        default=1.0,
        metadata={
            "description": "Weight of the advantage of a turn relative to that of its rollout.",
            "gt": 0.0,
        },
    )
    scale_rewards: Literal["group", "none"] = field(
        default="group",
        metadata={
            "description": "group: divide centred rewards and returns by the standard deviation of those that they are compared with. "
            "none: centre only.",
        },
    )

    def advantages(self, groups: Sequence[Group]) -> Advantages:
        """The advantages of whole rollouts; `credits` adds those of turns."""
        return group_relative(groups, self.scale_rewards)

    def credits(self, groups: Sequence[Group]) -> tuple[tuple[RolloutCredit | None, ...], ...]:
        """The advantage of each rollout, and of each of its tokens."""
        return tuple(
            self._with_steps(group, credits)
            for group, credits in zip(groups, Clipped.credits(self, groups), strict=True)
        )

    def _with_steps(
        self, group: Group, credits: Sequence[RolloutCredit | None]
    ) -> tuple[RolloutCredit | None, ...]:
        steps = self._step_advantages(group)
        return tuple(
            credit
            and replace(
                credit,
                token_advantages=per_token(
                    rollout,
                    [
                        credit.advantage + self.step_advantage_weight * value
                        for value in steps[rollout.member]
                    ],
                ),
            )
            for rollout, credit in zip(group.rollouts, credits, strict=True)
        )

    def _step_advantages(self, group: Group) -> dict[int, list[float]]:
        """For each scored member, the advantages of its turns among all turns of the group from the same state."""
        returns = {
            rollout.member: discounted_returns(rollout, self.turn_discount)
            for rollout in group.scored
        }
        places_by_state: defaultdict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
        for rollout in group.scored:
            for number, turn in enumerate(turns_of(rollout)):
                places_by_state[turn.state].append((rollout.member, number))
        for places in places_by_state.values():
            values = centred([returns[member][number] for member, number in places])
            if self.scale_rewards == "group":
                values = scaled(values, deviation(values))
            for (member, number), value in zip(places, values, strict=True):
                returns[member][number] = value
        return returns
