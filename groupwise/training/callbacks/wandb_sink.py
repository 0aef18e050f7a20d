"""The sink `wandb`: Weights & Biases, online or offline (WANDB_MODE=offline), where `wandb sync` sends the run later.

Online, the service knows up to which step it has the run. Offline nothing knows, and each session writes a folder of its own; so the
newest folder gets the whole run from its record, and those of earlier sessions are deleted. Login and server are configured in wandb
(WANDB_API_KEY or `wandb login`).
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from groupwise.core.settings.view import View
from groupwise.training.callbacks.sinks import NOTHING, MetricsRow, Reported, State

PROJECT = "groupwise"


class WandbSink:
    """Rows by steps done, a table of rollouts among them, and the config."""

    package = "wandb"

    def __init__(self) -> None:
        self._wandb: Any = None
        self._run: Any = None
        self._defined: set[str] = set()
        """Names of findings whose curves already have their own steps as x-axis."""

    def check(self, config: View) -> None:
        """Online it needs a login, and a run must not stop to ask for one."""
        import wandb

        offline = wandb.setup().settings.mode in ("offline", "disabled")
        if not offline and not wandb.login(prompt=False, verify=False):
            raise ValueError(
                "wandb is not logged in. Set WANDB_API_KEY, run `wandb login`, or set WANDB_MODE=offline and send the run later by "
                "`wandb sync`."
            )

    def begin(self, run: Reported) -> int:
        """Take the run up by its id."""
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
            own = Path(self._run.dir).parent
            for folder in own.parent.glob("offline-run-*"):
                if folder.name != own.name:
                    shutil.rmtree(folder)
            return NOTHING
        return self._run.starting_step - 1

    def line(self, line: MetricsRow) -> None:
        """One row of its history."""
        for name in {finding.name for finding in line.findings} - self._defined:
            self._defined.add(name)
            self._run.define_metric(f"{name}/*", step_metric=f"{name}/step")
        values: dict[str, Any] = line.row()
        for name, (columns, rows) in line.tables().items():
            values[name] = self._wandb.Table(columns=columns, data=rows)
        self._run.log(values, step=line.steps)

    def end(self, state: State) -> None:
        """Wait until all is sent or written."""
        self._run.finish(exit_code=0 if state == "finished" else 1)
