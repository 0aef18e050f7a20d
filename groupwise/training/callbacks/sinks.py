"""The protocol of a sink, which shows metrics besides the run's own record, such as TensorBoard or Weights & Biases.

`groupwise.training.callbacks.reporting` drives them. It hands each sink whole rows, in their order, and each row once: a row is all that is
known after so many steps, and comes when the next step begins. A sink says with `begin` up to where it holds the run already,
so that a run which goes on sends what is missing and nothing twice. Evaluations that something beside the training made of earlier
policies, such as a benchmark of a checkpoint, come with the row that is sent next. `parquet` is none of them: it is a file of the whole
record, which `groupwise.training.callbacks.reporting.ParquetRecord` writes when the run ends.
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
"""The last row of a sink that holds none."""
TABLE = "completions"
"""The name of the table of rollouts in a sink."""
SEVERAL = "several"
"""Suffix of the name of a table of findings."""

State = Literal["finished", "interrupted", "failed"]
"""How a run ended."""


@dataclass(frozen=True, slots=True)
class Reported:
    """The run that is reported on."""

    name: str
    id: str
    """8 hexadecimal digits, the same whenever the run is taken up; other runs of the name have others."""
    folder: Path
    config: View
    steps: int
    """Steps done; what a sink holds beyond them is drawn again."""
    began_at: float
    """When it was made, in seconds since 1970."""


@dataclass(frozen=True, slots=True)
class Finding:
    """An evaluation that was not made by the training."""

    name: str
    """The name of its origin, such as `eval/benchmark`."""
    steps: int
    """Steps of the evaluated policy: those of its line, or fewer."""
    metrics: Mapping[str, float]

    @property
    def values(self) -> dict[str, float]:
        """The metrics under names of their own."""
        return {f"{self.name}/{metric}": value for metric, value in self.metrics.items()}


@dataclass(frozen=True, slots=True)
class MetricsRow:
    """Everything that is known after `steps` steps."""

    steps: int
    """0: before training. The metrics of the step with index k stand in the line k + 1."""
    values: Mapping[str, float]
    finished_at: float
    """When the step was committed, in seconds since 1970."""
    table: Sequence[Mapping[str, Any]] = ()
    """Rollouts of the step, one mapping each with the same keys; empty if none are to be shown."""
    findings: Sequence[Finding] = ()
    """Findings since the line before, by steps; each comes with one line only."""

    def row(self) -> dict[str, float]:
        """All values, for sinks that cannot go back in steps: of several findings with one name only the last, with its steps."""
        newest = {each.name: each for each in self.findings}
        found = [
            {**each.values, f"{each.name}/step": float(each.steps)} for each in newest.values()
        ]
        return {name: value for part in (self.values, *found) for name, value in part.items()}

    def tables(self) -> dict[str, tuple[list[str], list[list[Any]]]]:
        """Columns and rows by name: the rollouts, and the findings of a name that has several, of which `row` has one only."""
        found = {TABLE: self.cells()} if self.table else {}
        for name, group in groupby(sorted(self.findings, key=_name), _name):
            several = list(group)
            if several[1:]:
                metrics = list(dict.fromkeys(metric for each in several for metric in each.metrics))
                rows = [[each.steps, *map(each.metrics.get, metrics)] for each in several]
                found[f"{name}/{SEVERAL}"] = (["step", *metrics], rows)
        return found

    def cells(self) -> tuple[list[str], list[list[Any]]]:
        """The table's column names and rows, for sinks without nested values."""
        rows = [
            [
                json.dumps(cell, ensure_ascii=False) if isinstance(cell, Mapping) else cell
                for cell in row.values()
            ]
            for row in self.table
        ]
        return list(self.table[0]) if self.table else [], rows


class Sink(Protocol):
    """One way to show metrics. If a method raises, the run loses this sink and nothing else."""

    package: str
    """The package that must be installed, and the extra of this package that installs it."""

    def check(self, config: View) -> None:
        """Called before anything is loaded; raises ValueError if the sink could not write."""
        ...

    def begin(self, run: Reported) -> int:
        """The run begins or goes on; returns the last line that the sink holds of it, or `NOTHING`."""
        ...

    def line(self, line: MetricsRow) -> None:
        """Show one line."""
        ...

    def end(self, state: State) -> None:
        """Flush and close. A run that has not finished may be resumed later."""
        ...


def _name(finding: Finding) -> str:
    return finding.name
