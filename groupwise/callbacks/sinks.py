"""What a sink is: something that shows metrics besides the run's own record, such as TensorBoard or Weights & Biases.

`groupwise.callbacks.reporting` drives them. It hands each sink whole rows, in their order, and each row once: a row is all that is known
after so many steps, and comes when the next step begins. A sink says with `begin` up to where it holds the run already,
so that a run which goes on sends what is missing and nothing twice. `parquet` is none of them: it is a file of the whole record,
which `groupwise.callbacks.parquet_record` writes when the run ends.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from groupwise.settings.view import View

NOTHING = -1
"""The last row of a sink that holds none."""
TABLE = "completions"
"""What a sink calls the table of rollouts."""

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
class Line:
    """All that is known after so many steps."""

    steps: int
    """0: before training. The metrics of the step with index k stand in the line k + 1."""
    values: Mapping[str, float]
    finished_at: float
    """When the step was committed, in seconds since 1970."""
    table: Sequence[Mapping[str, Any]] = ()
    """Rollouts of the step, one mapping each with the same keys; empty where none are to be shown."""

    def cells(self) -> tuple[list[str], list[list[Any]]]:
        """The names of the table's columns and its rows, for those who know no nested values."""
        rows = [[_cell(value) for value in row.values()] for row in self.table]
        return list(self.table[0]) if self.table else [], rows


class Sink(Protocol):
    """One way to show them. What its methods raise costs the run this sink and nothing else."""

    package: str
    """What must be installed, and the extra of this package that brings it."""

    def check(self, config: View) -> None:
        """Before anything is loaded: ValueError where it could not write."""
        ...

    def begin(self, run: Reported) -> int:
        """The run begins or goes on; returns the last line that the sink holds of it, or `NOTHING`."""
        ...

    def line(self, line: Line) -> None:
        """Show one line."""
        ...

    def end(self, state: State) -> None:
        """Write what is buffered, and let go. A run that has not finished may go on later."""
        ...


def _cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, Mapping) else value
