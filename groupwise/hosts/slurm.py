"""A machine on which Slurm's programs are: attempts are laid out on its disk, which the nodes share, and begun by Slurm.

What is to be known stands in the attempt's files, as everywhere (`runner.py`), and Slurm is asked only where these do not say enough: of
what waits, and of what seems to be lost, whose supervisor lives on a node that is not seen from here. One answer of Slurm proves little:
a controller that has just been started shows what runs as pending, and a node that it has given up may go on. So an attempt is found by
its name, it begins once however often it is submitted (whoever takes its token begins it), and only silence of both, of Slurm and of its
supervisor, ends it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from groupwise.hosts.answers import MemberState, Observation, Ran, RunnerState
from groupwise.hosts.driver import USUAL, Known, Launch, Runner
from groupwise.hosts.port import HostError, HostUnreachable, RunnerRefused

NAME = "slurm"
LOOK_SECONDS = 10.0
"""After which Slurm is asked again of what only Slurm can tell."""
ON_ITS_WAY = 60.0
"""Seconds in which whoever laid an attempt out may still be submitting it."""
LIVING_BEAT = 60.0
"""Seconds: a supervisor that has written since then lives, whatever Slurm says of its node. It writes every 5."""
ENDED = frozenset(
    {
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"),
        *("OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
    }
)
"""States of Slurm in which a job does not run any more (squeue(1), JOB STATE CODES)."""
UNSURE = frozenset({RunnerState.QUEUED, RunnerState.LOST, RunnerState.REBOOTED})
"""What the files alone do not say."""
_NO_ANSWER = re.compile(
    r"contact slurm controller|timed out|temporarily unable|zero bytes|connection refused|communication",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A line of squeue."""

    id: int
    state: str
    name: str
    reason: str

    @property
    def lives(self) -> bool:
        """It waits, runs, or is ending."""
        return self.state not in ENDED

    def __str__(self) -> str:
        why = f" ({self.reason})" if self.reason not in ("", "None") else ""
        return f"job {self.id} of Slurm is {self.state.lower().replace('_', ' ')}{why}"


