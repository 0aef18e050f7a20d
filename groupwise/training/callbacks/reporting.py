"""The callback behind `run.report_to`: hands a run to its sinks, line by line.

The record is the truth. When a run begins or goes on, each sink says what it holds, and is sent what the record has beyond that. Then
each step adds a line, which is sent when the next step begins, once what was evaluated after it is known as well. So a sink
never gets half a line, a line twice, or misses one. Evaluations that other callbacks record go with the line that is sent next, once
`sinks.json` in the run's folder says so: a resume knows by it which of them a sink holds, as it knows that of lines. After a crash some
lines are drawn again that a sink has already; those it keeps.

A sink that fails is named once in the log and gets nothing more; the run goes on.
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
from pathlib import Path
from typing import Any

from groupwise.core import atomic_files
from groupwise.core.settings.view import View
from groupwise.runs.config import WITH_TABLES
from groupwise.runs.curves import EVAL, OF_TRAINING, metrics_of, prefix_of
from groupwise.runs.folder import RECORD
from groupwise.runs.records import EvaluationRecord, RolloutFilter, RolloutView
from groupwise.runs.store import Store
from groupwise.training.callbacks.base import Callback, RunEnd, RunHandle
from groupwise.training.callbacks.jsonl_sink import JsonlSink
from groupwise.training.callbacks.mlflow_sink import MlflowSink
from groupwise.training.callbacks.sinks import Finding, MetricsRow, Reported, Sink
from groupwise.training.callbacks.tensorboard_sink import TensorBoardSink
from groupwise.training.callbacks.trackio_sink import TrackioSink
from groupwise.training.callbacks.wandb_sink import WandbSink

logger = logging.getLogger(__name__)

NAME = "report_to"
"""The name of the callback in messages."""
IDENTITY = "sinks.json"
"""File of a run that holds what sinks know it by, and with which line of each sink which finding went."""
SENT = "sent"
"""Its key for findings."""
SINKS: dict[str, Callable[[], Sink]] = {
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
    "trackio": TrackioSink,
    "mlflow": MlflowSink,
    "jsonl": JsonlSink,
}


class Reporting(Callback):
    """Reports to these sinks."""

    last = True

    def __init__(self, sinks: tuple[str, ...]) -> None:
        self._sinks = {name: SINKS[name]() for name in sinks}
        self._held: dict[str, int] = {}
        """The last line that each sink has."""
        self._next: MetricsRow | None = None
        """After the steps done; not sent yet."""
        self._sent: dict[str, dict[str, int]] = {}
        """By sink: the findings that it was sent, and with which line."""

    def check(self, config: View) -> None:
        """What is reported to must be installed, and ready to write."""
        for name, sink in self._sinks.items():
            if importlib.util.find_spec(sink.package) is None:
                raise ValueError(
                    f"run.report_to names {name}, but the package {sink.package} is not installed: "
                    f"pip install 'groupwise[{name}]'."
                )
            with redirect_stdout(sys.stderr):
                sink.check(config)

    def on_run_begin(self, run: RunHandle) -> None:
        """Bring every sink up to the steps done."""
        reported = Reported(
            run.name, _identity(run.folder), run.folder, run.config, run.step, _began_at(run)
        )
        for name, sink in list(self._sinks.items()):
            held = self._guarded(name, lambda sink=sink: sink.begin(reported))
            if held is not None:
                self._held[name] = held
        self._sent = _sent_before(run.folder, self._held)
        if not self._sinks:
            return
        first = min(self._held.values()) + 1
        for line in self._recorded(run, first):
            self._send(run, line)
        self._next = next(iter(self._recorded(run, run.step, run.step)))

    def on_step_begin(self, run: RunHandle) -> None:
        """Nothing more will be known of the steps done."""
        self._send(run, self._next)

    def on_step_end(self, run: RunHandle, metrics: dict[str, float]) -> None:
        """Another line."""
        if self._sinks:
            self._next = self._with_table(run, MetricsRow(run.step, metrics, time.time()))

    def on_evaluate(self, run: RunHandle, evaluation: EvaluationRecord) -> None:
        """It belongs to the line of the steps done."""
        if self._next is not None:
            values = {**self._next.values, **_of_evaluation(evaluation)}
            self._next = replace(self._next, values=values)

    def on_run_end(self, run: RunHandle, end: RunEnd) -> None:
        """A line that may still become longer when the run goes on is sent then."""
        if end.state == "finished":
            self._send(run, self._next)
        for name, sink in list(self._sinks.items()):
            self._guarded(name, lambda sink=sink: sink.end(end.state))

    def _send(self, run: RunHandle, line: MetricsRow | None) -> None:
        behind = [name for name in self._sinks if line and self._held[name] < line.steps]
        if line is None or not behind:
            return
        findings = _findings(run, line.steps)
        for name in behind:
            new = {k: each for k, each in findings.items() if k not in self._sent[name]}
            if new:
                self._sent[name] |= dict.fromkeys(new, line.steps)
                _note_sent(run.folder, self._sent)
            if line.values or new:
                full = replace(line, findings=tuple(new.values()))
                self._guarded(name, lambda name=name, full=full: self._sinks[name].line(full))
                self._held[name] = line.steps

    def _guarded(self, name: str, call: Callable[[], Any]) -> Any:
        try:
            with redirect_stdout(sys.stderr):  # some talk there; it belongs to the command's result
                return call()
        except Exception as error:  # noqa: BLE001 — whatever a sink raises, the run goes on without it
            del self._sinks[name]
            logger.warning(
                "%s failed and is left out from now on: %s: %s. The run's record has everything; a resume sends what is missing",
                name,
                type(error).__name__,
                error,
            )
            return None

    def _recorded(
        self, run: RunHandle, first: int, last: int | None = None
    ) -> Iterator[MetricsRow]:
        """The lines of the record, up to the one before the steps done if `last` is not given."""
        last = run.step - 1 if last is None else last
        with _record(run) as store:
            values = _values(store, max(first, 0))
            finished_at = {record.step + 1: record.finished_at for record in store.steps()}
        began = _began_at(run)
        for steps in range(max(first, 0), last + 1):
            line = MetricsRow(steps, values.get(steps, {}), finished_at.get(steps, began))
            yield self._with_table(run, line)

    def _with_table(self, run: RunHandle, line: MetricsRow) -> MetricsRow:
        """With the rollouts of its step, where they are to be shown."""
        section = run.config["run"]
        shown = section["num_completions_to_print"] if WITH_TABLES & self._sinks.keys() else 0
        if not shown or run.kind != "rl" or line.steps % section["logging_steps"] or not line.steps:
            return line
        with _record(run) as store:
            found = store.rollouts(RolloutFilter(step=line.steps - 1, limit=sys.maxsize))
        if section["log_unique_prompts"]:
            found = list({view.prompt: view for view in reversed(found)}.values())[::-1]
        return replace(line, table=[_row(view) for view in found[:shown]])


def _record(run: RunHandle) -> Store:
    return Store.open(run.folder / RECORD, readonly=True)


def _began_at(run: RunHandle) -> float:
    with _record(run) as store:
        return store.get_meta().get("created_at") or time.time()


def _identity(folder: Path) -> str:
    """What sinks know the run by; it is made once, and moves with the folder."""
    file = folder / IDENTITY
    if not file.exists():
        atomic_files.write_json(file, {"id": secrets.token_hex(4), SENT: {}})
    return json.loads(file.read_bytes())["id"]


def _sent_before(folder: Path, held: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """The findings that sinks hold, which have the lines up to `held`."""
    noted: dict[str, dict[str, int]] = json.loads((folder / IDENTITY).read_bytes()).get(SENT, {})
    return {
        name: {key: line for key, line in noted.get(name, {}).items() if line <= last}
        for name, last in held.items()
    }


def _note_sent(folder: Path, sent: Mapping[str, Mapping[str, int]]) -> None:
    """Before the line is sent: if it is not, what the sink holds ends before it, and the finding counts as not sent."""
    known = json.loads((folder / IDENTITY).read_bytes())
    atomic_files.write_json(folder / IDENTITY, {**known, SENT: {**known.get(SENT, {}), **sent}})


def _findings(run: RunHandle, steps: int) -> dict[str, Finding]:
    """What callbacks recorded of policies up to these steps, by name and steps."""
    with _record(run) as store:
        found = store.evaluations(rows=False)
    return {
        f"{record.name}@{record.step}": Finding(prefix_of(record), record.step, metrics_of(record))
        for record in found
        if not OF_TRAINING.fullmatch(record.name) and record.step <= steps
    }


def _values(store: Store, first: int) -> dict[int, dict[str, float]]:
    """By steps done, from `first` on."""
    found: dict[int, dict[str, float]] = {}
    for name, curve in store.metrics(since=max(first - 1, 0)).items():
        for step, value in curve:
            found.setdefault(step + 1, {})[name] = value
    for record in store.evaluations(rows=False):
        if OF_TRAINING.fullmatch(record.name):
            found.setdefault(record.step, {}).update(_of_evaluation(record))
    return found


def _of_evaluation(record: EvaluationRecord) -> Mapping[str, float]:
    """Its metrics as `eval/…`."""
    return {f"{EVAL}/{name}": value for name, value in metrics_of(record).items()}


def _row(view: RolloutView) -> dict[str, Any]:
    """A rollout in columns that are the same for every one."""
    return {
        "step": view.step,
        "prompt": view.prompt,
        "completion": view.completion,
        "reward": view.reward,
        "advantage": view.advantage,
        "parts": atomic_files.without_nan({part.name: part.value for part in view.parts}),
        "outcome": view.outcome,
        "tokens": view.completion_tokens,
    }
