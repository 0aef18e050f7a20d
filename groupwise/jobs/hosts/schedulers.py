"""Runners for machines that hand jobs to a scheduler: Slurm, Ray or Modal. Stored data calls it an `engine`. An attempt's files are on
the machine's disk, and the scheduler starts the attempt on a machine of its choice.

As everywhere, an attempt's files show its state (`runner/`). The scheduler is asked only if they do not suffice: about a queued attempt, or
one that seems lost because its supervisor runs on another machine. A single answer of a scheduler proves little: it may have been
restarted, and an attempt that it gave up may still run. Hence three rules. An attempt is found by its name. It starts only once even if it
is submitted repeatedly, because the first process that takes its token starts it. It counts as ended only if both the scheduler and its
supervisor are silent."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from groupwise.jobs.hosts.answers import MemberState, Observation, RunnerState
from groupwise.jobs.hosts.driver import DEFAULT_TIMEOUT, KnownState, Launch, Runner
from groupwise.jobs.hosts.host import (
    Host,
    HostError,
    HostUnreachable,
    OutcomeUnknown,
    RunnerRefused,
)

POLL_SECONDS = 10.0
"""Seconds between two requests to an engine about facts that only it knows."""
SUBMISSION_GRACE = 60.0
"""Seconds for which the process that laid an attempt out may still be submitting it."""
MAX_HEARTBEAT_AGE = 60.0
"""Largest age in seconds of a heartbeat that proves a living supervisor, even if its engine says otherwise. Heartbeats are 5 s apart."""
FORGOTTEN = "its engine knows nothing of it any more"
UNSURE_STATES = frozenset({RunnerState.QUEUED, RunnerState.LOST, RunnerState.REBOOTED})
"""States for which the files alone do not suffice."""


class SchedulerJob(Protocol):
    """A scheduler's record of an attempt. `str()` of it describes its state and the reason, for messages."""

    @property
    def name(self) -> str:
        """The attempt's name; see `scheduler_job_name`."""
        ...

    @property
    def is_alive(self) -> bool:
        """True if the job waits, runs, or is ending."""
        ...


Job = TypeVar("Job", bound=SchedulerJob)


