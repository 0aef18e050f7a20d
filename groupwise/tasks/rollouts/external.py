"""Attempts that an environment of another process plays by itself, asking the policy at an address of the run (decision 0075).

The run gives the environment an example and an address, and waits for its rewards. What was sampled meanwhile stays here (`endpoint`),
and becomes one rollout. An attempt that fails, hangs or answers what cannot be used costs itself alone: the others of its process, if
that had to be killed, are repeated once from their beginning.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from groupwise.core.errors import EnvironmentWorkerError
from groupwise.core.interruption import gather_all
from groupwise.core.types import EndedBy, Group, Outcome, RewardPart, Rollout, Sampler
from groupwise.tasks.external.process import CallFailed, EnvironmentProcess, ProcessLost
from groupwise.tasks.external.protocol import (
    AttemptResult,
    InvalidAnswer,
    Program,
    parse_attempt_result,
)
from groupwise.tasks.rollouts.endpoint import MODEL, PolicyCalls, PolicyEndpoint
from groupwise.tasks.rollouts.rollout_request import ENVIRONMENT, RolloutRequest
from groupwise.tasks.rollouts.trained_turns import TrainedTurns, UnusableChoice, every_turn
from groupwise.tasks.rollouts.trajectory import join_turns

START_ATTEMPTS = 3
"""Failed starts in a row after which the run ends with an error."""
CANCEL_SECONDS = 5.0
"""Seconds for a process to give up an attempt; then it is killed."""
MIN_WAIT = 0.02
"""Seconds between two looks at the time that an environment has taken."""


@dataclass(frozen=True, slots=True)
class ExternalLimits:
    """Limits of one attempt."""

    max_turns: int
    max_tokens: int
    """Most tokens after the first prompt."""
    max_seconds: float
    """Seconds of the environment's own time; waiting for the policy does not count."""
    max_concurrent: int
    """Attempts at once, in all processes together."""
    start_limit: float
    """Seconds for the start of a process."""
    room: int | None = None
    """Most tokens that the sampler can process, prompt included; None: no such limit."""


@dataclass(slots=True)
class _Slot:
    """The place of one process."""

    process: EnvironmentProcess | None = None
    playing: int = 0
    """Attempts in it."""
    failed_starts: int = 0
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(frozen=True, slots=True)
class _Ending:
    """How an attempt ended, before it becomes a rollout."""

    outcome: Outcome
    reason: str | None = None
    result: AttemptResult = field(default_factory=AttemptResult)
    name: str = ""
    """The name by which the process knows the attempt; empty if it did not answer."""


@dataclass(frozen=True, slots=True)
class _Attempt:
    """An attempt that has ended."""

    calls: PolicyCalls
    ending: _Ending
    repeated: bool = False
    """True if it was played once more after its process was lost."""


