"""Follows jobs from a terminal: prints their logs as they grow, and reports their ends.

A log is read in parts. Each part contains the attempt and offset of the next; a request waits a while if there is no new part. A follower
reads the job's status before the log. So once it sees that a job has ended, it reads the complete log, because a job's log is complete
before its status becomes final.

While a fleet does not answer, requests are repeated (`FleetClient.retries`). They only read, from a given position, so nothing is printed
twice.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from groupwise.cli.fleet.printing import FINAL
from groupwise.cli.output import CANCELLED_CODE, LogWriter, say, shell_code
from groupwise.core.errors import UsageError

if TYPE_CHECKING:
    from groupwise.jobs.fleet.client import FleetClient

LOOK_SECONDS = 0.3
"""Seconds between two requests for a log that does not exist yet."""
WAIT_SECONDS = 2.0
"""Seconds for which one request waits for more of a log."""
ASK_SECONDS = 0.5
"""Seconds between two requests for the states of jobs."""
PORTION = 100
"""Largest number of jobs in one request, because their ids are part of the URL."""
MAX_EXPLAINED = 20
"""Largest number of jobs for which the reasons for waiting are printed."""
_NUMBERS = re.compile(r"\d+")
_STATUS_WORDS = {
    "running": "runs",
    "completed": "has completed",
    "failed": "has failed",
    "cancelled": "was cancelled",
}


@dataclass(slots=True)
class _LogReader:
    """Reads the log of a job, and stores the position reached."""

    job_id: str
    only: int | None
    """The only attempt to read; None: the newest, and those after it."""
    tail: int | None
    """Number of lines before the current end at which to start; None: at the beginning, or if reading has started already."""
    rank: int = 0
    """Rank of the member, for a job on several machines."""
    epoch: int | None = None
    """The attempt of the next part; None: there is no log yet."""
    offset: int = 0
    writer: LogWriter = field(default_factory=LogWriter)

    def copy(self, access: FleetClient, wait: float) -> bool:
        """Write everything that is new. Returns False if the log continues with an attempt after the only one to read."""
        while True:
            epoch = self.only if self.epoch is None else self.epoch
            read = partial(access.log, self.job_id, epoch=epoch, offset=self.offset, wait=wait)
            part = access.retries.ask(partial(read, rank=self.rank, tail=self.tail))
            has_started, previous_epoch = self.epoch is not None, self.epoch
            if part.data and self.only not in (None, part.epoch):
                return False
            if part.data and has_started and part.epoch != previous_epoch:
                self.writer.end()
                say(f"— {self.job_id} is tried again: attempt {part.epoch} —")
            if part.data or (part.epoch is not None and self.tail is not None):
                self.epoch, self.offset, self.tail = part.epoch, part.offset, None
            if not part.data:
                return True
            self.writer.write(part.data)


def print_log(
    access: FleetClient, job_id: str, *, tail: int | None, epoch: int | None, rank: int = 0
) -> None:
    """Print the log of one attempt, as far as the control machine has it."""
    job = _find_job(access, job_id, epoch)
    part = access.log(job_id, epoch=epoch, rank=rank, tail=tail)
    shown_epoch = part.epoch if epoch is None else epoch
    if part.epoch != shown_epoch or (not part.data and part.offset == 0):
        if not job["epochs"]:
            _say_what_it_waits_for(access, job, "")
        else:
            say(_why_no_log(access, job_id, epoch))
    writer = LogWriter()
    while part.data and part.epoch == shown_epoch:
        writer.write(part.data)
        part = access.log(job_id, epoch=shown_epoch, offset=part.offset, rank=rank)
    writer.end()


def _why_no_log(access: FleetClient, job_id: str, epoch: int | None) -> str:
    """Why the log of an attempt is empty; None: of the newest one."""
    attempts = access.show(job_id)["attempts"]
    attempt = next((each for each in attempts if each["epoch"] == epoch), attempts[-1])
    if attempt["state"] != "ended":
        return f"{job_id} has written nothing yet"
    name = f"attempt {attempt['epoch']} of {job_id}"
    if attempt["outcome"] == "void":
        return f"{name} has never started"
    if attempt["failure_class"] == "host_lost":
        machines = ", ".join(member["vm_id"] for member in attempt["members"])
        return f"nothing of the log of {name} was copied before {machines} was lost"
    return f"{name} has ended, and wrote nothing"


def follow_log(
    access: FleetClient,
    job_id: str,
    *,
    tail: int | None = None,
    epoch: int | None = None,
    rank: int = 0,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """Print the log as it grows, attempt after attempt, until the job has ended. Returns its final state. `epoch`: only that attempt."""
    reader = _LogReader(job_id, epoch, tail, rank)
    printed_reason, ask = "", access.retries.ask
    while True:
        job = ask(partial(_find_job, access, job_id, epoch))
        is_over = job["status"] in FINAL or _is_over(job, epoch)
        has_started = reader.epoch is not None
        if not reader.copy(access, 0.0 if is_over or not has_started else WAIT_SECONDS) or is_over:
            reader.writer.end()
            return job
        if reader.epoch is None:
            printed_reason = ask(partial(_say_what_it_waits_for, access, job, printed_reason))
            sleep(LOOK_SECONDS)


def _is_over(job: dict[str, Any], epoch: int | None) -> bool:
    """True if the only attempt to read is over: a later one has started, or the job waits for one."""
    return epoch is not None and (job["status"] != "running" or job["epochs"][-1:] != [epoch])


def _find_job(access: FleetClient, job_id: str, epoch: int | None) -> dict[str, Any]:
    """The progress of a job. Raises UsageError if it has no such attempt."""
    job = access.progress(job_id)
    if epoch is not None and epoch not in job["epochs"]:
        known_epochs = ", ".join(str(number) for number in job["epochs"]) or "none yet"
        raise UsageError(
            f"{job_id} has no attempt {epoch}. `--attempt` takes the number of the fleet: {known_epochs}."
        )
    return job


def _say_what_it_waits_for(access: FleetClient, job: dict[str, Any], previous_text: str) -> str:
    """Print why there is no log yet, unless the text is the same as `previous_text`. Returns the text without its numbers."""
    reasons = access.show(job["job_id"])["waiting"]
    text = (
        f"{job['job_id']} waits: {'; '.join(reasons)}"
        if reasons
        else f"{job['job_id']} is {job['status']}"
    )
    without_numbers = _NUMBERS.sub("", text)  # a decreasing remaining time is nothing new
    if without_numbers != previous_text:
        say(text)
    return without_numbers


# Ends


def until_ended(
    access: FleetClient, job_ids: Sequence[str], sleep: Callable[[float], None] = time.sleep
) -> list[dict[str, Any]]:
    """Wait until all of these jobs have ended. Returns their final states."""
    job_set, ask = list(dict.fromkeys(job_ids)), access.retries.ask
    statuses: dict[str, str] = {}
    ended_jobs: dict[str, dict[str, Any]] = {}
    printed: dict[str, str] = {}
    while True:
        waiting, listed = [name for name in job_set if name not in ended_jobs], dict[str, Any]()
        for start in range(0, len(waiting), PORTION):
            portion = waiting[start : start + PORTION]
            rows = ask(partial(access.jobs, ids=portion, limit=PORTION))
            listed |= {job["job_id"]: job for job in rows}
        # A job that is not listed no longer exists: its `progress` raises the fleet's refusal.
        jobs = {name: listed.get(name) or ask(partial(access.progress, name)) for name in waiting}
        for job_id, job in jobs.items():
            if statuses.get(job_id) != job["status"]:
                statuses[job_id] = job["status"]
                explain, previous = len(job_set) <= MAX_EXPLAINED, printed.get(job_id, "")
                printed[job_id] = ask(partial(_say_change, access, job, previous, explain=explain))
        ended_jobs |= {job_id: job for job_id, job in jobs.items() if job["status"] in FINAL}
        if len(ended_jobs) == len(job_set):
            return [ended_jobs[job_id] for job_id in job_ids]
        sleep(ASK_SECONDS)


def _say_change(
    access: FleetClient, job: dict[str, Any], previous_text: str, *, explain: bool
) -> str:
    """Print the new status of a job, unless that says the same as `previous_text`. Returns the text, as `_say_what_it_waits_for` does."""
    job_id, status = job["job_id"], job["status"]
    if explain and status in ("queued", "pending", "held"):
        return _say_what_it_waits_for(access, job, previous_text)
    reason = f": {job['failure_reason']}" if job["failure_reason"] else ""
    say(f"{job_id} {_STATUS_WORDS.get(status, f'is {status}')}{reason}")
    if explain and status in FINAL:
        say(
            f"  `groupwise fleet logs {job_id}` prints its log, `groupwise fleet fetch {job_id}` fetches its outputs"
        )
    return ""


def exit_code_of(jobs: Sequence[dict[str, Any]]) -> int:
    """The exit code of the first job that did not complete; 0 if all did."""
    for job in jobs:
        if job["status"] == "cancelled":
            return CANCELLED_CODE
        if job["status"] == "failed":
            return shell_code(job["exit_code"])
    return 0
