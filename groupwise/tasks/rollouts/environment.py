"""A rollout of several turns: a completion, the environment's answer, a completion, until the environment is done.

    first prompt → (completion → observation, done)* → rewards

The policy's tokens are trained; those of the environment are only context. The first turn of a group is sampled in one request,
because its members share their prompt; afterwards each continues on its own. A rollout ends

    done             when the environment says so
    cut off          at `max_turns` completions, or when no token is left of `max_rollout_length`; see `Rollout.ended_by`
    timed_out        when a turn takes longer than `time_limit`, or all its turns longer than `max_seconds`, of the environment's
                     own time: waiting for the sampler, for another rollout's turn, or for the repetition after
                     the loss of a process does not count
    failed           when the environment raises, or its answer cannot be shown to the policy

A rollout that was cut off is scored like one that is done. A completion that reaches its own limit is passed to the environment
unchanged.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from groupwise.core.errors import TaskError
from groupwise.core.interruption import gather_all
from groupwise.core.types import (
    Completion,
    EndedBy,
    Group,
    Outcome,
    Prompt,
    RewardPart,
    Rollout,
    Sampler,
    SamplingParams,
)
from groupwise.tasks.rollouts.dialogue import Dialogue, Unrenderable, begin_dialogue
from groupwise.tasks.rollouts.hosts import EnvironmentHost
from groupwise.tasks.rollouts.rollout_request import ENVIRONMENT, RolloutRequest
from groupwise.tasks.rollouts.sessions import Reply, SessionCall
from groupwise.tasks.tools import Schema

MIN_LIMIT = 0.05
"""Minimum time limit of a turn in seconds, even if less is left of `max_seconds`."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one rollout."""

    max_turns: int
    max_tokens: int
    """Most tokens after the first prompt, observations included."""
    time_limit: float
    """Seconds for one turn of the environment."""
    max_seconds: float
    """Seconds for all its turns."""
    room: int | None = None
    """Most tokens that the sampler can process, prompt included; None: no such limit."""


@dataclass(slots=True)
class _Attempt:
    """One rollout in progress."""

    member: int
    session: int
    prompt: Prompt
    dialogue: Dialogue
    first: tuple[int, ...]
    """Tokens of its first prompt."""
    longest: int
    """Most tokens of its context."""
    completions: list[str] = field(default_factory=list[str])
    reply_digests: list[str] = field(default_factory=list[str])
    parts: list[RewardPart] = field(default_factory=list[RewardPart])
    seconds: float = 0.0
    ended_by: EndedBy | None = None
    environment_alive: bool = True
    """True while its environment still exists."""
    outcome: Outcome = "pending"
    reason: str | None = None

    @property
    def is_over(self) -> bool:
        """True if nothing more is to be sampled."""
        return self.ended_by is not None or self.outcome != "pending"

    def fail(self, outcome: Outcome, reason: str | None) -> None:
        """End it without a reward."""
        self.outcome, self.reason = outcome, reason


