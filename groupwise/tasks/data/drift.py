"""Compares a number of each step with its own values at the start of the run.

    start     mean m of the first n values, and s: s² is half the mean square of the differences between neighbours among them
    now       a running mean from there on: now ← memory · now + (1 − memory) · value, starting with m
    errors    (now − m) / (s · √(1/n + (1 − memory) / (1 + memory)))

The root combines the variances of the two means, in units of the variance of one value, as if steps were independent. So `errors`
is how many standard errors the number has moved. For a number without a trend, s is also its standard deviation (von Neumann 1941,
doi 10.1214/aoms/1177731677); a trend within the start itself is not counted as noise, which would hide the move. A step is skipped
if its number is missing or not finite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

MANY = 1e9
"""Value of `errors` for a move away from a start that did not vary."""


@dataclass(slots=True)
class Gauge:
    """One number over the steps of a run."""

    start: list[float] = field(default_factory=list[float])
    """The first values."""
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
        """The running mean; only valid if `ready`."""
        assert self.running is not None, "the start is over"
        return self.running

    def observe(self, value: float, start_steps: int, memory: float) -> None:
        """Add the value of the next step."""
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
        moved, error = self.now - self.mean, self._standard_error(memory)
        if not moved:
            return 0.0
        deviation = moved / error if error else math.inf
        return math.copysign(min(abs(deviation), MANY), moved) if deviation == deviation else 0.0

    def _standard_error(self, memory: float) -> float:
        count = len(self.start)
        squares = sum(
            (next_value - value) * (next_value - value)
            for value, next_value in pairwise(self.start)
        )
        variance = squares / (2 * (count - 1)) if count > 1 else 0.0
        return math.sqrt(variance * (1 / count + (1 - memory) / (1 + memory)))
