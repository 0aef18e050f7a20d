"""The runner for a machine with Slurm's commands: attempts are laid out on its disk, which the nodes share, and started by Slurm.

`engines.py` describes when an engine is asked and how reliable its answers are. For example, a controller that has just been started
shows running jobs as pending, and a node that it has given up may still run its job.

If Slurm does not answer, a caller that launches a job and leaves gets an error, and a job that Slurm has lost counts as ended. For a
caller that watches attempts until they end, as a fleet does, such a job waits (`EngineRunner.tended`)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from groupwise.jobs.hosts.answers import MemberState, Ran
from groupwise.jobs.hosts.engines import ON_ITS_WAY, EngineRunner, name_of
from groupwise.jobs.hosts.port import HostUnreachable, RunnerRefused

NAME = "slurm"
ENDED = frozenset(
    {
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"),
        *("OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
    }
)
"""Slurm's states of jobs that have ended (squeue(1), JOB STATE CODES)."""
_NO_ANSWER = re.compile(
    r"contact slurm controller|timed out|temporarily unable|zero bytes|connection refused|communication",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A line of squeue's output."""

    id: int
    state: str
    name: str
    reason: str

    @property
    def lives(self) -> bool:
        """True if the job waits, runs, or is ending."""
        return self.state not in ENDED

    def __str__(self) -> str:
        why = f" ({self.reason})" if self.reason not in ("", "None") else ""
        return f"job {self.id} of Slurm is {self.state.lower().replace('_', ' ')}{why}"


class SlurmRunner(EngineRunner[SlurmJob]):
    """The `EngineRunner` for Slurm."""

    title = "Slurm"

    async def word(self) -> str:
        """See `EngineRunner.word`."""
        return NAME

    async def find_jobs(self, attempts: Iterable[MemberState]) -> Sequence[SlurmJob]:
        """See `EngineRunner.find_jobs`."""
        names = {name_of(each) for each in attempts}
        return [each for each in await self.jobs() if each.name in names]

    async def jobs(self) -> list[SlurmJob]:
        """This user's Slurm jobs, sorted by id. Ended ones remain listed for some minutes (MinJobAge). Raises HostUnreachable."""
        options = ("--noheader", "--me", "--states=all", "--format=%i|%T|%j|%r")
        ran = await self._run_slurm("squeue", *options)
        if ran.code != 0:
            raise HostUnreachable(f"Slurm does not answer there: {_message(ran)}")
        lines = (line.split("|", 3) for line in ran.out.splitlines())
        found = [
            SlurmJob(int(cells[0]), cells[1], cells[2], cells[3])
            for cells in lines
            if len(cells) == 4 and cells[0].isdigit()  # an id with a suffix belongs to a job array
        ]
        return sorted(found, key=lambda job: job.id)

    async def try_options(self, options: Sequence[str]) -> str:
        """Make Slurm validate a job with these options without creating it; returns its message. RunnerRefused `engine`: Slurm would reject
        it."""
        ran = await self._run_slurm("sbatch", "--test-only", *options, "--wrap=true")
        _expect_taken(ran)
        return _message(ran)

    # --- giving ---------------------------------------------------------------------------------

    async def _submit(
        self, state: MemberState, options: Sequence[str], secrets: Mapping[str, str]
    ) -> None:
        """See `EngineRunner._submit`."""
        job_options = (f"--job-name={name_of(state)}", f"--chdir={state.folder}", "--no-requeue")
        says = (f"--output={state.folder}/engine.log", "--open-mode=append")
        ran = await self._run_slurm(
            "sbatch", *options, *job_options, *says, f"{state.folder}/begin.sh"
        )
        _expect_taken(ran)
        # If several callers submitted it at once, cancel all jobs but one. If several had started, only one would get the token.
        living = [each for each in await self.find_jobs([state]) if each.lives]
        await self._cancel(living[1:])

    async def _cancel(self, jobs: Iterable[SlurmJob]) -> None:
        numbers = [str(each.id) for each in jobs if each.lives]
        if numbers:
            await self._run_slurm("scancel", *numbers)

    async def _not_queued(self, state: MemberState, jobs: Sequence[SlurmJob]) -> MemberState:
        """Decide whether Slurm has forgotten a job or does not have it yet: only the attempt's age shows this."""
        if jobs:
            return await self._never_begins(state, str(jobs[-1]))
        if self.tended or (state.age or 0.0) < ON_ITS_WAY:
            return replace(state, engine_says="it is on its way to Slurm", engine_has=False)
        return await self._never_begins(state, "Slurm knows nothing of it any more")

    async def _run_slurm(self, *arguments: str) -> Ran:
        try:
            return await self.run(arguments)
        except RunnerRefused as refusal:
            message = refusal.message
            if refusal.code == "unknown_program":
                message += ". Jobs go to Slurm from a machine that has its programs: a login node"
            if self.tended:  # Slurm's commands are missing, perhaps only for a while
                raise HostUnreachable(message) from None
            raise RunnerRefused(refusal.code, message) from None


def _expect_taken(ran: Ran) -> None:
    """Raise HostUnreachable if it is not known whether Slurm accepted the job, RunnerRefused if it rejected it."""
    if ran.code == 0:
        return
    if ran.code is None or _NO_ANSWER.search(ran.err):
        raise HostUnreachable(f"Slurm does not answer there: {_message(ran)}")
    raise RunnerRefused("engine", f"Slurm would not have it: {_message(ran)}")


def _message(ran: Ran) -> str:
    """Slurm's message in one line, without the command's name."""
    lines = [line.strip() for line in (ran.err or ran.out).splitlines() if line.strip()]
    words = [re.sub(r"^(?:sbatch|squeue|scancel): (?:error: )?", "", line) for line in lines]
    if ran.code is None:
        words.append("no answer in time")
    return "; ".join(words) or f"exit code {ran.code}"
