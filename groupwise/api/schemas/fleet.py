"""Request bodies of a fleet's API, except the request for a job: shared by the server, its client and the document.

It answers with the documents of `groupwise.jobs.fleet.operations.documents`: JSON objects whose keys are the columns of the tables. A
piece of a log is answered as it is, and headers say where the next one begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from groupwise.api.schemas.fail_fast import FailFast
from groupwise.core.errors import UsageError

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
"""Pattern of a machine's name, which is used in commands, messages and URLs."""
MAX_INTEGER = 2**31 - 1
"""Largest value of a 32-bit integer column of the database."""
MAX_SERIAL = 2**63 - 1
"""Largest value of a 64-bit column: numbers of events and attempts, counts of bytes."""
MAX_SECONDS = 1e9
"""The longest duration that a request may give: 31 years."""
MAX_SLOTS = 1024
"""Maximum CPU slots of a machine, or jobs of an engine."""
MAX_GPUS = 1024
"""The most GPUs of one job on one machine."""
MIN_DEADMAN = 120.0
"""Minimum dead-man timeout in seconds: if a dispatcher is killed and another takes over, machines hear nothing for up to this long."""
UNPREPARED = "python3"
"""Default interpreter of a machine; it may lack Groupwise."""
MIN_WEIGHT, MAX_WEIGHT = 1e-3, 1e6
"""The range of a project's weight in the fair share."""

MAX_JOBS = 10_000
"""Maximum number of jobs in one submission."""

MAX_CHANGED = 200
"""Maximum number of jobs changed in one transaction (cancel, hold, release, retry), during which other requests wait."""

MAX_LINES = 100_000
"""The most lines that a request may ask for from the end of a log."""

EPOCH_HEADER = "X-Log-Epoch"
OFFSET_HEADER = "X-Log-Offset"
"""Header with the byte offset of the next piece."""
ENDED_HEADER = "X-Log-Ended"
"""`true`: the job has ended, and this was the last of its log."""
ACTS_FOR = "X-Acts-For"
"""Actor of a request from this machine, percent-encoded, such as `user:ada`. An API at an address ignores it: there keys say who asks."""


def expect_few(number: int) -> None:
    """Raise UsageError for more jobs than one submission may have; client and server use the same message."""
    if number > MAX_JOBS:
        raise UsageError(
            f"{number} jobs: at most {MAX_JOBS} are submitted at once, all or none of them. Make several arrays of them."
        )


def portions(ids: Sequence[str]) -> Iterator[list[str]]:
    """Split ids into batches that are changed in one request each; progress is reported per batch."""
    for start in range(0, len(ids), MAX_CHANGED):
        yield list(ids[start : start + MAX_CHANGED])


@dataclass(frozen=True, slots=True)
class LogPart:
    """A piece of a job's log, as a fleet gives it."""

    data: bytes
    epoch: int | None
    """The attempt to which the next piece belongs; None: there is no log yet."""
    offset: int
    """Likewise."""
    ended: bool
    """The job has ended, and there is no more."""


class FleetBody(FailFast, BaseModel):
    """The base of bodies that a client sends; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class EngineBody(FleetBody):
    """An engine that begins jobs in the machine's place (Slurm, Ray); the machine is as large as it is declared to be here."""

    name: str = Field(min_length=1, max_length=63, description="`slurm` or `ray`.")
    slots: int = Field(
        default=8, ge=1, le=MAX_SLOTS, description="Jobs that wait for it or run there, together."
    )
    gpus: int = Field(
        default=0, ge=0, le=MAX_GPUS, description="The most GPUs that one job may ask for."
    )
    gpu_model: str | None = Field(
        default=None,
        min_length=1,
        max_length=256,
        description="Model of its GPUs, as the engine calls it, which is requested for each job; null: any.",
    )
    gpu_memory_mb: int | None = Field(
        default=None,
        ge=1,
        le=MAX_INTEGER,
        description="Memory that each of its GPUs has at least, in MiB.",
    )
    options: list[str] = Field(
        default=[],
        description="Options for each job, in the engine's form: `--partition=gpu` of sbatch, or `NAME=N`, a resource of Ray.",
    )
    address: str | None = Field(
        default=None,
        min_length=1,
        max_length=1024,
        description="Address of Ray's dashboard, as that machine reaches it; null: `http://127.0.0.1:8265`. Its token is read there.",
    )


class MachineBody(FleetBody):
    """A machine that is to be taken into the fleet. The path of its key is one on the control machine."""

    vm_id: str = Field(pattern=NAME)
    ip_address: str = Field(min_length=1, max_length=255, description="Address or name.")
    user: str = Field(min_length=1, max_length=255, description="User name for the login.")
    ssh_key_path: str = Field(
        min_length=1,
        max_length=4096,
        description="Path of the private key, on the control machine.",
    )
    port: int = Field(default=22, ge=1, le=65535)
    host_key: str | None = Field(
        default=None,
        max_length=4096,
        description="`ssh-ed25519 AAAA…`; without it the machine is polled for its key, which is then to be trusted.",
    )
    jump: dict[str, Any] | None = Field(
        default=None, description="A host to go through: host, port, user, ssh_key_path, host_key."
    )
    workdir: str | None = Field(
        default=None, max_length=4096, description="Folder in which the runner keeps everything."
    )
    python: str | None = Field(
        default=None, max_length=4096, description="The interpreter that jobs find first."
    )
    labels: dict[str, str] = Field(default={})
    cpu_slots: int | None = Field(
        default=None,
        ge=0,
        le=MAX_SLOTS,
        description="Jobs without GPUs at once; null: 1.",
    )
    projects: list[str] | None = Field(
        default=None, description="Projects whose jobs alone are placed there; null: any project's."
    )
    deadman: float | None = Field(
        default=None,
        ge=MIN_DEADMAN,
        le=MAX_SECONDS,
        description="Seconds without the control plane after which its runner ends a job; null: never.",
    )
    probe: list[str] | None = Field(
        default=None, min_length=1, description="Asked for the GPUs in place of nvidia-smi."
    )
    idle_memory_mb: int | None = Field(
        default=None,
        ge=0,
        le=MAX_INTEGER,
        description="Memory in MiB that a GPU may show as used while it counts as idle; null: 500.",
    )
    engine: EngineBody | None = Field(
        default=None,
        description="The engine that begins jobs in its place; null: the machine itself.",
    )


