"""What a sink is: something that shows metrics besides the run's own record, such as TensorBoard or Weights & Biases.

`groupwise.callbacks.reporting` drives them. It hands each sink whole rows, in their order, and each row once: a row is all that is known
after so many steps, and comes when the next step begins. A sink says with `begin` up to where it holds the run already,
so that a run which goes on sends what is missing and nothing twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from groupwise.settings.view import View

NOTHING = -1
"""The last row of a sink that holds none."""
TABLE = "completions"
"""What a sink calls the table of rollouts."""


@dataclass(frozen=True, slots=True)
class Reported:
    """The run that is reported on."""

    name: str
    id: str
    """8 hexadecimal digits, the same whenever the run is taken up; other runs of the name have others."""
    folder: Path
    config: View


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

    def end(self, *, finished: bool) -> None:
        """Write what is buffered, and let go. A run that has not finished may go on later."""
        ...
