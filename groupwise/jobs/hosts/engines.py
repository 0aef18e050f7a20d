"""A machine that gives jobs to an engine (Slurm, Ray, Modal): attempts are laid out on its disk, and the engine begins them where it likes.

As everywhere, an attempt's files tell its state (`runner/`). The engine is asked only if they do not say enough: about a queued attempt,
or one that seems lost because its supervisor runs on a machine that cannot be seen from here. One answer of an engine proves little: it may
have been restarted, and an attempt that it gave up may go on. So an attempt is found by its name; it begins once however often it is
submitted, because the first to take its token begins it; and it has ended only if both the engine and its supervisor are silent."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from groupwise.jobs.hosts.answers import MemberState, Observation, RunnerState
from groupwise.jobs.hosts.driver import USUAL, Known, Launch, Runner
from groupwise.jobs.hosts.port import Host, HostError, HostUnreachable, RunnerRefused

LOOK_SECONDS = 10.0
"""Time in seconds after which an engine is asked again about what only it can tell."""
ON_ITS_WAY = 60.0
"""Time in seconds during which the process that laid an attempt out may still be submitting it."""
LIVING_BEAT = 60.0
"""Age in seconds up to which a supervisor's last sign proves that it lives, whatever its engine says. It writes one every 5."""
FORGOTTEN = "its engine knows nothing of it any more"
UNSURE = frozenset({RunnerState.QUEUED, RunnerState.LOST, RunnerState.REBOOTED})
"""States that the files alone cannot settle."""


class EngineJob(Protocol):
    """An engine's record of an attempt. `str()` of it tells people what it is and why."""

    @property
    def name(self) -> str:
        """The attempt's name; see `name_of`."""
        ...

    @property
    def lives(self) -> bool:
        """True if it waits, runs, or is ending."""
        ...


Job = TypeVar("Job", bound=EngineJob)


