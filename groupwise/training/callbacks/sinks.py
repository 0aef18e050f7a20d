"""The protocol of a sink: a place to show metrics in addition to the run's own record, such as TensorBoard or Weights & Biases.

`groupwise.training.callbacks.reporting` drives the sinks. It sends each sink complete rows, in order and once each. A row contains
everything that is known after a number of steps, and is sent when the next step starts. `begin` returns the last row that the sink
already has, so a resumed run sends the missing rows and none twice. Evaluations of earlier policies that were made outside the training
loop, such as a benchmark of a checkpoint, are sent with the next row. `parquet` is not a sink: it is a file of the whole record, which
`groupwise.training.callbacks.reporting.ParquetRecord` writes when the run ends.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, Protocol

from groupwise.core.settings.view import View

NOTHING = -1
"""The last row of a sink that has no rows yet."""
TABLE = "completions"
"""Name of the table of rollouts in a sink."""
SEVERAL = "several"
"""Suffix of the name of a table of several findings with one name."""

State = Literal["finished", "interrupted", "failed"]
"""How a run ended."""


@dataclass(frozen=True, slots=True)
class ReportedRun:
    """The run whose metrics are shown."""

    name: str
    id: str
    """8 hexadecimal digits. Resumes of this run have the same id; other runs of the same name have another one."""
    folder: Path
    config: View
    steps: int
    """Number of steps done. Rows that a sink has beyond this were lost by the run; they are sent again."""
    began_at: float
    """When the run was created, in seconds since 1970."""


@dataclass(frozen=True, slots=True)
class Finding:
    """An evaluation that was made outside the training loop, such as a benchmark."""

    name: str
    """Name of the evaluation, such as `eval/benchmark`."""
    steps: int
    """Number of training steps of the evaluated policy: that of the row it is sent with, or less."""
    metrics: Mapping[str, float]

    @property
    def values(self) -> dict[str, float]:
        """The metrics with names prefixed by the evaluation's."""
        return {f"{self.name}/{metric}": value for metric, value in self.metrics.items()}


@dataclass(frozen=True, slots=True)
class MetricsRow:
    """All metrics that are known after `steps` steps."""

    steps: int
    """Number of steps; 0: before training. The metrics of the step with index k are in the row k + 1."""
    values: Mapping[str, float]
    finished_at: float
    """When the step was committed, in seconds since 1970."""
    table: Sequence[Mapping[str, Any]] = ()
    """Rollouts of the step, as mappings with equal keys; empty if none are to be shown."""
    findings: Sequence[Finding] = ()
    """Findings since the row before, ordered by steps. Each is sent with one row only."""

    def flat_values(self) -> dict[str, float]:
        """All values in one mapping, for sinks that cannot add to earlier steps.

        Of several findings with one name, it contains only the last, and the steps of that one.
        """
        latest = {finding.name: finding for finding in self.findings}
        finding_columns = [
            {**finding.values, f"{finding.name}/step": float(finding.steps)}
            for finding in latest.values()
        ]
        return {
            name: value for part in (self.values, *finding_columns) for name, value in part.items()
        }

    def tables(self) -> dict[str, tuple[list[str], list[list[Any]]]]:
        """Tables by name: columns and rows.

        These are the rollouts, and all findings of each name that has several (`flat_values` contains only one of them).
        """
        tables = {TABLE: self.cells()} if self.table else {}
        for name, group in groupby(sorted(self.findings, key=_finding_name), _finding_name):
            findings = list(group)
            if findings[1:]:
                metrics = list(
                    dict.fromkeys(metric for finding in findings for metric in finding.metrics)
                )
                rows = [[finding.steps, *map(finding.metrics.get, metrics)] for finding in findings]
                tables[f"{name}/{SEVERAL}"] = (["step", *metrics], rows)
        return tables

    def cells(self) -> tuple[list[str], list[list[Any]]]:
        """The rollouts' column names and rows, with nested values as JSON, for sinks that take only plain values."""
        rows = [
            [
                json.dumps(cell, ensure_ascii=False) if isinstance(cell, Mapping) else cell
                for cell in row.values()
            ]
            for row in self.table
        ]
        return list(self.table[0]) if self.table else [], rows


class Sink(Protocol):
    """One destination of metrics. If a method raises, the run drops this sink and continues."""

    package: str
    """The package that must be installed; also the name of the extra of groupwise that installs it."""

    def check(self, config: View) -> None:
        """Called before anything is loaded; raises ValueError if the sink cannot write."""
        ...

    def begin(self, run: ReportedRun) -> int:
        """Start a new or resumed run. Returns the last row that the sink has of it, or `NOTHING`."""
        ...

    def write_row(self, row: MetricsRow) -> None:
        """Show one row."""
        ...

    def end(self, state: State) -> None:
        """Flush and close. If the run has not finished, it may be resumed later."""
        ...


def _finding_name(finding: Finding) -> str:
    return finding.name