class EnvironmentRollouts:
    """Rollouts in the task's environment; a `RolloutKind`."""

    unrepeatable = None

    def __init__(
        self,
        host: EnvironmentHost,
        tokenizer: Any,
        limits: Limits,
        tools: Sequence[Schema] = (),
    ) -> None:
        """`tools` are those that the first prompt of a chat describes."""
        self._host = host
        self._tokenizer = tokenizer
        self._limits = limits
        self._tools = tools
        self._sessions = itertools.count()

    async def start(self) -> None:
        """Start the environments' workers. Raises EnvironmentWorkerError if one cannot be."""
        await self._host.start()

    async def close(self) -> None:
        """End the workers with all environments in them."""
        await self._host.close()

    async def sample(self, sampler: Sampler, request: RolloutRequest) -> Group:
        """See `RolloutKind.sample`."""
        attempts = await gather_all(
            self._begin_attempt(request, member) for member in range(request.members)
        )
        alive = [attempt for attempt in attempts if not attempt.is_over]
        for attempt in alive:
            if attempt.first != alive[0].first:
                attempt.fail(
                    "failed",
                    "the environment gave this member another first prompt than the other members of its group; what "
                    "`reset` returns may depend on the row and `seed`, not on `member`",
                )
        example = replace(request.example, prompt=alive[0].prompt) if alive else request.example
        completions = await self._first_completions(sampler, request, attempts)
        await gather_all(
            self._play_turns(sampler, request, attempt, completion)
            for attempt, completion in zip(attempts, completions, strict=True)
        )
        rollouts = tuple(_rollout_of_attempt(request, attempt) for attempt in attempts)
        return Group(request.draw, example, rollouts)

    async def opening(self, request: RolloutRequest) -> tuple[int, ...]:
        """Tokens of the prompt that an example's environment starts with. Raises TaskError if it gives none."""
        attempt = await self._begin_attempt(request, 0)
        if attempt.outcome != "pending":
            raise TaskError(
                f"the first prompt of row {request.example.row_number}: {attempt.reason}"
            )
        ending = replace(self._turn_call(request, attempt), ending=True)
        await self._host.ask(ending, self._limits.time_limit)
        return attempt.first

    # --- one rollout --------------------------------------------------------------------------------

    async def _begin_attempt(self, request: RolloutRequest, member: int) -> _Attempt:
        """The attempt with its first prompt; failed if there is none."""
        session = next(self._sessions)
        call = self._first_call(request, member, session)
        reply = await self._host.ask(call, min(self._limits.time_limit, self._limits.max_seconds))
        prompt = request.example.prompt if reply.prompt is None else reply.prompt
        known_ids = request.prompt_ids if reply.prompt is None and not self._tools else None
        try:
            dialogue, problem = self._begin_dialogue(request, prompt, self._tools, known_ids), None
        except (TaskError, Unrenderable) as error:  # a prompt made by the environment
            prompt, problem = request.example.prompt, str(error)
            dialogue = self._begin_dialogue(request, prompt, (), request.prompt_ids)
        longest = len(dialogue.context) + self._limits.max_tokens
        room = self._limits.room
        attempt = _Attempt(
            member=member,
            session=session,
            prompt=prompt,
            dialogue=dialogue,
            first=dialogue.context,
            longest=longest if room is None else min(longest, room),
        )
        if problem is not None:
            attempt.fail("failed", problem)
        self._apply_reply(attempt, reply)
        if not attempt.is_over and len(attempt.first) >= attempt.longest:
            attempt.fail(
                "failed",
                f"the environment's first prompt has {len(attempt.first)} tokens, and the run was laid out for "
                f"{attempt.longest}, completions included",
            )
        return attempt

    def _begin_dialogue(
        self,
        request: RolloutRequest,
        prompt: Prompt,
        tools: Sequence[Schema],
        ids: tuple[int, ...] | None,
    ) -> Dialogue:
        return begin_dialogue(self._tokenizer, prompt, tools, request.example.columns, ids)

    async def _play_turns(
        self,
        sampler: Sampler,
        request: RolloutRequest,
        attempt: _Attempt,
        completion: Completion | None,
    ) -> None:
        """Play all turns, starting with the first completion."""
        while completion is not None:
            params = self._turn_params(request, attempt)
            attempt.completions.append(attempt.dialogue.say(completion, params))
            remaining = self._limits.max_seconds - attempt.seconds
            limit = min(self._limits.time_limit, max(remaining, MIN_LIMIT))
            reply = await self._host.ask(self._turn_call(request, attempt), limit)
            self._apply_reply(attempt, reply)
            if attempt.outcome == "pending":
                try:
                    if reply.done or len(attempt.completions) == self._limits.max_turns:
                        attempt.ended_by = "environment" if reply.done else "turns"
                        attempt.dialogue.record(reply.observation)
                    elif not attempt.dialogue.hear(reply.observation, attempt.longest - 1):
                        attempt.ended_by = "tokens"
                except Unrenderable as problem:
                    attempt.fail("failed", str(problem))
            if attempt.is_over:
                break
            sampler_request = request.sampler_request(
                attempt.dialogue.context,
                [request.seed(attempt.member, len(attempt.completions))],
                max_tokens=self._turn_params(request, attempt).max_tokens,
            )
            (completion,) = await sampler.generate(sampler_request)
        if attempt.environment_alive:
            # The environment's reward for the whole rollout.
            call = replace(self._turn_call(request, attempt), ending=True)
            self._apply_reply(attempt, await self._host.ask(call, self._limits.time_limit))

    def _apply_reply(self, attempt: _Attempt, reply: Reply) -> None:
        """Process the parts of a reply other than its observation."""
        attempt.environment_alive = reply.outcome == "pending"
        if attempt.outcome != "pending":
            return
        attempt.seconds += reply.seconds
        attempt.parts += reply.parts
        attempt.reply_digests.append(reply.digest)
        if reply.outcome != "pending":
            attempt.fail(reply.outcome, reply.reason)
        elif attempt.seconds > self._limits.max_seconds:
            attempt.fail(
                "timed_out",
                f"the environment took {attempt.seconds:.3g} s in all; rollout.max_seconds is {self._limits.max_seconds:g}",
            )

    def _first_call(self, request: RolloutRequest, member: int, session: int) -> SessionCall:
        return SessionCall(
            session=session,
            draw=request.draw,
            member=member,
            seed=request.seed(0, ENVIRONMENT),
            prompt=request.example.prompt,
            columns=request.example.columns,
            repeat_limit=self._limits.time_limit,
        )

    def _turn_call(self, request: RolloutRequest, attempt: _Attempt) -> SessionCall:
        call = self._first_call(request, attempt.member, attempt.session)
        return replace(
            call, completions=tuple(attempt.completions), reply_digests=tuple(attempt.reply_digests)
        )

    # --- sampling -----------------------------------------------------------------------------------

    def _turn_params(self, request: RolloutRequest, attempt: _Attempt) -> SamplingParams:
        """Parameters of the next completion: its length is the requested one, or the remaining room if that is less."""
        room = attempt.longest - len(attempt.dialogue.context)
        return replace(request.params, max_tokens=min(request.params.max_tokens, room))

    async def _first_completions(
        self, sampler: Sampler, request: RolloutRequest, attempts: Sequence[_Attempt]
    ) -> list[Completion | None]:
        """First completions of all members, in one request, because they share their prompt; None for members that ended before."""
        alive = [attempt for attempt in attempts if not attempt.is_over]
        if not alive:
            return [None] * len(attempts)
        sampler_request = request.sampler_request(
            alive[0].first,
            [request.seed(attempt.member, 0) for attempt in alive],
            max_tokens=self._turn_params(request, alive[0]).max_tokens,
        )
        completions = await sampler.generate(sampler_request)
        by_attempt = {
            attempt.member: completion
            for attempt, completion in zip(alive, completions, strict=True)
        }
        return [by_attempt.get(attempt.member) for attempt in attempts]


def _rollout_of_attempt(request: RolloutRequest, attempt: _Attempt) -> Rollout:
    dialogue = attempt.dialogue
    return Rollout(
        draw=request.draw,
        member=attempt.member,
        attempt=0,
        prompt_ids=attempt.first,
        segments=tuple(dialogue.segments),
        completion=dialogue.text,
        outcome=attempt.outcome,
        reason=attempt.reason,
        parts=tuple(attempt.parts),
        messages=dialogue.messages,
        ended_by=attempt.ended_by if attempt.outcome == "pending" else None,
    )