class EngineRunner(Runner, ABC, Generic[Job]):
    """A `Runner` whose `launch`, given an engine, submits the attempt to it."""

    title: str
    """The engine's name for people."""
    carries_secrets = False
    """True if the request to the engine carries the values of secrets. Nothing of them is laid out then."""

    def __init__(
        self,
        host: Host,
        *,
        root: str = "groupwise-fleet",
        python: str = "python3",
        tended: bool = False,
    ) -> None:
        """`tended`: the caller tends attempts to their end, as a fleet does.

        Such a caller submits again whatever the engine does not have (`MemberState.engine_has`), however long ago it was laid out. While
        the engine is silent, queued attempts wait and begun ones count as running. Any other caller gets an error then."""
        super().__init__(host, root=root, python=python)
        self.tended = tended
        self._seen: dict[tuple[str, int], RunnerState] = {}
        """The state of each attempt (job, epoch) by its files, when they were last read."""

    @abstractmethod
    async def word(self) -> str:
        """The engine's name in the attempts that it begins; attempts with another name are left alone."""
        ...

    @abstractmethod
    async def find_jobs(self, attempts: Iterable[MemberState]) -> Sequence[Job]:
        """The engine's jobs for these attempts, the first submitted first. Raises HostUnreachable."""
        ...

    async def _was_submitted(self, state: MemberState) -> bool:
        """True if the engine has a job for this attempt, also one that has ended."""
        return bool(await self.find_jobs([state]))

    @abstractmethod
    async def _submit(
        self, state: MemberState, options: Sequence[str], secrets: Mapping[str, str]
    ) -> None:
        """Submit an attempt. Raises HostUnreachable if the engine may have accepted it, RunnerRefused if it refused."""
        ...

    @abstractmethod
    async def _cancel(self, jobs: Iterable[Job]) -> None: ...

    @abstractmethod
    async def _not_queued(self, state: MemberState, jobs: Sequence[Job]) -> MemberState:
        """Decide about an attempt whose token is still there, but which is no longer, or not yet, in the engine's queue."""
        ...

    def _waits_for(self, state: MemberState, job: Job) -> str:
        """The queued attempt's reason for waiting, in words for people."""
        return str(job)

    async def launch(self, launch: Launch, *, timeout: float = 2 * USUAL) -> MemberState:
        """See `Runner.launch`. RunnerRefused `engine`: the engine refuses it, and nothing of it is left.

        A tended attempt is laid out and waits if the engine does not answer."""
        laid_out = launch
        if self.carries_secrets:
            laid_out = replace(launch, secrets={}, spec=replace(launch.spec, secrets=()))
        state = await super().launch(laid_out, timeout=timeout)
        if state.state is not RunnerState.QUEUED or launch.engine is None:
            return await self._judge_one(state)
        try:
            if not await self._was_submitted(state):
                try:
                    await self._submit(state, launch.engine.options, launch.secrets)
                except RunnerRefused:
                    await super().void(state.job, state.epoch)
                    await self.forget(state.job, state.epoch)
                    raise
        except HostUnreachable:
            if not self.tended:
                raise
        return await self._judge_one(state)

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
        """See `Runner.wait`. The machine compares with the files; the engine is asked again every LOOK_SECONDS."""
        by_files = {
            key: replace(each, state=self._seen.get(key, each.state)) for key, each in known.items()
        }
        if any(each.state in UNSURE for each in by_files.values()):
            seconds = min(seconds, LOOK_SECONDS)
        return await self._judge_all(await super().wait(by_files, seconds=seconds, margin=margin))

    async def void(
        self, job: str, epoch: int, *, because: str = "", timeout: float = USUAL
    ) -> MemberState:
        """See `Runner.void`. The engine cannot begin it any more; telling it only saves it the attempt."""
        state = await super().void(job, epoch, because=because, timeout=timeout)
        if state.state is RunnerState.VOIDED:
            with suppress(HostError):
                if state.engine == await self.word():
                    await self._cancel(await self.find_jobs([state]))
        return await self._judge_one(state)

    async def kill(
        self, job: str, epoch: int, *, grace: float, timeout: float = USUAL
    ) -> MemberState:
        """See `Runner.kill`."""
        return await self._judge_one(await super().kill(job, epoch, grace=grace, timeout=timeout))

    async def _never_begins(self, state: MemberState, because: str) -> MemberState:
        """Void an attempt with the reason, unless it has begun meanwhile."""
        message = state.engine_says.strip()
        words = f"{because}, and it never began" + (f"; it said: {message}" if message else "")
        return await super().void(state.job, state.epoch, because=words)

    # --- judging --------------------------------------------------------------------------------

    def _is_unsure(self, state: MemberState) -> bool:
        """True if the engine has to be asked. If the attempt began on this very machine, its lock tells."""
        here = state.state is RunnerState.LOST and state.same_boot
        return state.engine is not None and state.state in UNSURE and not here

    async def _judge_one(self, state: MemberState) -> MemberState:
        return (await self._judge_all((state,)))[0]

    async def _judge_all(self, states: Sequence[MemberState]) -> tuple[MemberState, ...]:
        """The true state of each, by its files and, if they cannot settle it, by the engine."""
        self._seen.update({(each.job, each.epoch): each.state for each in states})
        unsure = [each for each in states if self._is_unsure(each)]
        if unsure:
            word = await self.word()
            unsure = [each for each in unsure if each.engine == word]
        if not unsure:
            return tuple(states)
        try:
            found = await self.find_jobs(unsure)
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
            # Shows a supervisor that lives on another machine. On this one its lock would show.
            beats = state.beat_age is not None and state.beat_age < LIVING_BEAT
            if living is None and (state.same_boot or not beats):
                return replace(state, engine_says=str(jobs[-1]) if jobs else FORGOTTEN)
            return as_running(state)
        if living is not None:
            return replace(state, engine_says=self._waits_for(state, living), engine_has=True)
        return await self._not_queued(state, jobs)

    def _without_answer(self, state: MemberState, error: HostUnreachable) -> MemberState:
        """The state of an attempt while the engine does not answer. Raises the error if that cannot be known.

        A tended one has ended only if its supervisor is silent and the engine has said that it is over."""
        if not self.tended:
            raise error
        if state.state is RunnerState.QUEUED:
            return replace(state, engine_says=str(error))
        return as_running(state)


def as_running(state: MemberState) -> MemberState:
    """Count an attempt as running that has begun and is not proved to have ended."""
    runs = RunnerState.CLAIMED if state.pid is None else RunnerState.RUNNING
    return replace(state, state=runs, survivors=None)


def name_of(state: MemberState) -> str:
    """The attempt's name in engines. It includes the root's, because two roots may have a job of the same name."""
    return f"{state.job}.{state.epoch}-{(state.place or '')[:8]}"
