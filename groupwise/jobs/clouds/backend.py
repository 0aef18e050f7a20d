"""The interface of every backend that can run a job: a machine over SSH as well as a cluster or a cloud.

A job's name is its key: if any user submits it again, it is the same job. Its attempts are counted from 1; each resumes from the
checkpoints of the previous one. A backend needs no data on the machine that submitted. From any machine that reaches the place, a job
can be found by its name, with its whole order except the values of its secrets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from groupwise.core.errors import RunError, UsageError
from groupwise.jobs.hosts.answers import LogPart
from groupwise.jobs.hosts.failures import FailureClass
from groupwise.jobs.hosts.files import BlobStore
from groupwise.jobs.hosts.spec import JOB_ID, JobSpec, as_json, from_json, problems


class CloudError(RunError):
    """A backend cannot carry out a request, or its place cannot be reached."""

    code = "cloud"


class Unreachable(CloudError):
    """The place did not answer. It may have carried out the request; repeating it shows the result."""

    code = "unreachable"


class Busy(CloudError):
    """Another process is using it at the moment; try again."""

    code = "busy"


class NameTaken(CloudError):
    """There is another job of this name."""

    code = "name_taken"


class JobNotFound(CloudError):
    """There is no job of this name."""

    code = "not_here"


class Phase(StrEnum):
    """The phase of an attempt."""

    WAITING = "waiting"
    """Accepted but not started: in a queue, or its machine is being prepared."""
    RUNNING = "running"
    ENDED = "ended"


class Outcome(StrEnum):
    """How an attempt ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIME_LIMIT = "time_limit"
    LOST = "lost"
    """Its machine was lost, with all results that were not fetched yet."""
    REFUSED = "refused"
    """It never started."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How an attempt ended, and why."""

    outcome: Outcome
    reason: str
    """The reason, as shown to users."""
    failure: FailureClass | None = None
    """The kind of failure; None: it did not fail."""
    code: int | None = None
    """Exit status of the command, if it started; negative: the signal that killed it, as in `subprocess`."""
    seconds: float | None = None
    """Duration of the command in seconds."""


@dataclass(frozen=True, slots=True)
class Status:
    """The state of an attempt now."""

    phase: Phase
    log_size: int = 0
    """Bytes of its log so far."""
    checkpoints: int = 0
    """How many complete checkpoints it has."""
    step: int | None = None
    """The step of the newest complete checkpoint."""
    ending: Ending | None = None
    """How it ended; set once the phase is `Phase.ENDED`."""
    waits_for: str = ""
    """Why it waits in a queue, as reported by the engine."""


