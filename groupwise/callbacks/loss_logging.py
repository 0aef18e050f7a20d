"""The callback `loss_logging`: the course of the loss, in the log and as a table that any program reads."""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Sequence
from pathlib import Path

from groupwise.callbacks.base import Callback, RunHandle
from groupwise.runs import durable

logger = logging.getLogger(__name__)

FILE = "loss_history.csv"
COLUMNS = ("loss", "reward", "reward_std", "kl", "entropy", "grad_norm", "learning_rate")


class LossLogging(Callback):
    """Writes `loss_history.csv` into the run's folder: a row for each step (from 0), a column for each of `metrics`.

    A metric that a step does not have stays empty. When a run begins or goes on, the file is made anew from its record, so that
    it has each step once, however the run ended before. Every `run.logging_steps` steps the same numbers go to the log.
    """

    def __init__(self, metrics: tuple[str, ...] = COLUMNS) -> None:
        if not metrics:
            raise ValueError("metrics is empty; name at least one.")
        self.metrics = tuple(metrics)

    def on_run_begin(self, run: RunHandle) -> None:
        """The steps so far."""
        curves = {name: dict(curve) for name, curve in run.metrics(self.metrics).items()}
        rows = [
            [step, *(curves.get(name, {}).get(step, "") for name in self.metrics)]
            for step in range(run.step)
        ]
        durable.write_file(run.folder / FILE, _table([["step", *self.metrics], *rows]).encode())

    def on_step_end(self, run: RunHandle, metrics: dict[str, float]) -> None:
        """One more."""
        row = [run.step - 1, *(metrics.get(name, "") for name in self.metrics)]
        _append(run.folder / FILE, _table([row]))
        if run.step % run.config.run.logging_steps == 0:
            there = [f"{name} {metrics[name]:.4g}" for name in self.metrics if name in metrics]
            logger.info("step %d/%d: %s", run.step, run.max_steps, ", ".join(there))


def _table(rows: Sequence[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _append(file: Path, text: str) -> None:
    with file.open("a", encoding="utf-8", newline="") as opened:
        opened.write(text)
