"""The word `parquet` of `run.report_to`: the whole record as Parquet, in `parquet/` of the run's folder.

Such a file cannot be added to, so there is one when the run ends or stops, as `groupwise runs export` writes it; a run that goes on
replaces it when it ends again.
"""

from __future__ import annotations

from groupwise.core import atomic_files
from groupwise.core.errors import UsageError
from groupwise.core.settings.view import View
from groupwise.runs.folder import RECORD
from groupwise.runs.record_files import check_can_write, steps_of, write_record
from groupwise.runs.store import Store
from groupwise.training.callbacks.base import Callback, RunEnd, RunHandle

NAME = "parquet"
"""Its word, its name in messages, and its folder."""


class ParquetRecord(Callback):
    """Writes `rollouts.parquet`, `metrics.parquet` and `evaluations.parquet`."""

    last = True

    def check(self, config: View) -> None:
        """Parquet needs its package."""
        try:
            check_can_write("parquet")
        except UsageError as error:
            raise ValueError(f"run.report_to names {NAME}. {error}") from None

    def on_run_end(self, run: RunHandle, end: RunEnd) -> None:
        """However it ended: the record says what was done."""
        with Store.open(run.folder / RECORD, readonly=True) as store:
            steps = steps_of(store)
            atomic_files.make_folder(
                run.folder / NAME,
                lambda folder: write_record(store, "parquet", folder, steps),
                replace=True,
            )
