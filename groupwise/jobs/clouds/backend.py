"""What can place a job: the contract of every backend, a machine over SSH as much as a cluster or a cloud.

A job has a name, which is its key: submitted again, by whomever, it is the same job. Its attempts are counted from 1; a later one goes on
from the checkpoints of the one before. Nothing that a backend needs is on the machine that submitted: whoever reaches the place finds the
job by its name, with all that it was asked for but the values of its secrets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from groupwise.core.errors import RunError
from groupwise.jobs.hosts.answers import LogPart
from groupwise.jobs.hosts.failures import FailureClass
from groupwise.jobs.hosts.files import BlobStore
from groupwise.jobs.hosts.spec import JOB_ID, JobSpec, as_json, from_json, problems


class CloudError(RunError):
    """A backend cannot do what was asked, or its place cannot be reached."""

    code = "cloud"


class Unreachable(CloudError):
    """The place did not answer. What it was asked may have been done; asking again finds out."""

    code = "unreachable"


class Busy(CloudError):
    """Somebody else is at it at the moment; asking again helps."""

    code = "busy"


class NameTaken(CloudError):
    """There is another job of this name."""

    code = "name_taken"


class NotHere(CloudError):
    """There is no job of this name."""

    code = "not_here"


class Phase(StrEnum):
    """How far an attempt is."""

    WAITING = "waiting"
    """Taken, and not begun: in a queue, or its machine is made ready."""
    RUNNING = "running"
    ENDED = "ended"


class Outcome(StrEnum):
    """How an attempt ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIME_LIMIT = "time_limit"
    LOST = "lost"
    """Its machine was, with what was not fetched yet."""
    REFUSED = "refused"
    """It never began."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How an attempt ended, and why."""

    outcome: Outcome
    reason: str
    """For people."""
    failure: FailureClass | None = None
    """What kind of failure it was; None: none."""
    code: int | None = None
    """Exit status of the command, where it came to one; below 0 the signal that killed it, as in `subprocess`."""
    seconds: float | None = None
    """That the command took."""


@dataclass(frozen=True, slots=True)
class Status:
    """What is known of an attempt now."""

    phase: Phase
    log_size: int = 0
    """Bytes of its log so far."""
    checkpoints: int = 0
    """Complete ones."""
    step: int | None = None
    """Of the newest of these."""
    ending: Ending | None = None
    """There from `Phase.ENDED` on."""
    waits_for: str = ""
    """In a queue: what for, as the engine says it."""


@dataclass(frozen=True, slots=True)
class Order:
    """A job that is to be placed."""

    name: str
    """Letters, digits, `-` and `_`."""
    spec: JobSpec
    gpus: int = 0
    """Of each machine, for the job alone."""
    nodes: int = 1
    """Machines on which its command runs; the first one has its log and what it makes."""
    secrets: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    """Values of the variables that `spec.secrets` names. They travel beside the job and are kept nowhere."""
    asks: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What only this kind of place understands, as JSON: a partition, a type of machine."""
    python: str | None = None
    """The interpreter there whose programs its command finds first; None: whatever the place has."""
    meets_at: str | None = None
    """Where the other machines reach the first one; None: as whoever submits does."""

    def problems(self) -> list[str]:
        """What is wrong with it, in words; empty: nothing."""
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
        return found + [f"secret {name}: there is no value for it" for name in lacking]

    def document(self) -> dict[str, Any]:
        """All of it but the values of secrets, to be kept where the job is."""
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
        """What `document` described; the values of secrets have to be given anew."""
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
        """The same with these values."""
        return replace(self, secrets=dict(secrets))


HOW = ("python", "meets_at")
"""What an order says of how the job is begun, and not of what it is."""


def identity_fields(document: Mapping[str, Any]) -> dict[str, Any]:
    """Of an order's document, what makes it another job's or the same."""
    return {name: value for name, value in document.items() if name not in HOW}


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do beside placing a job on one machine."""

    nodes: bool = False
    """Several machines for one job."""
    paid: bool = False
    """Machines cost money while they are there."""
    queues: bool = False
    """A job waits for what it needs; else what is not free refuses it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What would be done."""

    where: str
    steps: tuple[str, ...]
    """In order, for people."""
    command: tuple[str, ...]
    """As it will be run there."""
    price_per_hour: float | None = None
    """Dollars; None where nothing is paid, or where nobody could say how much (`paid`)."""
    paid: bool = False
    """It costs something, known or not."""
    paid_hours: float | None = None
    """The most that is paid for; None: as long as the job may take."""