class ExternalRollouts:
    """Attempts of an environment that plays by itself; a `RolloutKind`."""

    def __init__(
        self,
        program: Program,
        tokenizer: Any,
        limits: ExternalLimits,
        workers: int = 1,
        trained: TrainedTurns = every_turn,
    ) -> None:
        """`trained` chooses the turns that teach, among those that the environment names."""
        self._program = program
        self._tokenizer = tokenizer
        self._limits = limits
        self._trained = trained
        self._endpoint = PolicyEndpoint()
        self._slots = [_Slot() for _ in range(workers)]
        self._retry_slot, self._retry_lock = _Slot(), asyncio.Lock()
        self._gate = asyncio.Semaphore(limits.max_concurrent)
        self._names = 0

    @property
    def unrepeatable(self) -> str | None:
        """See `RolloutKind.unrepeatable`. Only a process that has been started can say that it repeats itself."""
        process = self._slots[0].process
        repeats = process is not None and process.opened.get("repeats") is True
        return None if repeats else self._program.described

    async def start(self) -> None:
        """Start the endpoint and all processes. Raises EnvironmentWorkerError if one cannot be."""
        await self._endpoint.start()
        for slot in self._slots:
            await self._running(slot)

    async def close(self) -> None:
        """End all processes, and the endpoint."""
        for slot in (*self._slots, self._retry_slot):
            if slot.process is not None:
                await slot.process.close()
        await self._endpoint.close()

    async def sample(self, sampler: Sampler, request: RolloutRequest) -> Group:
        """See `RolloutKind.sample`."""
        await self._endpoint.start()
        slot = self._least_busy()
        if (process := await self._running(slot)).scores_groups:
            slot.playing += request.members
            try:
                attempts = await self._play_group(process, sampler, request)
            finally:
                slot.playing -= request.members
        else:
            attempts = await gather_all(
                self._attempt(sampler, request, member) for member in range(request.members)
            )
        return Group(
            request.draw,
            request.example,
            tuple(
                _rollout_of(request, member, attempt, self._trained)
                for member, attempt in enumerate(attempts)
            ),
        )

    def _least_busy(self) -> _Slot:
        return min(self._slots, key=lambda slot: slot.playing)

    async def _attempt(
        self,
        sampler: Sampler,
        request: RolloutRequest,
        member: int,
        only_in: EnvironmentProcess | None = None,
    ) -> _Attempt:
        """One attempt. `only_in`: the process of its group, without which it cannot be scored, so that it is not repeated in another."""
        async with self._gate:
            calls, repeated = self._calls(sampler, request, member), False
            try:
                if only_in is None:
                    ending = await self._play_in(self._least_busy(), calls, request, member)
                else:
                    ending = await self._play(only_in, calls, request, member)
            except ProcessLost as lost:
                ending = _lost(lost)
                if only_in is None:
                    # Any of its attempts may have ended the process, so each is repeated alone.
                    async with self._retry_lock:
                        calls, repeated = self._calls(sampler, request, member), True
                        try:
                            ending = await self._play_in(self._retry_slot, calls, request, member)
                        except ProcessLost as again:
                            ending = _lost(again)
        if calls.failure is not None:
            raise calls.failure
        return _Attempt(calls, ending, repeated)

    async def _play_group(
        self, process: EnvironmentProcess, sampler: Sampler, request: RolloutRequest
    ) -> list[_Attempt]:
        """A group that the environment scores as a whole, and which has to be played in one process for that."""
        attempts = await gather_all(
            self._attempt(sampler, request, member, process) for member in range(request.members)
        )
        answered = [
            member
            for member, attempt in enumerate(attempts)
            if attempt.ending.name and attempt.ending.result.error is None
        ]
        if not answered:
            return attempts
        endings = [attempts[member].ending for member in answered]
        try:
            async with asyncio.timeout(self._limits.max_seconds):
                answers = await process.score([ending.name for ending in endings])
            scores = [
                parse_attempt_result(answer, attempts[member].calls.sessions)
                for member, answer in zip(answered, answers, strict=True)
            ]
        except TimeoutError:
            reason = f"scoring its group took more than {self._limits.max_seconds:g} s (rollout.max_seconds)"
            process.kill("scoring a group hung, so that it was killed")
            endings = [replace(ending, outcome="timed_out", reason=reason) for ending in endings]
        except (CallFailed, ProcessLost, InvalidAnswer) as error:
            reason = f"its group could not be scored: {error}"
            endings = [replace(ending, outcome="failed", reason=reason) for ending in endings]
        else:
            endings = [
                replace(
                    ending,
                    result=replace(
                        ending.result, parts=ending.result.parts + score.parts, error=score.error
                    ),
                )
                for ending, score in zip(endings, scores, strict=True)
            ]
        for member, ending in zip(answered, endings, strict=True):
            attempts[member] = replace(attempts[member], ending=ending)
        return attempts

    async def _play_in(
        self, slot: _Slot, calls: PolicyCalls, request: RolloutRequest, member: int
    ) -> _Ending:
        """Play an attempt in the process of a slot. Raises ProcessLost."""
        slot.playing += 1
        try:
            return await self._play(await self._running(slot), calls, request, member)
        finally:
            slot.playing -= 1

    def _calls(self, sampler: Sampler, request: RolloutRequest, member: int) -> PolicyCalls:
        limits = self._limits
        longest = limits.room or len(request.prompt_ids) + limits.max_tokens
        return PolicyCalls(sampler, self._tokenizer, request, member, limits.max_turns, longest)

    async def _running(self, slot: _Slot) -> EnvironmentProcess:
        """The process of a slot, started again if it was lost. Raises EnvironmentWorkerError if it fails to start several times."""
        async with slot.starting:
            while slot.process is None or slot.process.is_lost:
                if slot.process is not None:
                    await slot.process.close()
                slot.process = EnvironmentProcess(self._program)
                try:
                    await slot.process.start(self._limits.start_limit)
                    slot.failed_starts = 0
                except EnvironmentWorkerError:
                    slot.failed_starts += 1
                    if slot.failed_starts == START_ATTEMPTS:
                        raise
            return slot.process

    async def _play(
        self, process: EnvironmentProcess, calls: PolicyCalls, request: RolloutRequest, member: int
    ) -> _Ending:
        """Play one attempt. Raises ProcessLost."""
        base_url, key = self._endpoint.open(calls)
        self._names += 1
        name = f"{request.draw}-{member}-{self._names}"
        params: dict[str, Any] = {
            "rollout": name,
            "example": {"prompt": request.example.prompt, "columns": request.example.columns},
            "seed": request.seed(0, ENVIRONMENT),
            "member": member,
            "base_url": base_url,
            "api_key": key,
            "model": MODEL,
            "sampling": {
                "temperature": request.params.temperature,
                "max_tokens": request.params.max_tokens,
            },
            "limits": {
                "max_turns": self._limits.max_turns,
                "max_seconds": self._limits.max_seconds,
            },
        }
        work = asyncio.ensure_future(process.call("rollout", params))
        try:
            if not await self._in_time(work, calls):
                await self._cancel(process, work, name)
                return _Ending(
                    "timed_out",
                    f"the environment took more than {self._limits.max_seconds:g} s of its own time (rollout.max_seconds)",
                )
            return _Ending(
                "pending", None, parse_attempt_result(work.result(), calls.sessions), name
            )
        except CallFailed as error:
            return _Ending("failed", f"the environment failed: {error}")
        except InvalidAnswer as error:
            return _Ending("failed", f"the environment's answer cannot be used: {error}")
        finally:
            await self._endpoint.end(key)
            if not work.done():  # the run is ending
                work.cancel()
                with suppress(ProcessLost, CallFailed, TimeoutError):
                    await asyncio.wait_for(process.call("cancel", {"rollout": name}), 1.0)

    async def _in_time(self, work: asyncio.Future[Any], calls: PolicyCalls) -> bool:
        """Wait for the environment's answer; False if its own time is over before."""
        begun_at = time.monotonic()
        while not work.done():
            own_seconds = time.monotonic() - begun_at - calls.waited
            remaining = self._limits.max_seconds - own_seconds
            if remaining <= 0:
                return False
            await asyncio.wait((work,), timeout=max(remaining, MIN_WAIT))
        return True

    async def _cancel(
        self, process: EnvironmentProcess, work: asyncio.Future[Any], name: str
    ) -> None:
        """Have an attempt given up; a process that does not do so is killed."""
        cancelling = asyncio.ensure_future(process.call("cancel", {"rollout": name}))
        both = asyncio.gather(work, cancelling, return_exceptions=True)
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(both), CANCEL_SECONDS)
        if not both.done():
            process.kill("another attempt in it hung, so that it was killed")
            await both


