"""The runner whose root folder is on a Modal volume. Requests to it go through the coordinator; calls of the worker start its attempts.

The facts about an attempt are in its files (`groupwise.jobs.hosts.runner`), as far as the worker has committed them, and in its turn at
the coordinator. Modal is asked only whether a call lives. The end of a call proves that nothing runs only if the files were read after
it: the call's last commit, or the turn of the next call, may have arrived in between.

Values of secrets travel with the spawned call, and never to the coordinator, whose files are on the volume.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from groupwise.jobs.clouds.modal.api import NAME, ROOT, Call, ModalApi
from groupwise.jobs.hosts.answers import MemberState, RunnerState
from groupwise.jobs.hosts.driver import DEFAULT_TIMEOUT, KnownState, Runner
from groupwise.jobs.hosts.framing import (
    AnswerReader,
    checked_answer,
    incomplete_answer_error,
    request_bytes,
    timeout_message,
)
from groupwise.jobs.hosts.host import (
    HostError,
    OutcomeUnknown,
    Request,
    RunnerResponse,
)
from groupwise.jobs.hosts.schedulers import (
    MAX_HEARTBEAT_AGE,
    SUBMISSION_GRACE,
    UNSURE_STATES,
    SchedulerRunner,
    as_running,
    scheduler_job_name,
)

COLD = 120.0
"""Seconds that the coordinator may take to start, in addition to the time for an answer."""
TURNS = 3
"""How often an attempt that keeps changing is read at most, to judge its state."""


class CoordinatorHost:
    """A `Host` whose machine is the coordinator's container."""

    def __init__(self, api: ModalApi) -> None:
        self._api = api

    async def call(self, request: Request, *, timeout: float) -> RunnerResponse:
        """See `Host.call`."""
        seconds = (request.longest or timeout) + COLD
        try:
            async with asyncio.timeout(seconds):
                answer = await self._api.call_coordinator("ask", request_bytes(request))
        except TimeoutError:
            raise OutcomeUnknown(timeout_message(request, "Modal", seconds)) from None
        reader = AnswerReader(request)
        if not reader.feed(answer):
            raise incomplete_answer_error(reader, None, "", is_sent=True)
        assert reader.answer is not None, "it is whole"
        return checked_answer(reader.answer)

    async def close(self) -> None:
        """See `Host.close`."""
        await self._api.close()


@dataclass(frozen=True, slots=True)
class ModalTurn:
    """The calls that Modal has for one stint of an attempt: an `SchedulerJob`."""

    name: str
    number: int
    """The stint's number."""
    call: str | None
    """The call that has the turn; None: the first of the spawned calls that takes it."""
    spawned: tuple[str, ...]
    """The calls that are recorded as spawned for this stint."""
    waits_for: str
    """What the attempt waits for before it starts; empty: no call lives, and none is being spawned."""

    @property
    def is_alive(self) -> bool:
        """See `SchedulerJob.is_alive`."""
        return bool(self.waits_for)

    def __str__(self) -> str:
        return self.waits_for


