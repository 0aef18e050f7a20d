"""The seam to Modal: the calls that we make, and no others. `live.py` calls the real Modal, `tests/fake_modal.py` imitates it here.

Modal runs functions in containers that it makes itself. We have two functions: the desk (`coordinator.py`), which never runs more than
once at a time, and the work (`worker.py`), one call for each stint of a job, with the GPU, the time limit and the secrets of that job. Both
share a volume: others see what one has written once it has committed and they have reloaded.

This file, `coordinator.py` and `worker.py` are imported in containers that have Python, Modal's package and no other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

NAME = "modal"
"""The engine's name in attempts."""
ROOT = "groupwise-launch"
"""The runner's folder on the volume."""
NAMED = "secrets"
"""The key of `Order.asks` that holds what `Call.named` holds."""
MOST_SECONDS = 86_400
"""Seconds of the longest call that Modal has."""
SPARE_SECONDS = 180.0
"""Seconds kept back at the end of a call: the command has its grace, then its files are committed, before Modal ends the container."""


@dataclass(frozen=True, slots=True)
class Call:
    """The argument of a call of the work. It holds no values of secrets."""

    job: str
    epoch: int
    number: int = 1
    """The stint's number, from 1; each goes on where the one before has ended."""
    app: str = ""
    """The app of the work with the packages of this job."""
    gpu: str | None = None
    """Modal's name of the GPU; None: no GPU."""
    gpus: int = 0
    timeout: int = MOST_SECONDS
    """Seconds after which Modal ends the call."""
    spare: float = SPARE_SECONDS
    limit: float | None = None
    """Seconds from the beginning of the first stint, after which the job is ended; None: nothing but its own end ends it."""
    python: str | None = None
    """The interpreter with the job's packages in the image; None: that of the container."""
    every: float = 5.0
    """Seconds between two looks, at which new files are committed and a cancellation is noticed."""
    named: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    """Secrets of the workspace by name, and the variables of each that the job gets."""

    @property
    def variables(self) -> list[str]:
        """All variables of `named`."""
        return [variable for variables in self.named.values() for variable in variables]

    def document(self) -> dict[str, Any]:
        """The call as JSON, as it travels."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Image:
    """The packages of a job in a container: made by `builder.py`, which is one of the files; the name holds their hash."""

    name: str
    python: str
    """The release of Python, such as `3.11`."""
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes], repr=False)


def app_of(image: str) -> str:
    """The name of the app that does the work with this image."""
    return f"groupwise-{image}"


class ModalPort(Protocol):
    """Modal. Errors are those of `groupwise.jobs.hosts.port`: HostUnreachable (nothing happened), OutcomeUnknown, RunnerRefused."""

    async def workspace(self) -> str | None:
        """The token's owner; None if there is no token. Raises RunnerRefused if Modal does not take it."""
        ...

    async def has_app(self, name: str) -> bool:
        """True if this app was deployed before."""
        ...

    async def deploy(self, image: Image) -> None:
        """Deploy the app of this image. May be repeated."""
        ...

    async def desk(self, what: str, *arguments: Any) -> Any:
        """Ask the desk; see `coordinator.py`."""
        ...

    async def spawn(self, call: Call, secrets: Mapping[str, str]) -> str:
        """Begin a call that goes on by itself; returns its id."""
        ...

    async def expect_secrets(self, named: Mapping[str, Sequence[str]]) -> None:
        """Raises RunnerRefused if the workspace lacks one of these secrets, or a secret lacks one of its variables."""
        ...

    async def lives(self, call: str) -> bool:
        """True while a call waits for a container, or runs. False once it has ended, or if Modal does not know it any more."""
        ...

    async def cancel(self, call: str) -> None:
        """End a call if it lives."""
        ...

    async def close(self) -> None:
        """Close connections."""
        ...
