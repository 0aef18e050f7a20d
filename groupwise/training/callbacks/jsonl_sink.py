"""The sink `jsonl`: JSON Lines files in the run's folder.

    metrics.jsonl      the metrics, one row for each step
    completions.jsonl  the rollouts to show
    evaluations.jsonl  evaluations of checkpoints that other processes made

The files are append-only, so other programs can follow them. Each row is on disk before the next step starts. A process that was killed
may leave half a line, or rollouts and findings without their row of metrics; and a run that resumes from a checkpoint draws steps
again. So everything after the last complete row of the steps done is cut off on resume.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from groupwise.core import atomic_files
from groupwise.core.settings.view import View
from groupwise.training.callbacks.sinks import NOTHING, TABLE, MetricsRow, ReportedRun, State

METRICS = "metrics.jsonl"
COMPLETIONS = f"{TABLE}.jsonl"
EVALUATIONS = "evaluations.jsonl"
KNOWN_AFTER = "known_after"
"""Key with the number of steps of the row that a finding was sent with; the finding's own `step` is that of its policy."""
RESERVED_COLUMNS = ("step", "wall_time")
"""Keys of every row; a task's metric of the same name is stored as `task/<name>`."""


class JsonlSink:
    """Writes the number of steps, the time and the metrics as one flat JSON object per row."""

    package = "json"

    def __init__(self) -> None:
        self._folder = Path()

    def check(self, config: View) -> None:
        """Do nothing: no package or server is needed."""

    def begin(self, run: ReportedRun) -> int:
        """Keep the complete rows of the steps done and cut off everything after them."""
        self._folder = run.folder
        steps_written = _truncate(run.folder / METRICS, run.steps)
        _truncate(run.folder / COMPLETIONS, steps_written)
        _truncate(run.folder / EVALUATIONS, steps_written, KNOWN_AFTER)
        return steps_written

    def write_row(self, row: MetricsRow) -> None:
        """Write rollouts and findings first: they count only once the row of metrics follows."""
        if row.findings:
            finding_rows = [
                {"step": finding.steps, KNOWN_AFTER: row.steps, **finding.values}
                for finding in row.findings
            ]
            atomic_files.append(self._folder / EVALUATIONS, _encode_rows(finding_rows))
        if row.table:
            rows = [{**rollout_row, "step": row.steps} for rollout_row in row.table]
            atomic_files.append(self._folder / COMPLETIONS, _encode_rows(rows))
        values = {f"task/{k}" if k in RESERVED_COLUMNS else k: v for k, v in row.values.items()}
        metrics = {"step": row.steps, "wall_time": row.finished_at, **values}
        atomic_files.append(self._folder / METRICS, _encode_rows([metrics]))

    def end(self, state: State) -> None:
        """Do nothing: every row is on disk already."""


def _encode_rows(rows: Sequence[Mapping[str, Any]]) -> bytes:
    json_rows = [atomic_files.without_nan(row) for row in rows]
    lines = [json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in json_rows]
    return "".join(lines).encode("utf-8", "backslashreplace")


def _truncate(file: Path, last_step: int, key: str = "step") -> int:
    """Cut off incomplete lines and lines after `last_step` steps; `key` holds a line's steps. Returns the steps of the last line kept."""
    steps_written, size = NOTHING, 0
    if not file.exists():
        return steps_written
    with file.open("rb") as lines:
        for line in lines:
            steps = _row_steps(line, key)
            if steps is None or not steps_written <= steps <= last_step:
                break
            steps_written, size = steps, size + len(line)
    if size < file.stat().st_size:
        atomic_files.cut(file, size)
    return steps_written


def _row_steps(line: bytes, key: str) -> int | None:
    """The number of steps of a line; None if the line is not complete."""
    try:
        row = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    steps = cast("dict[str, Any]", row).get(key) if isinstance(row, dict) else None
    return steps if isinstance(steps, int) else None