def _lost(lost: ProcessLost) -> _Ending:
    return _Ending("failed", f"the environment was lost: {lost}")


def _rollout_of(
    request: RolloutRequest, member: int, attempt: _Attempt, trained: TrainedTurns
) -> Rollout:
    """The attempt as a rollout. Its text is that of all turns that the environment names; its segments are those that teach."""
    calls, ending, tries = attempt.calls, attempt.ending, int(attempt.repeated)
    result, outcome, reason = ending.result, ending.outcome, ending.reason
    ids = list(calls.turns)
    if outcome == "pending" and result.error is not None:
        outcome, reason = "failed", f"the environment failed: {result.error}"
    if outcome == "failed" and calls.cut_by is not None:
        limit = {"turns": "rollout.max_turns", "tokens": "rollout.max_rollout_length"}
        reason = f"{reason} ({limit[calls.cut_by]} was reached before)"
    teaching = ids if result.completions is None else [i for i in ids if i in result.completions]
    shown = teaching or ids
    if outcome == "pending" and teaching:
        try:
            chosen = trained([calls.messages[id] for id in teaching])
            teaching = [id for id, teaches in zip(teaching, chosen, strict=True) if teaches]
        except UnusableChoice as problem:
            outcome, reason = "failed", f"rollout.trained_turns: {problem}"
    if outcome == "pending" and not teaching:
        what = "no completion of its teaches" if ids else "it ended without asking the policy"
        if stopped := result.notes.get("stopped"):
            what += f" ({stopped})"
        outcome, reason = "failed", f"the environment's attempt has nothing to train on: {what}"
    if not shown:
        empty = Rollout(request.draw, member, 0, request.prompt_ids, (), "")
        return replace(empty, attempt=tries, outcome=outcome, reason=reason, notes=result.notes)
    prompt = calls.turns[shown[0]].prompt
    whole = join_turns(request.draw, member, [calls.turns[id] for id in shown], prompt)
    taught = teaching or shown
    rollout = whole
    if taught != shown:
        rollout = join_turns(request.draw, member, [calls.turns[id] for id in taught], prompt)
        rollout = replace(rollout, completion=whole.completion, messages=whole.messages)
    ended_by: EndedBy | None = rollout.ended_by
    if calls.cut_by is not None or result.truncated:
        ended_by = calls.cut_by or ("tokens" if rollout.ended_by == "tokens" else "turns")
    return replace(
        rollout,
        attempt=tries,
        outcome=outcome,
        reason=reason,
        parts=_parts(result.parts, ids, taught) if outcome == "pending" else (),
        ended_by=ended_by if outcome == "pending" else None,
        notes=result.notes,
    )


def _parts(
    parts: Sequence[RewardPart], ids: Sequence[str], taught: Sequence[str]
) -> tuple[RewardPart, ...]:
    """The parts with the turns of the rollout, which may have fewer than were sampled."""
    turns = {ids.index(id): turn for turn, id in enumerate(taught)}
    return tuple(
        part if part.turn is None else replace(part, turn=turns.get(part.turn)) for part in parts
    )
