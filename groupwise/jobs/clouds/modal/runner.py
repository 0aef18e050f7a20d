"""The runner whose root is a volume of Modal: it is called through the desk, and the attempts it lays out are begun by calls of the work.

The facts stand in the attempt's files (`groupwise.jobs.hosts.runner`), as far as the work has committed them, and in its turn at the desk.
Modal is asked only whether a call lives. The end of a call proves that nothing runs only together with files that were read after it: the
call's last commit, or the turn of the call that goes on, may have come in between.

Values of secrets go with the call that is spawned, and never to the desk, whose files lie on the volume.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from groupwise.jobs.clouds.modal.port import NAME, ROOT, Call, ModalPort
from groupwise.jobs.hosts.answers import MemberState, Observation, RunnerState
from groupwise.jobs.hosts.driver import USUAL, Engine, Known, Launch, Runner
from groupwise.jobs.hosts.framing import (
    AnswerReader,
    checked_answer,
    no_answer,
    request_bytes,
    without_answer,
)
from groupwise.jobs.hosts.port import (
    HostError,
    OutcomeUnknown,
    Request,
    RunnerRefused,
    RunnerResponse,
)

COLD = 120.0
"""Seconds that the desk may take to begin, in addition to the time of an answer."""
ON_ITS_WAY = 60.0
"""Seconds in which the process that laid an attempt out, or handed it over, may still be spawning the call for it."""
SILENT = 60.0
"""Seconds without a commit of the work after which no container has the job: Modal has taken the last one away."""
TURNS = 3
"""Most looks at an attempt that changes meanwhile."""
UNSURE = frozenset({RunnerState.QUEUED, RunnerState.LOST, RunnerState.REBOOTED})
"""States that the files alone cannot settle."""


class DeskHost:
    """A `Host` whose machine is the desk."""

    def __init__(self, port: ModalPort) -> None:
        self._port = port

    async def call(self, request: Request, *, timeout: float) -> RunnerResponse:
        """See `Host.call`."""
        seconds = (request.longest or timeout) + COLD
        try:
            async with asyncio.timeout(seconds):
                said = await self._port.desk("ask", request_bytes(request))
        except TimeoutError:
            raise OutcomeUnknown(no_answer(request, "Modal", seconds)) from None
        reader = AnswerReader(request)
        if not reader.feed(said):
            raise without_answer(reader, None, "")
        assert reader.answer is not None, "it is whole"
        return checked_answer(reader.answer)

    async def close(self) -> None:
        """See `Host.close`."""
        await self._port.close()


class ModalRunner(Runner):
    """A `Runner` at Modal. `launch` with an engine made by `engine_of` spawns a call for the attempt."""

    def __init__(self, port: ModalPort, *, root: str = ROOT, every: float = 5.0) -> None:
        """`every`: seconds between two looks of `wait`, each of which keeps the desk awake."""
        super().__init__(DeskHost(port), root=root)
        self.port, self._every = port, every
        self._seen: dict[tuple[str, int], RunnerState] = {}

    async def launch(self, launch: Launch, *, timeout: float = 2 * USUAL) -> MemberState:
        """See `Runner.launch`. RunnerRefused: Modal refuses it, and nothing of it is left."""
        asked = replace(launch, secrets={}, spec=replace(launch.spec, secrets=()))
        state = await super().launch(asked, timeout=timeout)
        if state.state is not RunnerState.QUEUED or launch.engine is None:
            return await self._judge_one(state)
        turn = (await self._turns((state,)))[_name(state)]
        if not turn["given"] and turn["call"] is None:
            await self._spawn(state, launch.engine, launch.secrets)
        return await self._judge_one(state)

    async def _spawn(self, state: MemberState, engine: Engine, secrets: Mapping[str, str]) -> None:
        """Spawn a call for a queued attempt. If Modal refuses, the attempt is removed."""
        asked = Call(**json.loads(engine.options[0]))
        call = replace(asked, job=state.job, epoch=state.epoch)
        try:
            spawned = await self.port.spawn(call, secrets)
        except RunnerRefused:
            await super().void(state.job, state.epoch)
            await self.forget(state.job, state.epoch)
            raise
        turn = await self.port.desk("note", state.job, state.epoch, call.number, spawned)
        if turn is None:  # the attempt was removed meanwhile
            turn = {"given": [spawned], "call": "none"}
        # Of several calls that were spawned at once one stays; the others would find that it is not their turn.
        stays = turn["call"] or turn["given"][0]
        for each in turn["given"]:
            if each != stays:
                await self.port.cancel(each)

    async def status(self, job: str, epoch: int, *, timeout: float = USUAL) -> MemberState:
        """See `Runner.status`."""
        return await self._judge_one(await super().status(job, epoch, timeout=timeout))

    async def observe(
        self,
        *,
        probe: Sequence[str] | None = None,
        probe_timeout: float = 10.0,
        timeout: float = USUAL,
    ) -> Observation:
        """See `Runner.observe`."""
        seen = await super().observe(probe=probe, probe_timeout=probe_timeout, timeout=timeout)
        return replace(seen, attempts=await self._judge_all(seen.attempts))

    async def wait(
        self, known: Mapping[tuple[str, int], Known], *, seconds: float, margin: float = USUAL
    ) -> tuple[MemberState, ...]:
        """See `Runner.wait`. It polls, because a desk that waits answers no other caller."""
        told = {k: replace(each, state=self._seen.get(k, each.state)) for k, each in known.items()}
        until = time.monotonic() + seconds
        while True:
            states = [await self.status(*key) for key in told]
            news = any(_differs(each, told[each.job, each.epoch]) for each in states)
            left = until - time.monotonic()
            if news or left <= 0:
                return tuple(states)
            await asyncio.sleep(min(self._every, left))

    async def void(
        self, job: str, epoch: int, *, because: str = "", timeout: float = USUAL
    ) -> MemberState:
        """See `Runner.void`. From here on no call can begin it; those that were spawned are cancelled to save the attempt."""
        state = await super().void(job, epoch, because=because, timeout=timeout)
        if state.state is RunnerState.VOIDED and state.engine == NAME:
            turn = (await self._turns((state,)))[_name(state)]
            for each in turn["given"]:
                with suppress(HostError):
                    await self.port.cancel(each)
        return await self._judge_one(state)

    async def kill(
        self, job: str, epoch: int, *, grace: float, timeout: float = USUAL
    ) -> MemberState:
        """See `Runner.kill`. If no container has it, no process would notice: its calls are cancelled, and the desk writes its end."""
        state = await super().kill(job, epoch, grace=grace, timeout=timeout)
        if state.state in UNSURE and (state.beat_age or 0.0) > SILENT:
            turn = (await self._turns((state,)))[_name(state)]
            for each in {*turn["given"], turn["call"]} - {None}:
                await self.port.cancel(each)
            await self.port.desk("end", job, epoch, "cancelled while it waited for a container")
            state = await super().status(job, epoch)
        return await self._judge_one(state)

    # --- judging --------------------------------------------------------------------------------

    async def _judge_one(self, state: MemberState) -> MemberState:
        return (await self._judge_all((state,)))[0]

    async def _judge_all(self, states: Sequence[MemberState]) -> tuple[MemberState, ...]:
        """The true state of each, by its files and, if they cannot settle it, by its turn and Modal."""
        unsure = [each for each in states if _is_unsure(each)]
        turns = await self._turns(unsure) if unsure else {}
        judged = [
            await self._judge(each, turns[_name(each)]) if _is_unsure(each) else each
            for each in states
        ]
        self._seen.update({(each.job, each.epoch): each.state for each in judged})
        return tuple(judged)

    async def _judge(self, state: MemberState, turn: Mapping[str, Any]) -> MemberState:
        for _ in range(TURNS):
            if not _is_unsure(state):
                return state
            living = await self._lives(turn)
            if living or (turn["call"] is None and turn["age"] < ON_ITS_WAY):
                if state.state is RunnerState.QUEUED:
                    says = (
                        f"call {living} waits for a container of Modal"
                        if living
                        else "it is on its way to Modal"
                    )
                    return replace(state, engine_says=says)
                runs = RunnerState.CLAIMED if state.pid is None else RunnerState.RUNNING
                return replace(state, state=runs, survivors=None)
            before, known = state, turn
            state = await super().status(state.job, state.epoch)
            turn = (await self._turns((state,)))[_name(state)]
            if (state.state, turn["number"], turn["call"]) == (
                before.state,
                known["number"],
                known["call"],
            ):
                break
        if state.state is RunnerState.QUEUED:
            because = "Modal has no call for it any more, and it never began"
            return await super().void(state.job, state.epoch, because=because)
        return replace(state, state=RunnerState.LOST, survivors=0)

    async def _lives(self, turn: Mapping[str, Any]) -> str | None:
        """The living call that has the turn, or waits for it; None if there is none."""
        for each in [turn["call"]] if turn["call"] else turn["given"]:
            if await self.port.lives(each):
                return str(each)
        return None

    async def _turns(self, states: Sequence[MemberState]) -> dict[str, dict[str, Any]]:
        return await self.port.desk("turns", [[each.job, each.epoch] for each in states])


def engine_of(call: Call) -> Engine:
    """The engine that a launch names for this call."""
    return Engine(NAME, (json.dumps(call.document()),))


def _is_unsure(state: MemberState) -> bool:
    return state.engine == NAME and state.state in UNSURE


def _differs(state: MemberState, known: Known) -> bool:
    return (state.state, state.log_size, state.checkpoints, state.step) != (
        known.state,
        known.log_size,
        known.checkpoints,
        known.step,
    )


def _name(state: MemberState) -> str:
    return f"{state.job}.{state.epoch}"
