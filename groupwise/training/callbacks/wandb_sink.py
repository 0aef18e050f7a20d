"""The sink `wandb`: Weights & Biases, online, or offline (WANDB_MODE=offline) for a later `wandb sync`.

Online, the service reports the last step that it has of the run. Offline, that is unknown, and each session writes a new folder; so the
newest folder receives the whole run from its record, and the folders of earlier sessions are deleted. Login and server are configured
in wandb (WANDB_API_KEY or `wandb login`).
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from groupwise.core.settings.view import View
from groupwise.training.callbacks.sinks import NOTHING, MetricsRow, ReportedRun, State

PROJECT = "groupwise"


class WandbSink:
    """Sends one row per number of steps done, with tables of rollouts, and the config."""

    package = "wandb"

    def __init__(self) -> None:
        self._wandb: Any = None
        self._run: Any = None
        self._defined: set[str] = set()
        """Names of findings for which wandb was already told to use the finding's own steps as x-axis."""

    def check(self, config: View) -> None:
        """Raise ValueError if a login is needed and missing, because the run must not stop to ask for it."""
        import wandb

        offline = wandb.setup().settings.mode in ("offline", "disabled")
        if not offline and not wandb.login(prompt=False, verify=False):
            raise ValueError(
                "wandb is not logged in. Set WANDB_API_KEY, run `wandb login`, or set WANDB_MODE=offline and send the run later by "
                "`wandb sync`."
            )

    def begin(self, run: ReportedRun) -> int:
        """Start or resume the wandb run with our run's id."""
        import wandb

        section = run.config["run"]
        self._wandb = wandb
        self._run = wandb.init(
            project=section["wandb_project"] or os.environ.get("WANDB_PROJECT") or PROJECT,
            entity=section["wandb_entity"],
            group=section["wandb_group"],
            name=run.name,
            id=run.id,
            resume="allow",
            dir=str(run.folder),
            config=run.config.to_dict(),
            settings=wandb.Settings(console="off", silent=True),
        )
        if self._run.offline:
            run_folder = Path(self._run.dir).parent
            for folder in run_folder.parent.glob("offline-run-*"):
                if folder.name != run_folder.name:
                    shutil.rmtree(folder)
            return NOTHING
        return self._run.starting_step - 1

    def write_row(self, row: MetricsRow) -> None:
        """Send one row of the run's history."""
        for name in {finding.name for finding in row.findings} - self._defined:
            self._defined.add(name)
            self._run.define_metric(f"{name}/*", step_metric=f"{name}/step")
        values: dict[str, Any] = row.flat_values()
        for name, (columns, rows) in row.tables().items():
            values[name] = self._wandb.Table(columns=columns, data=rows)
        self._run.log(values, step=row.steps)

    def end(self, state: State) -> None:
        """Wait until everything is sent or written."""
        self._run.finish(exit_code=0 if state == "finished" else 1)
