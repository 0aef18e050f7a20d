"""What a dashboard shows, and to whom: the folder of runs, a fleet where there is one, and the door."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

from groupwise.errors import RunNotFoundError
from groupwise.runs.find import no_such_run
from groupwise.runs.folder import RECORD
from groupwise.web.access import Door
from groupwise.web.fleet.watched import WatchedFleet
from groupwise.web.index import RunsIndex


@dataclass(slots=True)
class Place:
    """All that pages are made of."""

    runs: RunsIndex
    door: Door
    fleet: WatchedFleet | None = None
    ending: threading.Event = field(default_factory=threading.Event)
    """Set once it ends, so that streams do."""

    def run(self, name: str) -> Path:
        """The folder of a run of this dashboard. Raises RunNotFoundError, for whatever is no name of one, too."""
        folder = self.runs.folder
        plain = name not in ("", ".", "..") and "/" not in name and "\0" not in name
        if plain and (folder / name / RECORD).is_file():
            return folder / name
        raise RunNotFoundError(no_such_run(name, folder))