@dataclass(frozen=True, slots=True)
class Handle:
    """An attempt at its place."""

    backend: str
    name: str
    attempt: int
    detail: Mapping[str, str] = field(default_factory=dict[str, str])
    """How the place calls it: an engine's id, the address of a machine."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """What was brought here."""

    folder: Path
    files: tuple[str, ...]
    """That are here now, by their paths in `folder`."""
    received: int
    """Bytes that came; a file that was here already came no more."""
    left_out: Mapping[str, str]
    """What did not come, with the reason."""


@dataclass(frozen=True, slots=True)
class Rented:
    """What costs money for a job as long as it is there: a machine, a box."""

    id: str
    """As its place calls it."""
    job: str
    attempt: int
    """That it was begun for."""
    owner: str
    """Who began it."""
    since: float
    """Seconds since the epoch."""
    deadline: float
    """Likewise; at which it ends by itself; whatever is there later has to be ended."""
    address: str = ""
    """For people."""
    price_per_hour: float | None = None
    """Dollars; None: nobody knows."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a job has cost so far."""

    dollars: float
    counts: str
    """What was counted, and what was not, for people."""


TERMINATE_AFTER = "terminate_after"
"""In `Order.asks` of a place that is paid: what the job runs on ends as soon as its results are here, also after a success."""
KEEP_ON_FAILURE = "keep_on_failure"
"""Likewise: it stays until its deadline where the job or its set-up has failed."""


@runtime_checkable
class Renting(Protocol):
    """What a backend of a place that is paid can do beside."""

    async def rented(self) -> list[Rented]:
        """All that is there of anybody's jobs of this account, whatever its job does."""
        ...

    async def give_back(self, rented: Rented) -> None:
        """End it now, whatever runs on it. The job's name and its ending are remembered as far as they are known. May be repeated."""
        ...


@runtime_checkable
class Priced(Protocol):
    """What a backend can do beside that can say what its jobs cost."""

    async def cost(self, handle: Handle) -> Cost | None:
        """Of all attempts so far, as far as is known. None: nothing is."""
        ...


class Backend(Protocol):
    """A place for jobs. Every call may be repeated, and made anew by another process on another machine."""

    name: str
    capabilities: Capabilities

    async def plan(self, order: Order) -> Plan:
        """What `submit` would do; nothing is changed."""
        ...

    async def submit(self, order: Order, store: BlobStore) -> Handle:
        """Place it; `store` holds its files. A job of this name that asks for the same is not placed again.

        Raises NameTaken where it asks for something else, UsageError for an order with problems, CloudError.
        """
        ...

    async def resume(self, name: str, secrets: Mapping[str, str], store: BlobStore) -> Handle:
        """Begin another attempt of a job whose last one has ended without success, from its newest checkpoint.

        `store`: what the place does not have any more is looked for there. Raises NotHere, CloudError.
        """
        ...

    async def find(self, name: str) -> Handle | None:
        """The newest attempt of a job."""
        ...

    async def order(self, handle: Handle) -> Order:
        """What was asked for, without the values of secrets."""
        ...

    async def status(self, handle: Handle) -> Status:
        """What is known now. What cannot be found out raises CloudError: silence is no end."""
        ...

    async def wait(self, handle: Handle, seen: Status, seconds: float) -> Status:
        """The status as soon as it differs from `seen`, or after so many seconds."""
        ...

    async def log(self, handle: Handle, offset: int, limit: int) -> LogPart:
        """Bytes of its output from `offset` on, at most `limit`, and how many there are."""
        ...

    async def cancel(self, handle: Handle, grace: float) -> None:
        """Ask it to end, and end it after `grace` seconds. One that has not begun never will; of one that has ended nothing changes."""
        ...

    async def fetch(self, handle: Handle, folder: Path) -> Fetched:
        """Bring what it has made: after its end all artefacts, before it every complete checkpoint.

        What is here already comes no more, and what other attempts left here is set aside (`groupwise.jobs.clouds.folder`).
        """
        ...

    async def list(self) -> list[Handle]:
        """The newest attempt of each job at this place, by name."""
        ...

    async def cleanup(self, handle: Handle) -> None:
        """Remove a job that has ended from its place. Raises CloudError for one that has not."""
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...
