"""Why an attempt was not started, as `code: message`, and what the code concerns: its machine, a GPU there, the job, or the control
machine.

Refusals by the control machine never reached a runner: it lacks something that no other machine could provide either. So no machine is to
blame for them, and no other one would do better. All others are refusals by a runner.
"""

from __future__ import annotations

from collections.abc import Sequence

from groupwise.core.terminal.text import shorten
from groupwise.jobs.fleet.states import Observed
from groupwise.jobs.hosts.failures import LONGEST_LINE

SECRET, BLOB, CHECKPOINT, DISK = "secret", "blob", "checkpoint", "disk"
OURS = frozenset({SECRET, BLOB, CHECKPOINT, DISK})
"""Refusals by the control machine."""
OF_JOBS = frozenset({"bad_spec", "unknown_program", "lower_epoch"})
"""Refusals by a runner, about the job or this attempt of it."""
OF_GPUS = {
    "gpu_busy": Observed.FOREIGN_BUSY,
    "foreign_busy": Observed.FOREIGN_BUSY,
    "gpu_missing": Observed.DEGRADED,
}
"""Refusals by a runner, about a GPU, with the state that a poller would have observed."""
TAKEN = frozenset({"gpu_busy"})
"""Refusals by a runner because another attempt, which it names, holds the GPU or the slot."""
VOIDED = "voided"
"""Refusal by a runner: an engine gave the attempt up before it started."""
FOR_GOOD = frozenset({"bad_spec", BLOB})
"""Refusals that every later attempt would meet too."""
_NAMED = 3
"""Maximum file names shown in a message."""


def code_of(refusal: str | None) -> str:
    """The code of a refusal."""
    return (refusal or "").partition(":")[0]


def message_of(refusal: str | None) -> str:
    """The message of a refusal, without the code."""
    return (refusal or "").partition(":")[2].strip()


def of_engine(refusal: str | None) -> str | None:
    """The reason why an engine gave the attempt up before it started; None: it did not."""
    return message_of(refusal) if code_of(refusal) == VOIDED else None


def of_files(job_id: str, lacking: Sequence[str], error: Exception) -> str:
    """The refusal for lost files of a job. They do not come back by themselves: the submitter has them."""
    return (
        f"{BLOB}: {_missing_files_message(lacking)}: {error}. Submit the job again, which sends its files, or put them back and "
        f"`groupwise fleet resume {job_id}`"
    )


def of_checkpoint(step: int, path: str, lacking: Sequence[str], error: Exception) -> str:
    """The refusal for a lost checkpoint. Only the store had it; the job can resume from another one."""
    return f"{CHECKPOINT}: the checkpoint of step {step}, {path}, is damaged: {_missing_files_message(lacking)}: {error}"


def _missing_files_message(lacking: Sequence[str]) -> str:
    rest_note = f" and {len(lacking) - _NAMED} more" if len(lacking) > _NAMED else ""
    names = shorten(", ".join(lacking[:_NAMED]), LONGEST_LINE) + rest_note
    verb = "is" if len(lacking) == 1 else "are"
    return f"{names} {verb} not in the fleet's store of files"
