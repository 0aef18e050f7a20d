"""Following jobs from a terminal: their logs as they grow, and their ends.

A log lies on the control machine as a file that grows. Whoever follows it looks at the database first and at the file afterwards: so when
a job is seen to have ended, all that it wrote is read, because its log is whole before it ends.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from groupwise.cli.fleet_printing import FINAL
from groupwise.cli.output import say
from groupwise.errors import UsageError

if TYPE_CHECKING:
    from groupwise.cli.fleet_access import Access
    from groupwise.fleet.files.logs import Follower

LOOK_SECONDS = 0.3
"""Between two looks at a log that is followed."""
ASK_SECONDS = 0.5
"""Between two looks at the database for the end of a job."""
PIECE = 1 << 20
_NUMBERS = re.compile(r"\d+")
_SAID = {
    "running": "runs",
    "completed": "has completed",
    "failed": "has failed",
    "cancelled": "was cancelled",
}
CANCELLED_CODE = 130
"""What shells say of a program that was interrupted."""


def print_log(access: Access, job_id: str, *, tail: int | None, epoch: int | None) -> None:
    """The log as far as it is here."""
    found = _look(access, job_id)
    follower = _begin(access, found, tail, epoch)
    if follower is None:
        _say_why_empty(access, found)
        return
    begin = _epoch(follower)
    while (piece := follower.read()) is not None and piece.end.epoch == begin:
        _write(piece.data)


def follow_log(
    access: Access,
    job_id: str,
    *,
    tail: int | None = None,
    epoch: int | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """The log as it grows, attempt after attempt, until the job has ended; what it was then. `epoch`: only that attempt."""
    follower: Follower | None = None
    said = ""
    while True:
        found = _look(access, job_id)
        if follower is None:
            follower = _begin(access, found, tail, epoch)
        if follower is None:
            said = _say_what_it_waits_for(access, found, said)
        elif not _copy(follower, job_id, epoch) or _is_over(found, epoch):
            return found
        if found["status"] in FINAL:
            return found
        sleep(LOOK_SECONDS)


def _begin(
    access: Access, found: dict[str, Any], tail: int | None, epoch: int | None
) -> Follower | None:
    """At the log of the newest attempt that has one, or of the one that is wanted; None: there is none yet."""
    from groupwise.fleet.files.logs import Follower, Position, epochs, log_path

    job_id: str = found["job_id"]
    attempts: list[int] = found["epochs"]
    if epoch is not None and epoch not in attempts:
        there = ", ".join(str(each) for each in attempts) or "none yet"
        raise UsageError(f"{job_id} has no attempt with epoch {epoch}; there are: {there}.")
    known = epochs(access.place.logs, job_id)
    if epoch is not None and epoch not in known:
        return None
    if not known:
        return None
    begin = known[-1] if epoch is None else epoch
    offset = (
        0 if tail is None else _offset_of_tail(log_path(access.place.logs, job_id, begin), tail)
    )
    return Follower(access.place.logs, job_id, position=Position(begin, offset))


def _copy(follower: Follower, job_id: str, only: int | None) -> bool:
    """All that is new; False where it would go on with another attempt than the one that is wanted."""
    before = _epoch(follower)
    while piece := follower.read():
        if piece.end.epoch != before:
            if only is not None:
                return False
            before = piece.end.epoch
            say(f"— {job_id} is tried again: epoch {before} —")
        _write(piece.data)
    return True


def _epoch(follower: Follower) -> int:
    assert follower.position is not None, "_begin gives it one"
    return follower.position.epoch


def _is_over(found: dict[str, Any], epoch: int | None) -> bool:
    """Of a single attempt: a later one was begun, or the job waits for one."""
    return epoch is not None and (found["status"] != "running" or found["epochs"][-1:] != [epoch])


def _look(access: Access, job_id: str) -> dict[str, Any]:
    from groupwise.fleet.verbs import jobs

    return access.read(jobs.log_paths, job_id)


def _say_what_it_waits_for(access: Access, found: dict[str, Any], before: str) -> str:
    """Why there is no log yet, once for each reason."""
    from groupwise.fleet.verbs import jobs

    reasons = access.read(jobs.show, found["job_id"])["waiting"]
    text = f"{found['job_id']} is {found['status']}" + (
        f": {'; '.join(reasons)}" if reasons else ""
    )
    without_numbers = _NUMBERS.sub("", text)  # a time that runs down is no news
    if without_numbers != before:
        say(text)
    return without_numbers


def _say_why_empty(access: Access, found: dict[str, Any]) -> None:
    if not found["epochs"]:
        _say_what_it_waits_for(access, found, "")
    else:
        say(f"{found['job_id']} has written nothing yet")


def _offset_of_tail(path: Path, lines: int) -> int:
    """Where the last lines of a file begin; it is read from its end."""
    with path.open("rb") as file:
        size = end = file.seek(0, os.SEEK_END)
        block = b""
        while end > 0 and block.count(b"\n") <= lines:
            start = max(0, end - PIECE)
            file.seek(start)
            block = file.read(end - start) + block
            end = start
    kept = block.splitlines(keepends=True)[-lines:] if lines else []
    return size - sum(len(line) for line in kept)


def _write(data: bytes) -> None:
    """Bytes as they are where a program reads them; in a terminal, without what could command it."""
    if sys.stdout.isatty():
        from groupwise.display.text import clean

        encoding = sys.stdout.encoding or "utf-8"
        text = clean(data.decode("utf-8", "replace").replace("\r", "\n"))
        typer.echo(text.encode(encoding, "replace").decode(encoding), nl=False)
    else:
        sys.stdout.flush()
        typer.get_binary_stream("stdout").write(data)
    sys.stdout.flush()


# Ends


def until_ended(
    access: Access, job_ids: Sequence[str], sleep: Callable[[float], None] = time.sleep
) -> list[dict[str, Any]]:
    """Wait until all of these jobs have ended; what they were then."""
    from groupwise.fleet.verbs import jobs

    said: dict[str, str] = {}
    while True:
        found = [access.read(jobs.log_paths, job_id) for job_id in job_ids]
        for each in found:
            if said.get(each["job_id"]) != each["status"]:
                said[each["job_id"]] = each["status"]
                _tell_change(access, each)
        if all(each["status"] in FINAL for each in found):
            return found
        sleep(ASK_SECONDS)


def _tell_change(access: Access, job: dict[str, Any]) -> None:
    if job["status"] in ("queued", "pending", "held"):
        _say_what_it_waits_for(access, job, "")
        return
    why = f": {job['failure_reason']}" if job["failure_reason"] else ""
    say(f"{job['job_id']} {_SAID[job['status']]}{why}")


def exit_code_of(ended: Sequence[dict[str, Any]]) -> int:
    """The exit code of the first job that did not complete; 0 where all did."""
    for job in ended:
        if job["status"] == "cancelled":
            return CANCELLED_CODE
        if job["status"] == "failed":
            return _shell_code(job["exit_code"])
    return 0


def _shell_code(code: int | None) -> int:
    """As a shell would have it: a signal is 128 and its number. A job that failed without an exit code is 1."""
    if code is None or code == 0:
        return 1
    return 128 - code if code < 0 else min(code, 255)
