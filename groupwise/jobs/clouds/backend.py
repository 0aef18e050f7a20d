"""The contract of every backend that can place a job: a machine over SSH as much as a cluster or a cloud.

A job's name is its key: submitted again, by any user, it is the same job. Its attempts are counted from 1; a later one goes on from the
checkpoints of the one before. A backend keeps nothing it needs on the machine that submitted: from any machine that reaches the place, a
job can be found by its name, with everything it was asked for but the values of its secrets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from groupwise.core.errors import RunError, UsageError
from groupwise.jobs.hosts.answers import LogPart
from groupwise.jobs.hosts.failures import FailureClass
from groupwise.jobs.hosts.files import BlobStore
from groupwise.jobs.hosts.spec import JOB_ID, JobSpec, as_json, from_json, problems


class CloudError(RunError):
    """A backend cannot do what was asked, or its place cannot be reached."""

    code = "cloud"


class Unreachable(CloudError):
    """The place did not answer. It may have carried out the request; asking again finds out."""

    code = "unreachable"


class Busy(CloudError):
    """Another process is working on it at the moment; try again."""

    code = "busy"


class NameTaken(CloudError):
    """There is another job of this name."""

    code = "name_taken"


class NotHere(CloudError):
    """There is no job of this name."""

    code = "not_here"


class Phase(StrEnum):
    """How far an attempt has come."""

    WAITING = "waiting"
    """Accepted but not begun: in a queue, or its machine is being prepared."""
    RUNNING = "running"
    ENDED = "ended"


class Outcome(StrEnum):
    """How an attempt ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIME_LIMIT = "time_limit"
    LOST = "lost"
    """Its machine was lost, with everything not fetched yet."""
    REFUSED = "refused"
    """It never began."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How an attempt ended, and why."""

    outcome: Outcome
    reason: str
    """The reason, in words for people."""
    failure: FailureClass | None = None
    """The kind of failure; None: it did not fail."""
    code: int | None = None
    """Exit status of the command, if it got that far; below 0 the signal that killed it, as in `subprocess`."""
    seconds: float | None = None
    """How long the command ran, in seconds."""


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
    """The reason why it waits in a queue, as the engine gives it."""


@dataclass(frozen=True, slots=True)
class Order:
    """A job to be placed."""

    name: str
    """Letters, digits, `-` and `_`."""
    spec: JobSpec
    gpus: int = 0
    """GPUs of each machine, for this job alone."""
    nodes: int = 1
    """Machines on which its command runs; the first one has its log and its results."""
    secrets: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    """Values of the variables that `spec.secrets` names. They travel beside the job and are stored nowhere."""
    asks: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Options that only this kind of place understands, as JSON: a partition, a type of machine."""
    python: str | None = None
    """The interpreter there whose programs the command finds first; None: whatever the place has."""
    meets_at: str | None = None
    """Address at which the other machines reach the first one; None: the one that the submitter uses."""

    def check(self) -> None:
        """Raises UsageError that lists everything wrong with it."""
        found = problems(self.spec)
        if not JOB_ID.fullmatch(self.name):
            found.append(
                f"name {self.name[:80]!r}: letters, digits, - and _ are expected, 80 at most, a letter or a digit first"
            )
        if self.gpus < 0:
            found.append(f"gpus {self.gpus}: a number from 0 on is expected")
        if self.nodes < 1:
            found.append(f"nodes {self.nodes}: a number from 1 on is expected")
        lacking = sorted(set(self.spec.secrets) - set(self.secrets))
        found += [f"secret {name}: there is no value for it" for name in lacking]
        if found:
            listed = "".join(f"\n  {each}" for each in found)
            raise UsageError(f"this job cannot be placed:{listed}")

    def document(self) -> dict[str, Any]:
        """The order as JSON, without the values of secrets, to be stored beside the job."""
        return {
            "format": 1,
            "name": self.name,
            "gpus": self.gpus,
            "nodes": self.nodes,
            "spec": as_json(self.spec),
            "asks": dict(self.asks),
            **{name: value for name in HOW if (value := getattr(self, name)) is not None},
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Order:
        """Read what `document` wrote; the values of secrets have to be given again."""
        return cls(
            document["name"],
            from_json(document["spec"]),
            document["gpus"],
            document.get("nodes") or 1,
            asks=document.get("asks") or {},
            python=document.get("python"),
            meets_at=document.get("meets_at"),
        )

    def with_secrets(self, secrets: Mapping[str, str]) -> Order:
        """The same order with these values."""
        return replace(self, secrets=dict(secrets))


HOW = ("python", "meets_at")
"""Fields of an order that say how the job is begun, not what it is."""


def identity_fields(document: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an order's document that decide whether two orders describe the same job."""
    return {name: value for name, value in document.items() if name not in HOW}


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Abilities of a backend beyond placing a job on one machine."""

    nodes: bool = False
    """It can run one job on several machines."""
    paid: bool = False
    """Its machines cost money while they exist."""
    queues: bool = False
    """A job waits for what it needs; without this, it is refused if that is not free."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps that `submit` would take."""

    where: str
    steps: tuple[str, ...]
    """The steps in order, in words for people."""
    command: tuple[str, ...]
    """The command as it will be run there."""
    price_per_hour: float | None = None
    """Dollars; None if nothing is paid, or the price is not known (see `paid`)."""
    paid: bool = False
    """True if it costs something, known or not."""
    paid_hours: float | None = None
    """Most hours that are paid for; None: as long as the job may take."""


