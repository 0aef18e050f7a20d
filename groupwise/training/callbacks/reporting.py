"""The callbacks for `run.report_to`: `Reporting` sends a run to its sinks row by row, `ParquetRecord` writes files at its end.

The run's record is authoritative. When a run starts or is resumed, each sink reports the last row that it has, and receives the later
rows of the record. Each step adds a row, which is sent when the next step starts, because by then the evaluation after the step is known
as well. So a sink never receives a partial row or the same row twice, and misses none. Evaluations that other callbacks record are sent
with the next row, after `sinks.json` in the run's folder has noted them; from this file a resume knows which of them a sink has. After a
crash, steps are drawn again whose rows a sink may have already; it keeps the old rows.

If a sink fails, this is logged once and the sink receives nothing more; the run continues.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from typing import Any

from groupwise.core import atomic_files
from groupwise.core.errors import UsageError
from groupwise.core.extras import not_installed
from groupwise.core.settings.view import View
from groupwise.runs.config import WITH_TABLES
from groupwise.runs.curves import EVAL, OF_TRAINING, metrics_of, prefix_of
from groupwise.runs.folder import RECORD
from groupwise.runs.record_files import check_can_write, write_record
from groupwise.runs.records import EvaluationRecord, RolloutFilter
from groupwise.runs.store import Store
from groupwise.training.callbacks.base import Callback, RunEnd, RunHandle
from groupwise.training.callbacks.jsonl_sink import JsonlSink
from groupwise.training.callbacks.mlflow_sink import MlflowSink
from groupwise.training.callbacks.sinks import Finding, MetricsRow, ReportedRun, Sink
from groupwise.training.callbacks.tensorboard_sink import TensorBoardSink
from groupwise.training.callbacks.trackio_sink import TrackioSink
from groupwise.training.callbacks.wandb_sink import WandbSink

logger = logging.getLogger(__name__)

NAME = "report_to"
"""The callback's name in messages."""
PARQUET = "parquet"
"""The word in `run.report_to` for `ParquetRecord`; also its name in messages and its folder."""
IDENTITY = "sinks.json"
"""File of a run with its id in the sinks, and the row with which each finding was sent to each sink."""
SENT = "sent"
"""The key in this file for the findings that were sent."""
SINKS: dict[str, Callable[[], Sink]] = {
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
    "trackio": TrackioSink,
    "mlflow": MlflowSink,
    "jsonl": JsonlSink,
}


