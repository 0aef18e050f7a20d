"""The callback `loss_logging`: writes the course of the loss to the log and to a CSV file."""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Sequence
from pathlib import Path

from groupwise.core import atomic_files
from groupwise.core.plugins import nearest
from groupwise.training.callbacks.base import Callback, RunHandle

logger = logging.getLogger(__name__)

FILE = "loss_history.csv"
"""Default name of the table's file."""
COLUMNS = ("loss", "reward", "reward_std", "kl", "entropy", "grad_norm", "learning_rate")


class LossLogging(Callback):
    """Writes `file` into the run's folder: a row for each step (from 1), a column for each of `metrics`.

    A metric that a step lacks leaves an empty cell; a metric that the first step lacks is reported once, unless it is a default. When a run
    starts or is resumed, the file is written again from the record, so it contains each step once even after a crash. Every
    `run.logging_steps` steps, the same numbers are logged.
    """

    def __init__(self, metrics: tuple[str, ...] = COLUMNS, file: str = FILE) -> None:
        if not metrics:
            raise ValueError("metrics is empty; name at least one.")
        if Path(file).name != file or not file.endswith(".csv"):
            raise ValueError(
                f"file is {file!r}; it is written into the run's folder, so give only a name, which ends in .csv."
            )
        self.metrics = tuple(metrics)
        self.file = file
        self._doubted = () if self.metrics == COLUMNS else self.metrics
        """Metrics named by the user, for which a warning is due if the run does not have them."""

    def claim(self) -> str:
        """Refuse a second callback that writes to the same file."""
        return f"the file {self.file}"

    def on_run_begin(self, run: RunHandle) -> None:
        """Write the file again with the steps so far."""
        curves = {name: dict(curve) for name, curve in run.metrics(self.metrics).items()}
        rows = [
            [step, *(curves.get(name, {}).get(step, "") for name in self.metrics)]
            for step in range(1, run.step + 1)
        ]
        atomic_files.write_file(
            run.folder / self.file, _csv_text([["step", *self.metrics], *rows]).encode()
        )
        self._doubted = tuple(name for name in self._doubted if name not in curves)

    def on_step_end(self, run: RunHandle, metrics: dict[str, float]) -> None:
        """Append the step's row."""
        row = [run.step, *(metrics.get(name, "") for name in self.metrics)]
        with (run.folder / self.file).open("a", encoding="utf-8", newline="") as file:
            file.write(_csv_text([row]))
        # Warn once about missing metrics: a step may lack one (no group had signal, so there is no loss), but the name may also be wrong.
        unverified, self._doubted = self._doubted, ()
        for unknown_name in unverified:
            if unknown_name in metrics:
                continue
            suggestions = nearest(unknown_name, metrics)
            hint = f" Did you mean {' or '.join(suggestions)}?" if suggestions else ""
            run.say(
                f"loss_logging: there is no metric {unknown_name!r} in the steps so far: its column is empty.{hint} There are: "
                f"{', '.join(sorted(metrics))}"
            )
        if run.step % run.config.run.logging_steps == 0:
            values = [f"{name} {metrics[name]:.4g}" for name in self.metrics if name in metrics]
            logger.info("step %d/%d: %s", run.step, run.max_steps, ", ".join(values))


def _csv_text(rows: Sequence[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