class SchedulerRunner(Runner, ABC, Generic[Job]):
    """A `Runner` whose `launch`, if it names a scheduler, submits the attempt to it."""

    title: str
    """The engine's name in messages."""
    carries_secrets = False
    """True if the request to the engine carries the values of secrets. They are then not written to the attempt's folder."""

    def __init__(
        self,
        host: Host,
        *,
        root: str = "groupwise-fleet",
        python: str = "python3",
        caller_watches: bool = False,
    ) -> None:
        """`caller_watches`: the caller watches attempts until they end, as a fleet does.

        Such a caller submits every attempt again that the engine does not have (`MemberState.engine_has`), regardless of its age. While
        the engine does not answer, queued attempts wait and started ones count as running. Any other caller gets an error in this case."""
        super().__init__(host, root=root, python=python)
        self.caller_watches = caller_watches
        self._file_states: dict[tuple[str, int], RunnerState] = {}
        """The last state of each attempt (job, epoch) according to its files alone."""

    @abstractmethod
    async def engine_id(self) -> str:
        """The engine's name as stored in its attempts; attempts with another name are left alone."""
        ...

    @abstractmethod
    async def find_jobs(self, attempts: Iterable[MemberState]) -> Sequence[Job]:
        """The engine's jobs for these attempts, in order of submission. Raises HostUnreachable."""
        ...

    async def _was_submitted(self, state: MemberState) -> bool:
        """True if the engine has a job for this attempt, even an ended one."""
        return bool(await self.find_jobs([state]))

    @abstractmethod
    async def _submit(
        self, state: MemberState, options: Sequence[str], secrets: Mapping[str, str]
    ) -> None:
        """Submit an attempt. Raises HostUnreachable if the engine may have accepted it, RunnerRefused if it was rejected."""
        ...

    @abstractmethod
    async def _cancel(self, jobs: Iterable[Job]) -> None: ...

    @abstractmethod
    async def _judge_unqueued(self, state: MemberState, jobs: Sequence[Job]) -> MemberState:
        """Decide about an attempt whose token still exists, but which is not in the engine's queue: not yet, or no longer."""
        ...

    def _waiting_reason(self, state: MemberState, job: Job) -> str:
        """Why the queued attempt waits, for messages."""
        return str(job)

    async def launch(self, launch: Launch, *, timeout: float = 2 * DEFAULT_TIMEOUT) -> MemberState:
        """See `Runner.launch`. RunnerRefused `engine`: the engine rejected the attempt, and its folder was removed.

        If the engine does not answer, the attempt remains laid out: a watched one waits, and any other caller gets OutcomeUnknown."""
        laid_out = launch
        if self.carries_secrets:
            laid_out = replace(launch, secrets={}, spec=replace(launch.spec, secrets=()))
        state = await super().launch(laid_out, timeout=timeout)
        if state.state is not RunnerState.QUEUED or launch.engine is None:
            return await self._judge_changed(state)
        try:
            if not await self._was_submitted(state):
                try:
                    await self._submit(state, launch.engine.options, launch.secrets)
                except RunnerRefused:
                    await super().void(state.job, state.epoch)
                    await self.forget(state.job, state.epoch)
                    raise
        except HostUnreachable as error:
            if not self.caller_watches:
                raise OutcomeUnknown(str(error)) from None
        return await self._judge_changed(state)

    async def status(
        self, job: str, epoch: int, *, timeout: float = DEFAULT_TIMEOUT
    ) -> MemberState:
        """See `Runner.status`."""
        return await self._judge_one(await super().status(job, epoch, timeout=timeout))

    async def observe(
        self,
        *,
        probe: Sequence[str] | None = None,
        probe_timeout: float = 10.0,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> Observation:
        """See `Runner.observe`."""
        observation = await super().observe(
            probe=probe, probe_timeout=probe_timeout, timeout=timeout
        )
        return replace(observation, attempts=await self._judge_all(observation.attempts))

    async def wait(
        self,
        known: Mapping[tuple[str, int], KnownState],
        *,
        seconds: float,
        margin: float = DEFAULT_TIMEOUT,
    ) -> tuple[MemberState, ...]:
        """See `Runner.wait`. The machine compares `known` with the files; the engine is asked again every POLL_SECONDS."""
        by_files = {
            key: replace(known_state, state=self._file_states.get(key, known_state.state))
            for key, known_state in known.items()
        }
        if any(known_state.state in UNSURE_STATES for known_state in by_files.values()):
            seconds = min(seconds, POLL_SECONDS)
        return await self._judge_all(await super().wait(by_files, seconds=seconds, margin=margin))

    async def void(
        self, job: str, epoch: int, *, because: str = "", timeout: float = DEFAULT_TIMEOUT
    ) -> MemberState:
        """See `Runner.void`. After it the engine cannot start the attempt; cancelling its job only spares it the try."""
        state = await super().void(job, epoch, because=because, timeout=timeout)
        if state.state is RunnerState.VOIDED:
            with suppress(HostError):
                if state.engine == await self.engine_id():
                    await self._cancel(await self.find_jobs([state]))
        return await self._judge_changed(state)

    async def kill(
        self, job: str, epoch: int, *, grace: float, timeout: float = DEFAULT_TIMEOUT
    ) -> MemberState:
        """See `Runner.kill`."""
        state = await super().kill(job, epoch, grace=grace, timeout=timeout)
        return await self._judge_changed(state)

    async def _void_unstarted(self, state: MemberState, because: str) -> MemberState:
        """Void an attempt and record the reason, unless it has started meanwhile."""
        message = state.engine_says.strip()
        reason = f"{because}, and it never began" + (f"; it said: {message}" if message else "")
        return await super().void(state.job, state.epoch, because=reason)

    # --- judging --------------------------------------------------------------------------------

    def _is_unsure(self, state: MemberState) -> bool:
        """True if the engine has to be asked. If the attempt started on this very machine, its lock suffices."""
        is_local = state.state is RunnerState.LOST and state.same_boot
        return state.engine is not None and state.state in UNSURE_STATES and not is_local

    async def _judge_one(self, state: MemberState) -> MemberState:
        return (await self._judge_all((state,)))[0]

    async def _judge_changed(self, state: MemberState) -> MemberState:
        """The state after a request that may have changed it. So a silent engine is OutcomeUnknown: HostUnreachable would say that nothing
        happened."""
        try:
            return await self._judge_one(state)
        except HostUnreachable as error:
            raise OutcomeUnknown(str(error)) from None

    async def _judge_all(self, states: Sequence[MemberState]) -> tuple[MemberState, ...]:
        """The actual state of each attempt, by its files and, if they do not suffice, by the engine."""
        self._file_states.update({(state.job, state.epoch): state.state for state in states})
        unsure = [state for state in states if self._is_unsure(state)]
        if unsure:
            engine_id = await self.engine_id()
            unsure = [state for state in unsure if state.engine == engine_id]
        if not unsure:
            return tuple(states)
        try:
            jobs = await self.find_jobs(unsure)
        except HostUnreachable as error:
            return tuple(
                [
                    self._without_answer(state, error) if state in unsure else state
                    for state in states
                ]
            )
        jobs_by_name: dict[str, list[Job]] = {}
        for job in jobs:
            jobs_by_name.setdefault(job.name, []).append(job)
        return tuple(
            [
                await self._judge(state, jobs_by_name.get(scheduler_job_name(state), []))
                if state in unsure
                else state
                for state in states
            ]
        )

    async def _judge(self, state: MemberState, jobs: Sequence[Job]) -> MemberState:
        living_job = next((job for job in jobs if job.is_alive), None)
        if state.state is not RunnerState.QUEUED:
            # A heartbeat shows a supervisor that lives on another machine. On this one its lock would show it.
            has_heartbeat = state.beat_age is not None and state.beat_age < MAX_HEARTBEAT_AGE
            if living_job is None and (state.same_boot or not has_heartbeat):
                return replace(state, engine_says=str(jobs[-1]) if jobs else FORGOTTEN)
            return as_running(state)
        if living_job is not None:
            return replace(
                state, engine_says=self._waiting_reason(state, living_job), engine_has=True
            )
        return await self._judge_unqueued(state, jobs)

    def _without_answer(self, state: MemberState, error: HostUnreachable) -> MemberState:
        """The state of an attempt while the engine does not answer. Raises the error if it cannot be known.

        A tended attempt counts as ended only if its supervisor is silent and the engine has reported its end."""
        if not self.caller_watches:
            raise error
        if state.state is RunnerState.QUEUED:
            return replace(state, engine_says=str(error))
        return as_running(state)


def as_running(state: MemberState) -> MemberState:
    """The state of a started attempt that is not proved to have ended: running, or claimed."""
    running_state = RunnerState.CLAIMED if state.pid is None else RunnerState.RUNNING
    return replace(state, state=running_state, survivors=None)


def scheduler_job_name(state: MemberState) -> str:
    """The attempt's name in engines. It includes the start of the root's name, because two roots may have a job of the same name."""
    return f"{state.job}.{state.epoch}-{(state.place or '')[:8]}"