class Reporting(Callback):
    """Sends the run's metrics to the named sinks."""

    last = True

    def __init__(self, sinks: tuple[str, ...]) -> None:
        self._sinks = {name: SINKS[name]() for name in sinks}
        self._held: dict[str, int] = {}
        """The last row that each sink has."""
        self._next: MetricsRow | None = None
        """The row of the last step, which is not sent yet."""
        self._sent: dict[str, dict[str, int]] = {}
        """The findings that were sent to each sink, with the row of each."""

    def check(self, config: View) -> None:
        """Raise ValueError if a sink's package is not installed, or if the sink cannot write."""
        for name, sink in self._sinks.items():
            if importlib.util.find_spec(sink.package) is None:
                raise ValueError(not_installed(f"run.report_to: {name}", name, sink.package))
            with redirect_stdout(sys.stderr):
                sink.check(config)

    def on_run_begin(self, run: RunHandle) -> None:
        """Send to every sink the rows that it lacks, up to the steps done."""
        # The id is generated once and moves with the run's folder.
        file = run.folder / IDENTITY
        if not file.exists():
            atomic_files.write_json(file, {"id": secrets.token_hex(4), SENT: {}})
        reported_run = ReportedRun(
            run.name,
            json.loads(file.read_bytes())["id"],
            run.folder,
            run.config,
            run.step,
            _began_at(run),
        )
        for name, sink in list(self._sinks.items()):
            steps_sent = self._call_or_drop(name, lambda sink=sink: sink.begin(reported_run))
            if steps_sent is not None:
                self._held[name] = steps_sent
        # A sink has the findings up to the last row that it has.
        sent: dict[str, dict[str, int]] = json.loads((run.folder / IDENTITY).read_bytes()).get(
            SENT, {}
        )
        self._sent = {
            name: {key: steps for key, steps in sent.get(name, {}).items() if steps <= last_step}
            for name, last_step in self._held.items()
        }
        if not self._sinks:
            return
        first_step = min(self._held.values()) + 1
        for row in self._recorded_metrics(run, first_step):
            self._send_row(run, row)
        self._next = next(iter(self._recorded_metrics(run, run.step, run.step)))

    def on_step_begin(self, run: RunHandle) -> None:
        """Send the previous step's row: all its results are known now."""
        self._send_row(run, self._next)

    def on_step_end(self, run: RunHandle, metrics: dict[str, float]) -> None:
        """Prepare the row of the step."""
        if self._sinks:
            self._next = self._with_table(run, MetricsRow(run.step, metrics, time.time()))

    def on_evaluate(self, run: RunHandle, evaluation: EvaluationRecord) -> None:
        """Add the evaluation's metrics to the row of the last step."""
        if self._next is not None:
            values = {**self._next.values, **_evaluation_metrics(evaluation)}
            self._next = replace(self._next, values=values)

    def on_run_end(self, run: RunHandle, end: RunEnd) -> None:
        """Send the last row of a finished run. Any other run keeps it, because a resume may still add to it."""
        if end.state == "finished":
            self._send_row(run, self._next)
        for name, sink in list(self._sinks.items()):
            self._call_or_drop(name, lambda sink=sink: sink.end(end.state))

    def _send_row(self, run: RunHandle, row: MetricsRow | None) -> None:
        lagging_sinks = [name for name in self._sinks if row and self._held[name] < row.steps]
        if row is None or not lagging_sinks:
            return
        with _open_record(run) as store:
            evaluations = store.evaluations(rows=False)
        findings = {
            f"{record.name}@{record.step}": Finding(
                prefix_of(record), record.step, metrics_of(record)
            )
            for record in evaluations
            if not OF_TRAINING.fullmatch(record.name) and record.step <= row.steps
        }
        for name in lagging_sinks:
            new_findings = {
                k: finding for k, finding in findings.items() if k not in self._sent[name]
            }
            if new_findings:
                self._sent[name] |= dict.fromkeys(new_findings, row.steps)
                # Noted before the row is sent: if sending fails, the sink's last row is an earlier one, and
                # the finding counts as not sent.
                identity = json.loads((run.folder / IDENTITY).read_bytes())
                atomic_files.write_json(
                    run.folder / IDENTITY,
                    {**identity, SENT: {**identity.get(SENT, {}), **self._sent}},
                )
            if row.values or new_findings:
                full_row = replace(row, findings=tuple(new_findings.values()))
                self._call_or_drop(
                    name, lambda name=name, row=full_row: self._sinks[name].write_row(row)
                )
                self._held[name] = row.steps

    def _call_or_drop(self, name: str, call: Callable[[], Any]) -> Any:
        try:
            # Some sinks print; stdout belongs to the command's result.
            with redirect_stdout(sys.stderr):
                return call()
        except Exception as error:  # noqa: BLE001 — after any error, the run continues without the sink
            del self._sinks[name]
            logger.warning(
                "%s failed and is left out from now on: %s: %s. The run's record has everything; a resume sends what is missing",
                name,
                type(error).__name__,
                error,
            )
            return None

    def _recorded_metrics(
        self, run: RunHandle, first_step: int, last_step: int | None = None
    ) -> Iterator[MetricsRow]:
        """The rows of the record from `first_step` to `last_step`. The default ends before the last step, whose row may still grow."""
        last_step = run.step - 1 if last_step is None else last_step
        with _open_record(run) as store:
            values: dict[int, dict[str, float]] = {}
            for name, curve in store.metrics(since=max(first_step - 1, 0)).items():
                for step, value in curve:
                    values.setdefault(step, {})[name] = value
            for record in store.evaluations(rows=False):
                if OF_TRAINING.fullmatch(record.name):
                    values.setdefault(record.step, {}).update(_evaluation_metrics(record))
            finished_at = {record.step + 1: record.finished_at for record in store.steps()}
        started_at = _began_at(run)
        for steps in range(max(first_step, 0), last_step + 1):
            row = MetricsRow(steps, values.get(steps, {}), finished_at.get(steps, started_at))
            yield self._with_table(run, row)

    def _with_table(self, run: RunHandle, row: MetricsRow) -> MetricsRow:
        """Add the rollouts of the step to the row, if the config shows them."""
        section = run.config["run"]
        rows_to_show = (
            section["num_completions_to_print"] if WITH_TABLES & self._sinks.keys() else 0
        )
        if (
            not rows_to_show
            or run.kind != "rl"
            or row.steps % section["logging_steps"]
            or not row.steps
        ):
            return row
        with _open_record(run) as store:
            rollouts = store.rollouts(RolloutFilter(step=row.steps, limit=sys.maxsize))
        if section["log_unique_prompts"]:
            rollouts = list({view.prompt: view for view in reversed(rollouts)}.values())[::-1]
        table = [
            {
                "step": view.step,
                "prompt": view.prompt,
                "completion": view.completion,
                "reward": view.reward,
                "advantage": view.advantage,
                "parts": atomic_files.without_nan({part.name: part.value for part in view.parts}),
                "outcome": view.outcome,
                "tokens": view.completion_tokens,
            }
            for view in rollouts[:rows_to_show]
        ]
        return replace(row, table=table)


class ParquetRecord(Callback):
    """The entry `parquet` of `run.report_to`: writes the whole record as Parquet files into `parquet/` of the run's folder.

    A Parquet file cannot be appended to, so it is written when the run ends for any reason, as by `groupwise runs export`. A resumed run
    replaces it when it ends again.
    """

    last = True

    def check(self, config: View) -> None:
        """Raise ValueError if the package for Parquet is not installed."""
        try:
            check_can_write("parquet")
        except UsageError as error:
            raise ValueError(f"run.report_to names {PARQUET}. {error}") from None

    def on_run_end(self, run: RunHandle, end: RunEnd) -> None:
        """Write the files for every outcome of the run; the record contains the steps done."""
        with Store.open(run.folder / RECORD, readonly=True) as store:
            steps = store.step_count()
            atomic_files.make_folder(
                run.folder / PARQUET,
                lambda folder: write_record(store, "parquet", folder, steps),
                replace=True,
            )


def _open_record(run: RunHandle) -> Store:
    return Store.open(run.folder / RECORD, readonly=True)


def _began_at(run: RunHandle) -> float:
    with _open_record(run) as store:
        return store.get_meta().get("created_at") or time.time()


def _evaluation_metrics(record: EvaluationRecord) -> Mapping[str, float]:
    """The metrics of an evaluation under names such as `eval/…`."""
    return {f"{EVAL}/{name}": value for name, value in metrics_of(record).items()}