class SlurmRunner(Runner):
    """See `Runner`; `launch` with an engine gives the attempt to Slurm."""

    _seen: dict[tuple[str, int], RunnerState] | None = None
    """What the files said of an attempt when they were looked at last."""

    async def launch(self, launch: Launch, *, timeout: float = 2 * USUAL) -> MemberState:
        """See `Runner.launch`. RunnerRefused `engine`: Slurm will not have it, and nothing of it is left."""
        state = await super().launch(launch, timeout=timeout)
        if state.state is not RunnerState.QUEUED or launch.engine is None:
            return await self._one(state)
        found = [each for each in await self.jobs() if each.name == _name(state)]
        if not found:
            await self._submit(state, launch.engine.options)
            await self._cancel_doubles(state)
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
        """See `Runner.wait`. What is known are the files; what Slurm alone knows is asked every LOOK_SECONDS."""
        seen = self._seen or {}
        told = {key: replace(each, state=seen.get(key, each.state)) for key, each in known.items()}
        if any(each.state in UNSURE for each in told.values()):
            seconds = min(seconds, LOOK_SECONDS)
        return await self._judged(await super().wait(told, seconds=seconds, margin=margin))

    async def void(
        self, job: str, epoch: int, *, because: str = "", timeout: float = USUAL
    ) -> MemberState:
        """See `Runner.void`. From here on Slurm cannot begin it; that it need not try is only told."""
        state = await super().void(job, epoch, because=because, timeout=timeout)
        if state.state is RunnerState.VOIDED and state.engine == NAME:
            with suppress(HostError):
                await self._cancel(each for each in await self.jobs() if each.name == _name(state))
        return await self._one(state)

    async def kill(
        self, job: str, epoch: int, *, grace: float, timeout: float = USUAL
    ) -> MemberState:
        """See `Runner.kill`."""
        return await self._one(await super().kill(job, epoch, grace=grace, timeout=timeout))

    async def jobs(self) -> list[SlurmJob]:
        """What Slurm has of this user, by number; what has ended is there for some minutes (MinJobAge). Raises HostUnreachable."""
        wanted = ("--noheader", "--me", "--states=all", "--format=%i|%T|%j|%r")
        ran = await self._asked("squeue", *wanted)
        if ran.code != 0:
            raise HostUnreachable(f"Slurm does not answer there: {_said(ran)}")
        lines = (line.split("|", 3) for line in ran.out.splitlines())
        found = [
            SlurmJob(int(cells[0]), cells[1], cells[2], cells[3])
            for cells in lines
            if len(cells) == 4 and cells[0].isdigit()  # a number with more behind it is an array's
        ]
        return sorted(found, key=lambda job: job.id)

    async def try_options(self, options: Sequence[str]) -> str:
        """What Slurm says of a job with these options, without a job. RunnerRefused `engine`: it would not have it."""
        ran = await self._asked("sbatch", "--test-only", *options, "--wrap=true")
        _expect_taken(ran)
        return _said(ran)

    # --- giving ---------------------------------------------------------------------------------

    async def _submit(self, state: MemberState, options: Sequence[str]) -> None:
        named = (f"--job-name={_name(state)}", f"--chdir={state.folder}", "--no-requeue")
        says = (f"--output={state.folder}/engine.log", "--open-mode=append")
        ran = await self._asked("sbatch", *options, *named, *says, f"{state.folder}/begin.sh")
        try:
            _expect_taken(ran)
        except RunnerRefused:
            await super().void(state.job, state.epoch)
            await self.forget(state.job, state.epoch)
            raise

    async def _cancel_doubles(self, state: MemberState) -> None:
        """Of several that submitted it at once, one stays in the queue; if more began, one would find the token."""
        living = [each for each in await self.jobs() if each.lives and each.name == _name(state)]
        await self._cancel(living[1:])

    async def _cancel(self, jobs: Iterable[SlurmJob]) -> None:
        numbers = [str(each.id) for each in jobs if each.lives]
        if numbers:
            await self._asked("scancel", *numbers)

    async def _asked(self, *arguments: str) -> Ran:
        try:
            return await self.run(arguments)
        except RunnerRefused as refusal:
            if refusal.code != "unknown_program":
                raise
            message = f"{refusal.message}. Jobs go to Slurm from a machine that has its programs: a login node"
            raise RunnerRefused(refusal.code, message) from None

    # --- judging --------------------------------------------------------------------------------

    async def _one(self, state: MemberState) -> MemberState:
        return (await self._judged((state,)))[0]

    async def _judged(self, states: Sequence[MemberState]) -> tuple[MemberState, ...]:
        """What is true of each, by its files and, where these do not say it, by Slurm."""
        if self._seen is None:
            self._seen = {}
        self._seen.update({(each.job, each.epoch): each.state for each in states})
        if not any(_is_unsure(each) for each in states):
            return tuple(states)
        of_name: dict[str, list[SlurmJob]] = {}
        for job in await self.jobs():
            of_name.setdefault(job.name, []).append(job)
        return tuple(
            [
                await self._judge(each, of_name.get(_name(each), [])) if _is_unsure(each) else each
                for each in states
            ]
        )

    async def _judge(self, state: MemberState, jobs: Sequence[SlurmJob]) -> MemberState:
        living = next((each for each in jobs if each.lives), None)
        if state.state is not RunnerState.QUEUED:
            if living is None and not _beats(state):
                return state
            runs = RunnerState.CLAIMED if state.pid is None else RunnerState.RUNNING
            return replace(state, state=runs, survivors=None)
        if living is not None:
            return replace(state, engine_says=str(living))
        if not jobs and (state.age or 0.0) < ON_ITS_WAY:
            return replace(state, engine_says="it is on its way to Slurm")
        return await super().void(state.job, state.epoch, because=_why_never(jobs, state))


def _is_unsure(state: MemberState) -> bool:
    return state.engine == NAME and state.state in UNSURE


def _beats(state: MemberState) -> bool:
    """Its supervisor lives on another machine. On this one its lock would show."""
    return not state.same_boot and state.beat_age is not None and state.beat_age < LIVING_BEAT


def _name(state: MemberState) -> str:
    """By which Slurm knows an attempt: two roots may have a job of the same name."""
    return f"{state.job}.{state.epoch}-{(state.place or '')[:8]}"


def _why_never(jobs: Sequence[SlurmJob], state: MemberState) -> str:
    said = state.engine_says.strip()
    added = f"; it said: {said}" if said else ""
    if not jobs:
        return f"Slurm knows nothing of it any more, and it never began{added}"
    return f"{jobs[-1]}, and it never began{added}"


def _expect_taken(ran: Ran) -> None:
    """Raises HostUnreachable where it is not known, RunnerRefused where Slurm would not."""
    if ran.code == 0:
        return
    if ran.code is None or _NO_ANSWER.search(ran.err):
        raise HostUnreachable(f"Slurm does not answer there: {_said(ran)}")
    raise RunnerRefused("engine", f"Slurm would not have it: {_said(ran)}")


def _said(ran: Ran) -> str:
    """In one line, without the names of its programs."""
    lines = [line.strip() for line in (ran.err or ran.out).splitlines() if line.strip()]
    words = [re.sub(r"^(?:sbatch|squeue|scancel): (?:error: )?", "", line) for line in lines]
    if ran.code is None:
        words.append("no answer in time")
    return "; ".join(words) or f"exit code {ran.code}"