class MachineChangeBody(FleetBody):
    """Changes to a machine; a field that is left out or null stays as it is. User and folder can change only while nothing runs there."""

    ip_address: str | None = Field(
        default=None, min_length=1, max_length=255, description="Address or name."
    )
    port: int | None = Field(default=None, ge=1, le=65535)
    user: str | None = Field(
        default=None, min_length=1, max_length=255, description="User name for the login."
    )
    ssh_key_path: str | None = Field(
        default=None,
        min_length=1,
        max_length=4096,
        description="Path of the private key, on the control machine.",
    )
    jump: dict[str, Any] | None = Field(
        default=None,
        description="A host to go through: host, port, user, ssh_key_path, host_key; {}: none.",
    )
    workdir: str | None = Field(
        default=None,
        min_length=1,
        max_length=4096,
        description="Folder in which the runner keeps everything.",
    )
    python: str | None = Field(
        default=None,
        min_length=1,
        max_length=4096,
        description="The interpreter that jobs find first.",
    )
    cpu_slots: int | None = Field(
        default=None, ge=0, le=MAX_SLOTS, description="Jobs without GPUs at once."
    )
    projects: list[str] | None = Field(
        default=None, description="Projects whose jobs alone are placed there; []: any project's."
    )
    labels: dict[str, str | None] | None = Field(
        default=None, description="These; the others stay, and null takes one away."
    )
    deadman: float | None = Field(
        default=None,
        ge=0,
        le=MAX_SECONDS,
        description="Seconds without the control plane after which its runner ends a job that begins from now on; 0: never.",
    )
    probe: list[str] | None = Field(
        default=None, min_length=1, description="Asked for the GPUs in place of nvidia-smi."
    )
    idle_memory_mb: int | None = Field(
        default=None,
        ge=0,
        le=MAX_INTEGER,
        description="Memory in MiB that a GPU may show as used while it counts as idle.",
    )
    engine: dict[str, Any] | None = Field(
        default=None,
        description="Changes to its engine: fields that are left out stay, and null sets one to its default. No `name`.",
    )


class ReasonBody(FleetBody):
    """Why a job is cancelled, or a machine is drained; its history keeps it."""

    reason: str | None = Field(default=None, max_length=1000)


class JobsBody(FleetBody):
    """The ids of the jobs."""

    jobs: list[Annotated[str, Field(max_length=256)]] = Field(min_length=1, max_length=MAX_CHANGED)


class CancelJobsBody(JobsBody):
    """The jobs to cancel, and the reason."""

    reason: str | None = Field(default=None, max_length=1000)


class PruneBody(FleetBody):
    """The jobs to remove."""

    older_than: float = Field(
        ge=0, le=MAX_SECONDS, description="Seconds since they ended, at least."
    )
    project: str | None = Field(default=None, max_length=80, description="Only of this one.")
    status: list[str] | None = Field(
        default=None, description="Only completed, failed or cancelled ones; null: all of them."
    )
    dry_run: bool = Field(default=False, description="Say which, and remove nothing.")


FINGERPRINT = "^SHA256:[A-Za-z0-9+/]{43}$"
"""Of a host key, as OpenSSH prints it."""


class TrustBody(FleetBody):
    """The fingerprint of the right host key."""

    fingerprint: Annotated[str, Field(pattern=FINGERPRINT)] | None = Field(
        default=None,
        description=(
            "The fingerprint that the machine itself prints: `ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub`; null: the key "
            "that it showed last, whichever that is."
        ),
    )


class ProjectBody(FleetBody):
    """Changes to a project; a field that is left out stays as it is, and null removes a quota."""

    weight: float | None = Field(
        default=None, ge=MIN_WEIGHT, le=MAX_WEIGHT, description="Its share of a busy fleet."
    )
    max_gpus: int | None = Field(
        default=None,
        ge=0,
        le=MAX_INTEGER,
        description="The most GPUs of its running jobs together.",
    )
    max_waiting: int | None = Field(
        default=None, ge=0, le=MAX_INTEGER, description="Jobs that have not begun."
    )


class KeyBody(FleetBody):
    """A key that is to be made."""

    role: str = Field(pattern="^(read|act|admin)$")
    projects: list[str] | None = Field(
        default=None, min_length=1, description="Projects for whose jobs the key is; null: all."
    )
    seconds: float | None = Field(
        default=None,
        gt=0,
        le=MAX_SECONDS,
        description="Seconds for which the key is valid; null: until it is revoked.",
    )
    note: str | None = Field(default=None, max_length=200)
