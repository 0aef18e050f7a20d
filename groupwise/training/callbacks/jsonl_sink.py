"""The sink `jsonl`: `metrics.jsonl` in the run's folder, `completions.jsonl` with the rollouts to show, and `evaluations.jsonl` with the
evaluations that other processes made of checkpoints.

All are only added to, so that a program may follow them, and each line is on the disk before the next step begins. A process that was
killed may leave half a line, or rollouts and findings whose line of metrics was not written yet; and a run that goes on from a
checkpoint draws steps again. When it is taken up, what stands behind the last whole line of the steps done is therefore cut off.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from groupwise.core import atomic_files
from groupwise.core.settings.view import View
from groupwise.training.callbacks.sinks import NOTHING, TABLE, MetricsRow, Reported, State

METRICS = "metrics.jsonl"
COMPLETIONS = f"{TABLE}.jsonl"
EVALUATIONS = "evaluations.jsonl"
KNOWN_AFTER = "known_after"
"""Steps done of the line with which a finding came; its `step` says which policy it is about."""
OURS = ("step", "wall_time")
"""Keys of each line; a task's metric of such a name is kept as `task/<name>`."""


class JsonlSink:
    """Steps done, time and metrics as one flat object for each line."""

    package = "json"

    def __init__(self) -> None:
        self._folder = Path()

    def check(self, config: View) -> None:
        """Nothing can be missing."""

    def begin(self, run: Reported) -> int:
        """Keep the whole lines of the steps done."""
        self._folder = run.folder
        steps_written = _truncate(run.folder / METRICS, run.steps)
        _truncate(run.folder / COMPLETIONS, steps_written)
        _truncate(run.folder / EVALUATIONS, steps_written, KNOWN_AFTER)
        return steps_written

    def line(self, line: MetricsRow) -> None:
        """Write rollouts and findings first: they count only once the line of metrics follows."""
        if line.findings:
            found = [
                {"step": each.steps, KNOWN_AFTER: line.steps, **each.values}
                for each in line.findings
            ]
            atomic_files.append(self._folder / EVALUATIONS, _encode_rows(found))
        if line.table:
            rows = [{**row, "step": line.steps} for row in line.table]
            atomic_files.append(self._folder / COMPLETIONS, _encode_rows(rows))
        known = {f"task/{k}" if k in OURS else k: v for k, v in line.values.items()}
        row = {"step": line.steps, "wall_time": line.finished_at, **known}
        atomic_files.append(self._folder / METRICS, _encode_rows([row]))

    def end(self, state: State) -> None:
        """All is written."""


def _encode_rows(rows: Sequence[Mapping[str, Any]]) -> bytes:
    plain = [atomic_files.without_nan(row) for row in rows]
    lines = [json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in plain]
    return "".join(lines).encode("utf-8", "backslashreplace")


def _truncate(file: Path, last: int, key: str = "step") -> int:
    """Cut off torn lines and those after `last` steps; `key` holds the steps of a line. Returns the steps of the last line that is left."""
    steps_written, size = NOTHING, 0
    if not file.exists():
        return steps_written
    with file.open("rb") as lines:
        for line in lines:
            steps = _steps(line, key)
            if steps is None or not steps_written <= steps <= last:
                break
            steps_written, size = steps, size + len(line)
    if size < file.stat().st_size:
        atomic_files.cut(file, size)
    return steps_written


def _steps(line: bytes, key: str) -> int | None:
    """The steps done of a line; None if the line is not whole."""
    try:
        row = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    steps = cast("dict[str, Any]", row).get(key) if isinstance(row, dict) else None
    return steps if isinstance(steps, int) else None