@dataclass(frozen=True, slots=True)
class Order:
    """A job to run at a place."""

    name: str
    """The job's name: letters, digits, `-` and `_`."""
    spec: JobSpec
    gpus: int = 0
    """GPUs on each machine, exclusive to this job."""
    nodes: int = 1
    """How many machines run its command; log and results are those of the first one."""
    secrets: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    """Values of the variables that `spec.secrets` names. They are sent separately from the job and stored nowhere."""
    place_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Options, as JSON, that only this kind of place knows: a partition, an instance type."""
    python: str | None = None
    """The interpreter at the place whose folder comes first on PATH; None: the place's default."""
    meets_at: str | None = None
    """Address at which the other machines reach the first one; None: the address that the submitter uses."""

    def check(self) -> None:
        """Check the order. Raises UsageError with a list of all problems."""
        messages = problems(self.spec)
        if not JOB_ID.fullmatch(self.name):
            messages.append(
                f"name {self.name[:80]!r}: letters, digits, - and _ are expected, 80 at most, a letter or a digit first"
            )
        if self.gpus < 0:
            messages.append(f"gpus {self.gpus}: a number from 0 on is expected")
        if self.nodes < 1:
            messages.append(f"nodes {self.nodes}: a number from 1 on is expected")
        missing = sorted(set(self.spec.secrets) - set(self.secrets))
        messages += [f"secret {name}: there is no value for it" for name in missing]
        if messages:
            listed = "".join(f"\n  {message}" for message in messages)
            raise UsageError(f"this job cannot be placed:{listed}")

    def document(self) -> dict[str, Any]:
        """The order as JSON, without the values of secrets, for storage with the job."""
        return {
            "format": 1,
            "name": self.name,
            "gpus": self.gpus,
            "nodes": self.nodes,
            "spec": as_json(self.spec),
            "asks": dict(self.place_options),
            **{
                name: value
                for name in NON_IDENTITY_FIELDS
                if (value := getattr(self, name)) is not None
            },
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Order:
        """Read an order that `document` wrote; the values of secrets must be provided again."""
        return cls(
            document["name"],
            from_json(document["spec"]),
            document["gpus"],
            document.get("nodes") or 1,
            place_options=document.get("asks") or {},
            python=document.get("python"),
            meets_at=document.get("meets_at"),
        )


NON_IDENTITY_FIELDS = ("python", "meets_at")
"""Fields of an order that say how the job is started; they do not identify it."""
MODEL_GB = "model_gb"
"""The key of `Order.place_options` for GB of disk that the model and the checkpoints take. It is missing if the command was not tried
before it was launched, so it does not identify the job either."""


def identity_fields(document: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an order's document that decide whether two orders describe the same job."""
    options: Mapping[str, Any] = document.get("asks") or {}
    asks = {name: value for name, value in options.items() if name != MODEL_GB}
    identity = {name: value for name, value in document.items() if name not in NON_IDENTITY_FIELDS}
    return {**identity, "asks": asks}


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Abilities of a backend in addition to running a job on one machine."""

    nodes: bool = False
    """It can run one job on several machines."""
    paid: bool = False
    """Its machines cost money while they exist."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps that `submit` would take."""

    where: str
    steps: tuple[str, ...]
    """The steps in order, as shown to users."""
    command: tuple[str, ...]
    """The command that will run there."""
    price_per_hour: float | None = None
    """Dollars; None if it is free, or if the price is not known (see `paid`)."""
    paid: bool = False
    """True if it costs money, whether or not the price is known."""
    paid_hours: float | None = None
    """Maximum number of paid hours; None: as long as the job runs."""


@dataclass(frozen=True, slots=True)
class Handle:
    """A reference to an attempt at its place."""

    backend: str
    name: str
    attempt: int
    detail: Mapping[str, str] = field(default_factory=dict[str, str])
    """The place's own names for it: an engine's id, the address of a machine."""


@dataclass(frozen=True, slots=True)
class FetchedResults:
    """The results that were fetched."""

    folder: Path
    files: tuple[str, ...]
    """The existing files, by their paths in `folder`."""
    received: int
    """Number of transferred bytes; existing files are not transferred again."""
    left_out: Mapping[str, str]
    """Files that were not fetched, with the reason."""


@dataclass(frozen=True, slots=True)
class RentedMachine:
    """A rented resource that costs money for a job as long as it exists: a machine."""

    id: str
    """The place's name for it."""
    job: str
    attempt: int
    """The attempt for which it was started."""
    owner: str
    """The user who started it."""
    since: float
    """Seconds since the epoch."""
    deadline: float
    """The time, in seconds since the epoch, when it ends by itself; if it exists later, it has to be ended."""
    address: str = ""
    """Its address, for messages."""
    price_per_hour: float | None = None
    """Dollars; None: not known."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a job so far."""

    dollars: float
    counts: str
    """A description, for users, of what the amount includes and what it does not."""


TERMINATE_AFTER = "terminate_after"
"""A key of `Order.place_options` at a paid place: the job's machine is ended once its results are fetched, also after a success."""
KEEP_ON_FAILURE = "keep_on_failure"
"""Another such key: if the job or its set-up fails, the machine remains until its deadline."""


@runtime_checkable
class Renting(Protocol):
    """Additional methods of a backend whose place is paid."""

    async def rented(self) -> list[RentedMachine]:
        """All existing rented resources for jobs of this account, of every user and in every state."""
        ...

    async def give_back(self, rented: RentedMachine) -> None:
        """End it now, even if a job runs on it. The job's name and ending remain known as far as they were recorded. May be repeated."""
        ...


@runtime_checkable
class Priced(Protocol):
    """The additional method of a backend that knows the cost of its jobs."""

    async def cost(self, handle: Handle) -> Cost | None:
        """The cost of all attempts so far, as far as it is known; None: not known at all."""
        ...


class Backend(Protocol):
    """A place for jobs. Every call may be repeated, also by another process on another machine."""

    name: str
    capabilities: Capabilities

    async def plan(self, order: Order) -> Plan:
        """Describe the steps of `submit` without making any change."""
        ...

    async def submit(self, order: Order, store: BlobStore) -> Handle:
        """Start the job; `store` holds its files. If a job with this name and the same order exists, it is not started again.

        Raises NameTaken if that job has another order, UsageError for an order with problems, CloudError."""
        ...

    async def resume(self, name: str, secrets: Mapping[str, str], store: BlobStore) -> Handle:
        """Start another attempt, from the newest checkpoint, of a job whose last attempt ended without success.

        Files that the place no longer has are taken from `store`. Raises JobNotFound, CloudError."""
        ...

    async def find(self, name: str) -> Handle | None:
        """The newest attempt of a job; None if there is no such job."""
        ...

    async def order(self, handle: Handle) -> Order:
        """The job's order, without the values of secrets."""
        ...

    async def status(self, handle: Handle) -> Status:
        """The current state of an attempt. Raises CloudError if it is unknown: a missing answer does not mean the end."""
        ...

    async def wait(self, handle: Handle, seen: Status, seconds: float) -> Status:
        """Wait until the status differs from `seen`, or for `seconds`; returns it."""
        ...

    async def log(self, handle: Handle, offset: int, limit: int) -> LogPart:
        """Read its output from byte `offset`, at most `limit` bytes; also returns the size of the output."""
        ...

    async def cancel(self, handle: Handle, grace: float) -> None:
        """Ask it to end, and end it after `grace` seconds. If it has not started, it never will; if it has ended, nothing changes."""
        ...

    async def fetch(self, handle: Handle, folder: Path) -> FetchedResults:
        """Fetch its results: all artefacts once it has ended, before that all complete checkpoints.

        Existing files are not transferred again, and files of other attempts are moved aside (`groupwise.jobs.clouds.folder`)."""
        ...

    async def list(self) -> list[Handle]:
        """The newest attempt of each job at this place, sorted by name."""
        ...

    async def cleanup(self, handle: Handle) -> None:
        """Remove an ended job from its place. Raises CloudError if it has not ended."""
        ...

    async def close(self) -> None:
        """Close connections."""
        ...
