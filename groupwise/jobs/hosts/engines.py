"""A machine from which an engine (Slurm, Ray) is given jobs: attempts are laid out on its disk, and begun by the engine where it likes.

What is to be known stands in the attempt's files, as everywhere (`runner.py`), and the engine is asked only where these do not say enough:
of what waits, and of what seems to be lost, whose supervisor lives on a machine that is not seen from here. One answer of an engine proves
little: it may have been started anew, and what it has given up may go on. So an attempt is found by its name, it begins once however often
it is submitted (whoever takes its token begins it), and only silence of both, of the engine and of its supervisor, ends it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from groupwise.jobs.hosts.answers import MemberState, Observation, RunnerState
from groupwise.jobs.hosts.driver import USUAL, Known, Launch, Runner
from groupwise.jobs.hosts.port import HostError, HostUnreachable, RunnerRefused

LOOK_SECONDS = 10.0
"""After which an engine is asked again of what only it can tell."""
LIVING_BEAT = 60.0
"""Seconds: a supervisor that has written since then lives, whatever its engine says. It writes every 5."""
FORGOTTEN = "its engine knows nothing of it any more"
UNSURE = frozenset({RunnerState.QUEUED, RunnerState.LOST, RunnerState.REBOOTED})
"""What the files alone do not say."""


class EngineJob(Protocol):
    """What an engine has of an attempt. As text: for people, what it is and why."""

    @property
    def name(self) -> str:
        """The attempt's; see `name_of`."""
        ...

    @property
    def lives(self) -> bool:
        """It waits, runs, or is ending."""
        ...


Job = TypeVar("Job", bound=EngineJob)


class EngineRunner(Runner, ABC, Generic[Job]):
    """See `Runner`; `launch` with an engine gives the attempt to it."""

    _seen: dict[tuple[str, int], RunnerState] | None = None
    """What the files said of an attempt when they were looked at last."""

    @abstractmethod
    async def word(self) -> str:
        """Names the engine in the attempts that it begins: those of another one are none of its business."""
        ...

    @abstractmethod
    async def found(self, names: Collection[str]) -> Sequence[Job]:
        """What the engine has of these, the first one first. Raises HostUnreachable."""
        ...

    @abstractmethod
    async def _submit(self, state: MemberState, options: Sequence[str]) -> None:
        """Raises HostUnreachable where it may have been taken, RunnerRefused where the engine would not have it."""
        ...

    @abstractmethod
    async def _cancel(self, jobs: Iterable[Job]) -> None: ...

    @abstractmethod
    async def _not_queued(self, state: MemberState, jobs: Sequence[Job]) -> MemberState:
        """What becomes of an attempt whose token is there, and which is in the engine's queue no more, or not yet."""
        ...

    def _waits_for(self, state: MemberState, job: Job) -> str:
        """For people."""
        return str(job)

    async def launch(self, launch: Launch, *, timeout: float = 2 * USUAL) -> MemberState:
        """See `Runner.launch`. RunnerRefused `engine`: the engine will not have it, and nothing of it is left."""
        state = await super().launch(launch, timeout=timeout)
        if state.state is not RunnerState.QUEUED or launch.engine is None:
            return await self._one(state)
        if not await self.found([name_of(state)]):
            try:
                await self._submit(state, launch.engine.options)
            except RunnerRefused:
                await super().void(state.job, state.epoch)
                await self.forget(state.job, state.epoch)
                raise
        return await self._one(state)

    async def status(self, job: str, epoch: int, *, timeout: float = USUAL) -> MemberState:
        """See `Runner.status`."""
        return await self._one(await super().status(job, epoch, timeout=timeout))

    async def observe(
        self,
        *,
        probe: Sequence[str] | None = None,
        probe_timeout: float = 10.0,
        timeout: float = USUAL,
    ) -> Observation:
        """See `Runner.observe`."""
        seen = await super().observe(probe=probe, probe_timeout=probe_timeout, timeout=timeout)
        return replace(seen, attempts=await self._judged(seen.attempts))

    async def wait(
        self, known: Mapping[tuple[str, int], Known], *, seconds: float, margin: float = USUAL
    ) -> tuple[MemberState, ...]:
        """See `Runner.wait`. What is known are the files; what the engine alone knows is asked every LOOK_SECONDS."""
        seen = self._seen or {}
        told = {key: replace(each, state=seen.get(key, each.state)) for key, each in known.items()}
        if any(each.state in UNSURE for each in told.values()):
            seconds = min(seconds, LOOK_SECONDS)
        return await self._judged(await super().wait(told, seconds=seconds, margin=margin))

    async def void(
        self, job: str, epoch: int, *, because: str = "", timeout: float = USUAL
    ) -> MemberState:
        """See `Runner.void`. From here on the engine cannot begin it; that it need not try is only told."""
        state = await super().void(job, epoch, because=because, timeout=timeout)
        if state.state is RunnerState.VOIDED:
            with suppress(HostError):
                if state.engine == await self.word():
                    await self._cancel(await self.found([name_of(state)]))
        return await self._one(state)

    async def kill(
        self, job: str, epoch: int, *, grace: float, timeout: float = USUAL
    ) -> MemberState:
        """See `Runner.kill`."""
        return await self._one(await super().kill(job, epoch, grace=grace, timeout=timeout))

    async def _never_begins(self, state: MemberState, because: str) -> MemberState:
        """Unless it has begun meanwhile."""
        said = state.engine_says.strip()
        words = f"{because}, and it never began" + (f"; it said: {said}" if said else "")
        return await super().void(state.job, state.epoch, because=words)

    # --- judging --------------------------------------------------------------------------------

    async def _one(self, state: MemberState) -> MemberState:
        return (await self._judged((state,)))[0]

    async def _judged(self, states: Sequence[MemberState]) -> tuple[MemberState, ...]:
        """What is true of each, by its files and, where these do not say it, by the engine."""
        if self._seen is None:
            self._seen = {}
        self._seen.update({(each.job, each.epoch): each.state for each in states})
        unsure = [each for each in states if _is_unsure(each)]
        if unsure:
            word = await self.word()
            unsure = [each for each in unsure if each.engine == word]
        if not unsure:
            return tuple(states)
        try:
            found = await self.found([name_of(each) for each in unsure])
        except HostUnreachable as error:
            return tuple(
                [self._without_answer(each, error) if each in unsure else each for each in states]
            )
        of_name: dict[str, list[Job]] = {}
        for job in found:
            of_name.setdefault(job.name, []).append(job)
        return tuple(
            [
                await self._judge(each, of_name.get(name_of(each), [])) if each in unsure else each
                for each in states
            ]
        )

    async def _judge(self, state: MemberState, jobs: Sequence[Job]) -> MemberState:
        living = next((each for each in jobs if each.lives), None)
        if state.state is not RunnerState.QUEUED:
            if living is None and not _beats(state):
                return replace(state, engine_says=str(jobs[-1]) if jobs else FORGOTTEN)
            return as_running(state)
        if living is not None:
            return replace(state, engine_says=self._waits_for(state, living), engine_has=True)
        return await self._not_queued(state, jobs)

    def _without_answer(self, state: MemberState, error: HostUnreachable) -> MemberState:
        """What is true of an attempt while the engine does not answer. Raises the error where nobody can say."""
        raise error