@dataclass(frozen=True, slots=True)
class Handle:
    """An attempt at its place."""

    backend: str
    name: str
    attempt: int
    detail: Mapping[str, str] = field(default_factory=dict[str, str])
    """The place's own names for it: an engine's id, the address of a machine."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """The results that were brought here."""

    folder: Path
    files: tuple[str, ...]
    """Files that are here now, by their paths in `folder`."""
    received: int
    """Bytes that were transferred; files that were here already are not sent again."""
    left_out: Mapping[str, str]
    """Files that did not come, with the reason."""


@dataclass(frozen=True, slots=True)
class Rented:
    """Something that costs money for a job as long as it exists: a machine, a box."""

    id: str
    """The place's name for it."""
    job: str
    attempt: int
    """The attempt that it was started for."""
    owner: str
    """The user who started it."""
    since: float
    """Seconds since the epoch."""
    deadline: float
    """Time when it ends by itself, in seconds since the epoch; if it is still there later, it has to be ended."""
    address: str = ""
    """Its address, for people."""
    price_per_hour: float | None = None
    """Dollars; None: not known."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a job so far."""

    dollars: float
    counts: str
    """An account of what was counted and what was not, for people."""


TERMINATE_AFTER = "terminate_after"
"""A key of `Order.asks` at a paid place: the job's machine ends as soon as its results are here, also after a success."""
KEEP_ON_FAILURE = "keep_on_failure"
"""Another such key: the machine stays until its deadline if the job or its set-up has failed."""


@runtime_checkable
class Renting(Protocol):
    """Additional abilities of a backend whose place is paid."""

    async def rented(self) -> list[Rented]:
        """Everything that exists for jobs of this account, of any user and in any state."""
        ...

    async def give_back(self, rented: Rented) -> None:
        """End it now, whatever runs on it. The job's name and its ending are remembered as far as they are known. May be repeated."""
        ...


@runtime_checkable
class Priced(Protocol):
    """The additional ability of a backend to say what its jobs cost."""

    async def cost(self, handle: Handle) -> Cost | None:
        """The cost of all attempts so far, as far as it is known. None: nothing is."""
        ...


class Backend(Protocol):
    """A place for jobs. Every call may be repeated, also by another process on another machine."""

    name: str
    capabilities: Capabilities

    async def plan(self, order: Order) -> Plan:
        """Describe what `submit` would do; changes nothing."""
        ...

    async def submit(self, order: Order, store: BlobStore) -> Handle:
        """Place the job; `store` holds its files. A job with this name and the same order is not placed again.

        Raises NameTaken if that job has another order, UsageError for an order with problems, CloudError."""
        ...

    async def resume(self, name: str, secrets: Mapping[str, str], store: BlobStore) -> Handle:
        """Begin another attempt of a job whose last one has ended without success, from its newest checkpoint.

        `store` is searched for files that the place no longer has. Raises NotHere, CloudError."""
        ...

    async def find(self, name: str) -> Handle | None:
        """The newest attempt of a job; None if there is no such job."""
        ...

    async def order(self, handle: Handle) -> Order:
        """The job's order, without the values of secrets."""
        ...

    async def status(self, handle: Handle) -> Status:
        """The state of an attempt now. Raises CloudError if it cannot be found out: silence does not mean the end."""
        ...

    async def wait(self, handle: Handle, seen: Status, seconds: float) -> Status:
        """The status as soon as it differs from `seen`, or after `seconds`."""
        ...

    async def log(self, handle: Handle, offset: int, limit: int) -> LogPart:
        """Bytes of its output from `offset` on, at most `limit`, and how many there are."""
        ...

    async def cancel(self, handle: Handle, grace: float) -> None:
        """Ask it to end, and end it after `grace` seconds. One that has not begun never will; one that has ended stays as it is."""
        ...

    async def fetch(self, handle: Handle, folder: Path) -> Fetched:
        """Bring its results: all artefacts once it has ended, before that every complete checkpoint.

        Files that are here already are not sent again, and what other attempts left here is set aside (`groupwise.jobs.clouds.folder`)."""
        ...

    async def list(self) -> list[Handle]:
        """The newest attempt of each job at this place, by name."""
        ...

    async def cleanup(self, handle: Handle) -> None:
        """Remove a job that has ended from its place. Raises CloudError if it has not."""
        ...

    async def close(self) -> None:
        """Close connections."""
        ...
