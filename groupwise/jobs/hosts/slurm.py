"""The runner for a machine with Slurm's commands: attempts are laid out on its disk, which the nodes share, and started by Slurm.

`schedulers.py` describes when an engine is asked and how reliable its answers are. For example, a controller that has just been started
shows running jobs as pending, and a node that it has given up may still run its job.

If Slurm does not answer, a caller that launches a job and leaves gets an error, and a job that Slurm has lost counts as ended. For a
caller that watches attempts until they end, as a fleet does, such a job waits (`SchedulerRunner.caller_watches`)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from groupwise.jobs.hosts.answers import MemberState, ProgramResult
from groupwise.jobs.hosts.host import HostUnreachable, RunnerRefused
from groupwise.jobs.hosts.schedulers import SUBMISSION_GRACE, SchedulerRunner, scheduler_job_name

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
    def is_alive(self) -> bool:
        """True if the job waits, runs, or is ending."""
        return self.state not in ENDED

    def __str__(self) -> str:
        suffix = f" ({self.reason})" if self.reason not in ("", "None") else ""
        return f"job {self.id} of Slurm is {self.state.lower().replace('_', ' ')}{suffix}"


class SlurmRunner(SchedulerRunner[SlurmJob]):
    """The `SchedulerRunner` for Slurm."""

    title = "Slurm"

    async def engine_id(self) -> str:
        """See `SchedulerRunner.engine_id`."""
        return NAME

    async def find_jobs(self, attempts: Iterable[MemberState]) -> Sequence[SlurmJob]:
        """See `SchedulerRunner.find_jobs`."""
        names = {scheduler_job_name(attempt) for attempt in attempts}
        return [job for job in await self.jobs() if job.name in names]

    async def jobs(self) -> list[SlurmJob]:
        """This user's Slurm jobs, sorted by id. Ended ones remain listed for some minutes (MinJobAge). Raises HostUnreachable."""
        options = ("--noheader", "--me", "--states=all", "--format=%i|%T|%j|%r")
        result = await self._run_slurm("squeue", *options)
        if result.code != 0:
            raise HostUnreachable(f"Slurm does not answer there: {_result_message(result)}")
        lines = (line.split("|", 3) for line in result.out.splitlines())
        jobs = [
            SlurmJob(int(cells[0]), cells[1], cells[2], cells[3])
            for cells in lines
            if len(cells) == 4 and cells[0].isdigit()  # an id with a suffix belongs to a job array
        ]
        return sorted(jobs, key=lambda job: job.id)

    async def try_options(self, options: Sequence[str]) -> str:
        """Make Slurm validate a job with these options without creating it; returns its message. RunnerRefused `engine`: Slurm would reject
        it."""
        result = await self._run_slurm("sbatch", "--test-only", *options, "--wrap=true")
        _check_accepted(result)
        return _result_message(result)

    # --- giving ---------------------------------------------------------------------------------

    async def _submit(
        self, state: MemberState, options: Sequence[str], secrets: Mapping[str, str]
    ) -> None:
        """See `SchedulerRunner._submit`."""
        job_options = (
            f"--job-name={scheduler_job_name(state)}",
            f"--chdir={state.folder}",
            "--no-requeue",
        )
        output_options = (f"--output={state.folder}/engine.log", "--open-mode=append")
        result = await self._run_slurm(
            "sbatch", *options, *job_options, *output_options, f"{state.folder}/begin.sh"
        )
        _check_accepted(result)
        # If several callers submitted it at once, cancel all jobs but one. If several had started, only one would get the token.
        living = [job for job in await self.find_jobs([state]) if job.is_alive]
        await self._cancel(living[1:])

    async def _cancel(self, jobs: Iterable[SlurmJob]) -> None:
        ids = [str(job.id) for job in jobs if job.is_alive]
        if ids:
            await self._run_slurm("scancel", *ids)

    async def _judge_unqueued(self, state: MemberState, jobs: Sequence[SlurmJob]) -> MemberState:
        """Decide whether Slurm has forgotten a job or does not have it yet: only the attempt's age shows this."""
        if jobs:
            return await self._void_unstarted(state, str(jobs[-1]))
        if self.caller_watches or (state.age or 0.0) < SUBMISSION_GRACE:
            return replace(state, engine_says="it is on its way to Slurm", engine_has=False)
        return await self._void_unstarted(state, "Slurm knows nothing of it any more")

    async def _run_slurm(self, *arguments: str) -> ProgramResult:
        try:
            return await self.run(arguments)
        except RunnerRefused as refusal:
            message = refusal.message
            if refusal.code == "unknown_program":
                message += ". Jobs go to Slurm from a machine that has its programs: a login node"
            if self.caller_watches:  # Slurm's commands are missing, perhaps only for a while
                raise HostUnreachable(message) from None
            raise RunnerRefused(refusal.code, message) from None


def _check_accepted(result: ProgramResult) -> None:
    """Raise HostUnreachable if it is not known whether Slurm accepted the job, RunnerRefused if it rejected it."""
    if result.code == 0:
        return
    if result.code is None or _NO_ANSWER.search(result.err):
        raise HostUnreachable(f"Slurm does not answer there: {_result_message(result)}")
    raise RunnerRefused("engine", f"Slurm would not have it: {_result_message(result)}")


def _result_message(result: ProgramResult) -> str:
    """Slurm's message in one line, without the command's name."""
    lines = [line.strip() for line in (result.err or result.out).splitlines() if line.strip()]
    messages = [re.sub(r"^(?:sbatch|squeue|scancel): (?:error: )?", "", line) for line in lines]
    if result.code is None:
        messages.append("no answer in time")
    return "; ".join(messages) or f"exit code {result.code}"
