"""A dashboard's sources and its access control: the folder of runs, and a fleet and a training server if there are any."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from groupwise.core.errors import RunNotFoundError
from groupwise.dashboard.access import AccessControl
from groupwise.dashboard.sources.fleet import WatchedFleet
from groupwise.dashboard.sources.runs import RunsIndex
from groupwise.dashboard.sources.server import WatchedServer
from groupwise.runs.find import is_file, no_such_run, run_folders
from groupwise.runs.folder import RECORD


class Ending(Protocol):
    """An event of a thread or of a loop."""

    def is_set(self) -> bool: ...
    def set(self) -> None: ...


@dataclass(slots=True)
class DashboardContext:
    """Everything that pages are made of."""

    runs: RunsIndex
    access: AccessControl
    fleet: WatchedFleet | None = None
    server: WatchedServer | None = None
    ending: Ending = field(default_factory=threading.Event)
    """Set when the dashboard ends, so streams end too."""

    def run(self, name: str) -> Path:
        """The folder of a run of this dashboard. Raises RunNotFoundError, also for an invalid name."""
        if self.has(name):
            return self.runs.folder / name
        if name in {path.name for path in run_folders(self.runs.folder)}:
            raise RunNotFoundError(
                f"{self.runs.folder / name} is not a run that can be shown: it has no record ({RECORD}). A training that ended before "
                "its first word leaves such a folder, and so does a copy that was broken off."
            )
        raise RunNotFoundError(no_such_run(name, self.runs.folder))

    def run_and_step(self, reference: str) -> tuple[Path, int | None]:
        """The folder of `RUN`, or of `RUN@STEP` with the step. Raises RunNotFoundError."""
        name, at, step = reference.rpartition("@")
        if at and not self.has(reference) and step.isdecimal() and len(step) < 16:
            return self.run(name), int(step)
        return self.run(reference), None

    def has(self, name: str) -> bool:
        """True if there is a run of this name."""
        plain = name not in ("", ".", "..") and "/" not in name and "\0" not in name
        return plain and is_file(self.runs.folder / name / RECORD)
