"""The seam to Modal: what we ask of it, and nothing else. `live.py` asks the real one, `tests/fake_modal.py` is one of this machine.

Modal runs functions in containers of its own making. There are two: the desk (`coordinator.py`), of which there is never more than one, and
the work (`worker.py`), a call for each stint of a job, with the GPU, the time limit and the secrets of that job. What both share is a
volume: what one has written is seen by others once it has committed it and they have reloaded.

This file, `coordinator.py` and `worker.py` are imported in containers that have Python, Modal's package and no other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

NAME = "modal"
"""Of this engine, in attempts."""
ROOT = "groupwise-launch"
"""The runner's folder on the volume."""
NAMED = "secrets"
"""In `Order.asks`: as `Call.named`."""
MOST_SECONDS = 86_400
"""Of one call; Modal has no longer ones."""
SPARE_SECONDS = 180.0
"""Of a call, kept back: the command has its grace in them, then what it has made is committed, before Modal ends the container."""


@dataclass(frozen=True, slots=True)
class Call:
    """What a call of the work is asked. The values of secrets are not among it."""

    job: str
    epoch: int
    number: int = 1
    """Of the stint; each goes on where the one before has ended."""
    app: str = ""
    """In which the work is, with the packages of this job."""
    gpu: str | None = None
    """As Modal calls it; None: no GPU."""
    gpus: int = 0
    timeout: int = MOST_SECONDS
    """Seconds, after which Modal ends the call."""
    spare: float = SPARE_SECONDS
    limit: float | None = None
    """Seconds from the beginning of the first stint, after which the job is ended; None: nothing but its own end ends it."""
    python: str | None = None
    """Interpreter of the job's packages in the image; None: that of the container."""
    every: float = 5.0
    """Seconds between two looks: what is new is committed, and whether it was cancelled is found out."""
    named: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    """Secrets of the workspace, and which of their variables the job has."""

    @property
    def variables(self) -> list[str]:
        """Of `named`, all that the job has."""
        return [variable for variables in self.named.values() for variable in variables]

    def document(self) -> dict[str, Any]:
        """As it travels."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Image:
    """The packages of a job, as the container has them: made by `builder.py` among the files, which are hashed in its name."""

    name: str
    python: str
    """The release of Python, as `3.11`."""
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes], repr=False)

    @property
    def app(self) -> str:
        """What is deployed with it."""
        return f"groupwise-{self.name}"


class ModalPort(Protocol):
    """Modal. Errors are those of `groupwise.jobs.hosts.port`: HostUnreachable (nothing happened), OutcomeUnknown, RunnerRefused."""

    async def workspace(self) -> str | None:
        """Whose it is; None where there is no token. Raises RunnerRefused for one that Modal does not take."""
        ...

    async def has_app(self, name: str) -> bool:
        """It was deployed before."""
        ...

    async def deploy(self, image: Image) -> None:
        """The app of this image. Again, it is the same."""
        ...

    async def desk(self, what: str, *arguments: Any) -> Any:
        """Ask the desk; see `coordinator.py`."""
        ...

    async def spawn(self, call: Call, secrets: Mapping[str, str]) -> str:
        """Begin a call and let it go on by itself. Its id."""
        ...

    async def expect_secrets(self, named: Mapping[str, Sequence[str]]) -> None:
        """Raises RunnerRefused where the workspace lacks one of them, or it one of its variables."""
        ...

    async def lives(self, call: str) -> bool:
        """It waits for a container, or runs. False once it has ended, and when Modal knows nothing of it any more."""
        ...

    async def cancel(self, call: str) -> None:
        """End it, if it lives."""
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...