class TendedRunner(EngineRunner[Job]):
    """Of somebody who tends attempts to their end, as a fleet does.

    What the engine does not have is submitted again by whoever tends it (`MemberState.engine_has`), however long ago it was laid out. While
    the engine is silent, what waits waits, and what was begun is taken to run: nothing has ended before both are silent, and the engine has
    said so.
    """

    async def launch(self, launch: Launch, *, timeout: float = 2 * USUAL) -> MemberState:
        """See `EngineRunner.launch`. Where the engine does not answer it is laid out and waits."""
        try:
            return await super().launch(launch, timeout=timeout)
        except HostUnreachable:
            return await self.status(launch.job, launch.epoch)

    def _without_answer(self, state: MemberState, error: HostUnreachable) -> MemberState:
        if state.state is RunnerState.QUEUED:
            return replace(state, engine_says=str(error))
        return as_running(state)


def as_running(state: MemberState) -> MemberState:
    """Of what has begun and is not proved to have ended."""
    runs = RunnerState.CLAIMED if state.pid is None else RunnerState.RUNNING
    return replace(state, state=runs, survivors=None)


def name_of(state: MemberState) -> str:
    """By which engines know an attempt: two roots may have a job of the same name."""
    return f"{state.job}.{state.epoch}-{(state.place or '')[:8]}"


def _is_unsure(state: MemberState) -> bool:
    """Of one that began on this very machine its lock tells."""
    here = state.state is RunnerState.LOST and state.same_boot
    return state.engine is not None and state.state in UNSURE and not here


def _beats(state: MemberState) -> bool:
    """Its supervisor lives on another machine. On this one its lock would show."""
    return not state.same_boot and state.beat_age is not None and state.beat_age < LIVING_BEAT