class ModalRunner(SchedulerRunner[ModalTurn]):
    """The `SchedulerRunner` for Modal. A `launch` spawns the call of its engine for the attempt."""

    title = "Modal"
    carries_secrets = True

    def __init__(self, api: ModalApi, *, root: str = ROOT, every: float = 5.0) -> None:
        """`every`: seconds between two polls of `wait`; each poll keeps the coordinator's container running."""
        super().__init__(CoordinatorHost(api), root=root)
        self.api, self._every = api, every

    async def engine_id(self) -> str:
        """See `SchedulerRunner.engine_id`."""
        return NAME

    async def find_jobs(self, attempts: Iterable[MemberState]) -> Sequence[ModalTurn]:
        """See `SchedulerRunner.find_jobs`: the turn of each attempt, including attempts for which no call was spawned yet."""
        by_name = {f"{state.job}.{state.epoch}": state for state in attempts}
        keys = [[state.job, state.epoch] for state in by_name.values()]
        turns: dict[str, dict[str, Any]] = await self.api.call_coordinator("turns", keys)
        jobs: list[ModalTurn] = []
        for name, turn in turns.items():
            call: str | None = turn["call"]
            spawned: list[str] = turn["given"]
            living = [c for c in ([call] if call else spawned) if await self.api.lives(c)]
            waits_for = ""
            if living:
                waits_for = f"call {living[0]} waits for a container of Modal"
            elif call is None and turn["age"] < SUBMISSION_GRACE:
                waits_for = "it is on its way to Modal"
            if call and call not in spawned:
                spawned = [*spawned, call]
            fields = (
                scheduler_job_name(by_name[name]),
                turn["number"],
                call,
                tuple(spawned),
                waits_for,
            )
            jobs.append(ModalTurn(*fields))
        return jobs

    async def _was_submitted(self, state: MemberState) -> bool:
        [turn] = await self.find_jobs([state])
        return bool(turn.spawned)

    async def _submit(
        self, state: MemberState, options: Sequence[str], secrets: Mapping[str, str]
    ) -> None:
        """See `SchedulerRunner._submit`."""
        call = replace(Call(**json.loads(options[0])), job=state.job, epoch=state.epoch)
        spawned = await self.api.spawn(call, secrets)
        turn = await self.api.call_coordinator("note", state.job, state.epoch, call.number, spawned)
        if turn is None:  # the attempt was removed in the meantime
            turn = {"given": [spawned], "call": "none"}
        # If several calls were spawned at once, keep one. The others would end by themselves, because they do not get the turn.
        kept_call = turn["call"] or turn["given"][0]
        for spawned_call in turn["given"]:
            if spawned_call != kept_call:
                await self.api.cancel(spawned_call)

    async def _cancel(self, jobs: Iterable[ModalTurn]) -> None:
        for call in [call for turn in jobs for call in turn.spawned]:
            with suppress(HostError):
                await self.api.cancel(call)

    async def wait(
        self,
        known: Mapping[tuple[str, int], KnownState],
        *,
        seconds: float,
        margin: float = DEFAULT_TIMEOUT,
    ) -> tuple[MemberState, ...]:
        """See `Runner.wait`. It polls, because a coordinator that waits for one caller answers no other."""
        deadline = time.monotonic() + seconds
        while True:
            states = [await self.status(*key) for key in known]
            seconds_left = deadline - time.monotonic()
            if seconds_left <= 0 or any(
                _differs(state, known[state.job, state.epoch]) for state in states
            ):
                return tuple(states)
            await asyncio.sleep(min(self._every, seconds_left))

    async def kill(
        self, job: str, epoch: int, *, grace: float, timeout: float = DEFAULT_TIMEOUT
    ) -> MemberState:
        """See `Runner.kill`. If no container has the attempt, no process would notice: cancel its calls, and have the coordinator write its
        exit record."""
        state = await Runner.kill(self, job, epoch, grace=grace, timeout=timeout)
        if state.state in UNSURE_STATES and (state.beat_age or 0.0) > MAX_HEARTBEAT_AGE:
            for turn in await self.find_jobs([state]):
                for call in turn.spawned:
                    await self.api.cancel(call)
            await self.api.call_coordinator(
                "end", job, epoch, "cancelled while it waited for a container"
            )
            return await self.status(job, epoch)
        return await self._judge_changed(state)

    # --- judging --------------------------------------------------------------------------------

    def _is_unsure(self, state: MemberState) -> bool:
        return state.engine is not None and state.state in UNSURE_STATES

    async def _judge(self, state: MemberState, jobs: Sequence[ModalTurn]) -> MemberState:
        """See `SchedulerRunner._judge`. If no call lives, read the files again: they may have a last commit, or the turn of the next
        call."""
        [turn] = jobs
        for _ in range(TURNS):
            if turn.is_alive:
                queued = state.state is RunnerState.QUEUED
                return replace(state, engine_says=str(turn)) if queued else as_running(state)
            previous = (state.state, turn.number, turn.call)
            state = await Runner.status(self, state.job, state.epoch)
            if not self._is_unsure(state):
                return state
            [turn] = await self.find_jobs([state])
            if (state.state, turn.number, turn.call) == previous:
                break
        if state.state is RunnerState.QUEUED:
            return await self._judge_unqueued(state, jobs)
        return replace(state, state=RunnerState.LOST, survivors=0)

    async def _judge_unqueued(self, state: MemberState, jobs: Sequence[ModalTurn]) -> MemberState:
        return await self._void_unstarted(state, "Modal has no call for it any more")


def _differs(state: MemberState, known: KnownState) -> bool:
    """True if an attempt differs from what its caller knows. Queued and claimed count as the same, since callers do not distinguish
    them."""
    both_waiting = {state.state, known.state} <= {RunnerState.QUEUED, RunnerState.CLAIMED}
    progress = (state.log_size, state.checkpoints, state.step)
    differs = progress != (known.log_size, known.checkpoints, known.step)
    return differs or (state.state is not known.state and not both_waiting)
