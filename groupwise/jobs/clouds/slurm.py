"""Options of sbatch for jobs: those that we set, and those that users may set."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from groupwise.core.errors import UsageError
from groupwise.jobs.hosts.spec import Limits

SPARE_SECONDS = 120.0
"""Seconds that are added to a job's own limit for Slurm's: the runner then ends the job first, and records why."""
RESERVED_OPTIONS = (
    *("--job-name", "-J", "--chdir", "-D", "--output", "-o", "--error", "-e", "--open-mode"),
    *("--array", "-a", "--requeue", "--no-requeue", "--wrap", "--test-only", "--parsable"),
    *("--time", "-t", "--nodes", "-N", "--wait", "-W", "--export", "--input", "-i"),
    *("--ntasks", "-n", "--ntasks-per-node", "--clusters", "-M"),
)
"""Options of sbatch that users may not set: with them a job could not be found again, or would not be a single job."""
NAMED_OPTIONS = {
    "partition": "--partition",
    "account": "--account",
    "qos": "--qos",
    "cpus": "--cpus-per-task",
    "memory": "--mem",
}
"""Our own options that correspond to an option of sbatch."""


def sbatch_options(
    place_options: Mapping[str, Any], gpus: int, limits: Limits, *, nodes: int = 1
) -> tuple[str, ...]:
    """The options of sbatch for a job with these requests and `gpus` on each node. Raises UsageError as `checked_options` does."""
    options = [
        f"{option}={place_options[name]}"
        for name, option in NAMED_OPTIONS.items()
        if place_options.get(name)
    ]
    options.append(f"--nodes={nodes}")
    if nodes > 1:
        options.append("--ntasks-per-node=1")
    if gpus:
        gpu_type = f"{place_options['gpu']}:" if place_options.get("gpu") else ""
        options.append(f"--gpus-per-node={gpu_type}{gpus}")
    if limits.time_seconds is not None:
        seconds = limits.time_seconds + (limits.grace_seconds or 0.0) + SPARE_SECONDS
        options.append(f"--time={math.ceil(seconds / 60)}")
    return (*options, *checked_options(place_options.get("options", ())))


def checked_options(options: Sequence[Any]) -> tuple[str, ...]:
    """Check options of sbatch that a user wrote. Raises UsageError for those in OURS."""
    checked = tuple(map(str, options))
    for option in checked:
        name = option.partition("=")[0]
        if not option.startswith("-"):
            raise UsageError(
                f"--sbatch {option}: an option of sbatch is expected, with its value behind `=`, as --sbatch=--constraint=a100."
            )
        # sbatch also accepts abbreviated long options, and short options with the value directly after the letter.
        is_long = name.startswith("--")
        is_ours = (
            any(reserved.startswith(name) for reserved in RESERVED_OPTIONS)
            if is_long
            else name[:2] in RESERVED_OPTIONS
        )
        if is_ours:
            raise UsageError(
                f"--sbatch {option}: {name} is set by groupwise, so that the job is found again. "
                "Its time is --time-limit, its machines are --machines."
            )
    return checked
