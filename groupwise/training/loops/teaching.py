"""What the teacher of a distillation adds to a scored group before it is trained: its prompts, and the numbers of an endpoint.

A teacher that the learner computes needs only the prompts; an endpoint is asked here, while other groups are still being sampled. Both
become part of the group, so that the record has them and a replay needs neither task nor endpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from groupwise.core.errors import EndpointError
from groupwise.core.interruption import gather_all
from groupwise.core.types import Group, Rollout
from groupwise.tasks.rollouts.rows import segments_by_row, with_teacher_logprobs
from groupwise.tasks.rollouts.teacher_prompts import TeacherPrompts

if TYPE_CHECKING:
    from groupwise.engine.sampler.servers.teacher import EndpointTeacher


@dataclass(frozen=True, slots=True)
class Teaching:
    """Adds what the teacher knows to scored groups."""

    prompts: TeacherPrompts | None = None
    """None: the teacher sees the policy's prompts."""
    endpoint: EndpointTeacher | None = None
    """None: the learner computes the teacher."""
    skips_failures: bool = False
    """True: a rollout that the endpoint does not answer for counts as failed; False: the run ends."""

    async def start(self) -> None:
        """Check that the endpoint answers, with the policy's tokens. Raises EndpointError or UsageError."""
        if self.endpoint is not None:
            await self.endpoint.check()

    async def add(self, group: Group) -> Group:
        """The group with the teacher's prompts and numbers."""
        if self.prompts is not None:
            group = self.prompts.add(group)
        if self.endpoint is None:
            return group
        rollouts = await gather_all(
            self._with_endpoint_logprobs(self.endpoint, rollout)
            if rollout.outcome == "scored"
            else _unchanged(rollout)
            for rollout in group.rollouts
        )
        return replace(group, rollouts=tuple(rollouts))

    async def _with_endpoint_logprobs(self, endpoint: EndpointTeacher, rollout: Rollout) -> Rollout:
        texts = [
            (
                rollout.teacher_prompt_ids or prompt,
                tuple(token for segment in segments for token in segment.token_ids),
            )
            for prompt, segments in segments_by_row(rollout)
        ]
        try:
            answers = await gather_all(endpoint.logprobs(*text) for text in texts)
        except EndpointError as error:
            if not self.skips_failures:
                raise
            return replace(rollout, outcome="failed", reason=f"teacher: {error}")
        return with_teacher_logprobs(rollout, answers)


async def _unchanged(rollout: Rollout) -> Rollout:
    return rollout
