"""The interface for making groups: one request, the same for every kind of rollout.

Training and evaluation make a `RolloutRequest` for each draw and give it to the `RolloutKind` that the config names. The result is a group
whose rollouts are pending, or failed or timed out with a reason; rewards are added afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from groupwise.core.types import Example, Group, GroupRequest, Sampler, SamplingParams

SeedOf = Callable[[int, int], int]
"""(member, segment) -> 64-bit seed: a hash of what is drawn, see `groupwise.tasks.rollouts.seeds`."""

ENVIRONMENT = -1
"""The segment number (of member 0) whose seed the environment gets."""


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """One example to be attempted `members` times."""

    draw: int
    example: Example
    prompt_ids: tuple[int, ...]
    members: int
    seed: SeedOf
    params: SamplingParams
    """Sampling parameters of one completion; kinds with several stages or turns change its length and stop texts as configured."""

    def sampler_request(
        self, prompt_ids: tuple[int, ...], seeds: Iterable[int], **params: Any
    ) -> GroupRequest:
        """The request to the sampler for a part of the rollouts; `params` replaces single sampling parameters."""
        return GroupRequest(self.draw, prompt_ids, tuple(seeds), replace(self.params, **params))


class RolloutKind(Protocol):
    """One way of making rollouts. Implementations: `Single`, `TwoStage`, `EnvironmentRollouts`, `ExternalRollouts`."""

    @property
    def unrepeatable(self) -> str | None:
        """What a resume plays again without knowing whether the same seeds give the same rollouts; None if they do."""
        ...

    async def start(self) -> None:
        """Prepare, including worker processes. Optional: the first sample does it too."""
        ...

    async def sample(self, sampler: Sampler, request: RolloutRequest) -> Group:
        """The group for a `RolloutRequest`. Many may be awaited concurrently; groups do not depend on each other."""
        ...

    async def close(self) -> None:
        """End everything that was started."""
        ...
