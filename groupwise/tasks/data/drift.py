"""A number of each step against its own start.

    start     mean m of the first n values, and s: s² is half the mean square of the differences between neighbours among them
    now       a running mean from there on: now ← memory · now + (1 − memory) · value, beginning with m
    errors    (now − m) / (s · √(1/n + (1 − memory) / (1 + memory)))

The root has the variances of the two means, in units of that of one value, as if steps did not depend on each other: so `errors`
says how many standard errors the number has moved. Where nothing moves, s is the standard deviation, too (von Neumann 1941,
doi 10.1214/aoms/1177731677); but what the number moves already within the start is not taken for noise, which would hide the move. A
step without the number, or where it is not finite, is passed over.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

MANY = 1e9
"""Standard errors of a move away from a start that did not vary."""


@dataclass(slots=True)
class Gauge:
    """One number over the steps of a run."""

    start: list[float] = field(default_factory=list[float])
    """Its first values."""
    running: float | None = None
    """None until the start is over."""

    @property
    def ready(self) -> bool:
        """True once there is a start to compare with."""
        return self.running is not None

    @property
    def mean(self) -> float:
        """Mean of the start."""
        return sum(value / len(self.start) for value in self.start)

    @property
    def now(self) -> float:
        """The running mean; only where it is ready."""
        assert self.running is not None, "the start is over"
        return self.running

    def observe(self, value: float, start_steps: int, memory: float) -> None:
        """The value of the next step."""
        if not math.isfinite(value):
            return
        if self.running is not None:
            self.running = memory * self.running + (1 - memory) * value
            return
        self.start.append(value)
        if len(self.start) >= start_steps:
            self.running = self.mean

    def errors(self, memory: float) -> float:
        """Its movement in standard errors, negative if it fell; `MANY` at most."""
        moved, error = self.now - self.mean, self._error(memory)
        if not moved:
            return 0.0
        found = moved / error if error else math.inf
        return math.copysign(min(abs(found), MANY), moved) if found == found else 0.0

    def _error(self, memory: float) -> float:
        count = len(self.start)
        squares = sum((after - value) * (after - value) for value, after in pairwise(self.start))
        variance = squares / (2 * (count - 1)) if count > 1 else 0.0
        return math.sqrt(variance * (1 / count + (1 - memory) / (1 + memory)))
