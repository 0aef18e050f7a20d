"""Kinds of jobs: how the columns of a row become a command.

`COMMAND` is built in: its command is the argument list of the request. Other kinds (GRPO, SFT, EVAL) come from installed packages, as
entry points of the group `groupwise.fleet_kinds`; the fleet itself knows nothing of training. Admission calls `expand` once for each
generation of a job and stores the result; a job that may start again with a smaller batch is expanded once more for that attempt.

A kind turns columns into a command. Everything else that a job may request (environment, files, secrets, limits, artefacts) is added here,
for all kinds. A row only chooses among installed kinds by name: nothing that a row names is ever imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import metadata
from typing import Any, Protocol, runtime_checkable

from groupwise.core import plugins
from groupwise.core.errors import UsageError
from groupwise.jobs.fleet.queue.request import (
    COMMAND,
    InvalidRequest,
    request_document_from,
)
from groupwise.jobs.hosts import spec
from groupwise.jobs.hosts.spec import JobSpec

ENTRY_POINTS = "groupwise.fleet_kinds"

Row = Mapping[str, Any]
"""`job_id`, the columns of `request.Columns`, and `request`: the document of `jobs.request`."""


@runtime_checkable
class JobKind(Protocol):
    """The interface of a kind of job, which an entry point names. It may also have `smaller(row) -> row | None`: the row with a smaller
    batch, or None if there is none.
    """

    def expand(self, row: Row) -> JobSpec:
        """The command of a job of this kind. Raises UsageError with all problems of the row, one per line."""
        ...


OF_TRAINING: Mapping[str, Any] = {
    **dict.fromkeys(("model", "dataset", "reward_function")),
    "hyperparams": {},
    "preprocessing_pipeline": "generic",
    "use_unsloth": False,
    "max_steps": 500,
    "learning_rate": 5e-6,
    "batch_size": 1,
    "num_generations": 4,
}
"""Columns that only kinds of training read, with the database's defaults."""


class Command:
    """The built-in kind: the arguments are the command."""

    def expand(self, row: Row) -> JobSpec:
        """The arguments as a command. Columns that are for training are refused."""
        problems = [
            f"{name} is given, but a job of kind {COMMAND} runs its arguments alone: leave {name} out, or give its job_type"
            for name, default in OF_TRAINING.items()
            if row[name] != default
        ]
        if not row["request"].get("arguments"):
            problems.append("there is no command: give the program and its arguments")
        if problems:
            raise InvalidRequest(problems)
        folder = row["output_dir"]
        return JobSpec(
            tuple(row["request"]["arguments"]), artefacts=(folder,), checkpoints=(folder,)
        )


def known() -> list[str]:
    """The names of all kinds."""
    return sorted({COMMAND, *_entry_points()})


def expand(row: Row) -> JobSpec:
    """The whole spec of a job, checked. Raises UsageError with all problems, one per line."""
    beyond = request_document_from(row["request"])
    kind_spec = _expand_row(row)
    limits, resources = beyond.limits, beyond.resources
    limits_set = {name: value for name, value in limits.model_dump().items() if value is not None}
    full_spec = replace(
        kind_spec,
        environment={**kind_spec.environment, **beyond.environment},
        files={**kind_spec.files, **beyond.manifest()},
        secrets=(
            *kind_spec.secrets,
            *(name for name in beyond.secrets if name not in kind_spec.secrets),
        ),
        artefacts=kind_spec.artefacts if beyond.artefacts is None else tuple(beyond.artefacts),
        checkpoints=kind_spec.checkpoints
        if beyond.checkpoints is None
        else tuple(beyond.checkpoints),
        limits=replace(
            kind_spec.limits,
            ram_mb=resources.ram_mb or kind_spec.limits.ram_mb,
            disk_mb=resources.disk_mb or kind_spec.limits.disk_mb,
            **limits_set,
        ),
    )
    problems = [
        *(
            f"file {path!r}: the kind puts another file there; choose another path"
            for path, entry in beyond.manifest().items()
            if path in kind_spec.files and kind_spec.files[path] != entry
        ),
        *spec.problems(full_spec),
    ]
    if problems:
        raise InvalidRequest(problems)
    return full_spec


def smaller(row: Row, times: int) -> JobSpec | None:
    """The spec after the batch was made smaller `times` times; None if the kind has no smaller one."""
    kind = _find_kind(row["job_type"])
    shrink = getattr(kind, "smaller", None)
    if shrink is None:
        return None
    small = row
    for _ in range(times):
        shrunk: Row | None = shrink(small)
        if shrunk is None:
            break
        small = shrunk
    return None if small is row else expand(small)


def _expand_row(row: Row) -> JobSpec:
    name = row["job_type"]
    kind = _find_kind(name)
    if name != COMMAND and row["request"].get("arguments"):
        raise InvalidRequest([f"arguments are for jobs of kind {COMMAND}; {name} makes its own"])
    if isinstance(kind, Command):
        return kind.expand(row)
    expanded = plugins.run_user_code(
        lambda: kind.expand(row), what=f"the kind {name} failed on this job"
    )
    if not isinstance(expanded, JobSpec):
        raise UsageError(f"the kind {name} gave a {type(expanded).__name__}, not a JobSpec")
    return expanded


def _find_kind(name: str) -> JobKind:
    if name == COMMAND:
        return Command()
    entry_point = _entry_points().get(name)
    if entry_point is None:
        suggestions = plugins.nearest(name, known())
        hint = f" Did you mean {' or '.join(suggestions)}?" if suggestions else ""
        raise UsageError(
            f"job_type {name!r}: no such kind of job.{hint} There are: {', '.join(known())}"
        )
    return _load_entry_point(entry_point)


@cache
def _load_entry_point(entry_point: str) -> JobKind:
    """Import the object that an installed package's entry point names; never a name from a row."""
    kind = plugins.load(entry_point, kind="kind of job").object
    if not isinstance(kind, JobKind):
        raise UsageError(f"{entry_point}, an entry point of {ENTRY_POINTS}, has no `expand(row)`")
    return kind


@cache
def _entry_points() -> dict[str, str]:
    """Entry points by kind. Cached: scanning all installed packages takes longer than everything else in admitting a job."""
    return {point.name: point.value for point in metadata.entry_points(group=ENTRY_POINTS)}
