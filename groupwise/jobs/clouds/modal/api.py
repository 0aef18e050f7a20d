"""The interface to Modal: the calls that we make, and no others. `live.py` calls the real Modal; `tests/fake_modal.py` imitates it.

Modal runs functions in containers that it creates. We have two functions. The coordinator (`coordinator.py`, function `coordinate`) never
runs more than once at a time. The worker (`worker.py`, function `work`) gets one call for each stint of a job, with the GPU, the time limit
and the secrets of that job. Both share a volume: others see a change once its writer has committed and they have reloaded.

This file, `coordinator.py` and `worker.py` are imported in containers that have Python and Modal's package, and no other package.
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
"""The key of `Order.place_options` whose value becomes `Call.named`."""
MAX_SECONDS = 86_400
"""The longest timeout of a call that Modal allows, in seconds."""
SPARE_SECONDS = 180.0
"""Seconds reserved at the end of a call: the command gets its grace and its files are committed, before Modal ends the container."""


@dataclass(frozen=True, slots=True)
class Call:
    """The argument of a call of the worker. It holds no values of secrets."""

    job: str
    epoch: int
    number: int = 1
    """The stint's number, from 1. Each stint resumes where the previous one ended."""
    app: str = ""
    """The app whose image has the packages of this job; empty: the app without packages."""
    gpu: str | None = None
    """Modal's name for the GPU; None: no GPU."""
    gpus: int = 0
    timeout: int = MAX_SECONDS
    """Seconds after which Modal ends the call."""
    spare: float = SPARE_SECONDS
    limit: float | None = None
    """Time limit of the job in seconds from the start of the first stint; None: no limit."""
    python: str | None = None
    """Path in the image of the interpreter with the job's packages; None: the container's own."""
    every: float = 5.0
    """Seconds between two rounds; each commits new files and checks for a cancellation."""
    named: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    """Names of the workspace's secrets, and for each the variables that the job gets."""

    @property
    def variables(self) -> list[str]:
        """All variables of `named`."""
        return [variable for variables in self.named.values() for variable in variables]

    def document(self) -> dict[str, Any]:
        """The call as a JSON object, as it is sent."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Image:
    """The packages of a job in a container. `builder.py`, one of the files, installs them. The name contains a hash of the files."""

    name: str
    python: str
    """The Python version, such as `3.11`."""
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes], repr=False)


def app_of(image: str) -> str:
    """The name of the app whose worker uses this image."""
    return f"groupwise-{image}"


class ModalApi(Protocol):
    """The operations of Modal. Errors are those of `groupwise.jobs.hosts.host`: HostUnreachable (nothing happened), OutcomeUnknown,
    RunnerRefused."""

    async def workspace(self) -> str | None:
        """The token's owner; None if there is no token. Raises RunnerRefused if Modal rejects the token."""
        ...

    async def rates(self) -> Mapping[str, float] | None:
        """What the workspace pays in dollars an hour, by Modal's names: `gpu_hour_cost_a100_80gb`. None without a token that may ask."""
        ...

    async def has_app(self, name: str) -> bool:
        """True if this app is deployed already."""
        ...

    async def deploy(self, image: Image) -> None:
        """Deploy the app of this image. May be repeated."""
        ...

    async def call_coordinator(self, verb: str, *arguments: Any) -> Any:
        """Send a request to the coordinator; see `coordinator.py`."""
        ...

    async def spawn(self, call: Call, secrets: Mapping[str, str]) -> str:
        """Start a call that continues without this process; returns its id."""
        ...

    async def expect_secrets(self, variables_by_secret: Mapping[str, Sequence[str]]) -> None:
        """Raise RunnerRefused if the workspace lacks one of these secrets, or a secret lacks one of its variables."""
        ...

    async def lives(self, call: str) -> bool:
        """True while a call waits for a container or runs. False once it has ended, or if Modal no longer knows it."""
        ...

    async def cancel(self, call: str) -> None:
        """End a call if it has not ended."""
        ...

    async def close(self) -> None:
        """Close connections."""
        ...
