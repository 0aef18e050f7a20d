"""The sink `trackio`: a database on this machine (TRACKIO_DIR), shown by `trackio show`, or the Space named by TRACKIO_SPACE_ID.

trackio finds a run to resume by its name, so the name contains our run's id; it reports the last step that it has of the run.
"""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

from groupwise.core.settings.view import View
from groupwise.training.callbacks.sinks import MetricsRow, ReportedRun, State

PROJECT = "groupwise"


class TrackioSink:
    """Sends one row per number of steps done, with tables of rollouts, and the config."""

    package = "trackio"

    def __init__(self) -> None:
        self._trackio: Any = None
        self._run: Any = None

    def check(self, config: View) -> None:
        """Do nothing: only the package is needed."""

    def begin(self, run: ReportedRun) -> int:
        """Start or resume the run of this name in trackio."""
        self._trackio = import_module("trackio")
        self._run = self._trackio.init(
            project=run.config["run"]["trackio_project"] or PROJECT,
            name=f"{run.name}-{run.id}",
            config=run.config.to_dict(),
            resume="allow",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )
        return self._run._next_step - 1

    def write_row(self, row: MetricsRow) -> None:
        """Send one row; trackio takes only finite numbers."""
        values: dict[str, Any] = {k: v for k, v in row.flat_values().items() if math.isfinite(v)}
        for name, (columns, rows) in row.tables().items():
            values[name] = self._trackio.Table(columns=columns, data=rows)
        self._run.log(values, step=row.steps)

    def end(self, state: State) -> None:
        """Wait until everything is written."""
        self._run.finish()
