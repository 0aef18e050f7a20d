"""A run whose groups come from clients: the inputs of `take_step`, and the gate between sampling and new weights.

Clients may ask for completions at any time, also while a step is learned. The sampler receives new weights only when no completion is in
progress, so each completion has one policy: `settle` closes the gate and waits for the requests inside, and new requests wait outside until
the step is over.

No client request may stop the run: steps without a scored rollout, and updates that are skipped because they are not finite, are counted
and reported, and the run continues.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from groupwise.core.terminal.progress import Progress
from groupwise.runs.records import WarningRecord
from groupwise.training.loops.run import Run


class Gate:
    """Admits requests while it is open; `close` waits until none is inside."""

    def __init__(self) -> None:
        self.inside = 0
        self._busy = 0.0
        self._since = 0.0
        """When the gate was last entered while empty."""
        self._open = asyncio.Event()
        self._open.set()
        self._empty = asyncio.Event()
        self._empty.set()

    async def enter(self) -> None:
        """Wait until the gate is open, then enter."""
        await self._open.wait()
        if not self.inside:
            self._since = time.perf_counter()
        self.inside += 1
        self._empty.clear()

    def leave(self) -> None:
        """Leave the gate; the last request to leave lets `close` return."""
        self.inside -= 1
        if not self.inside:
            self._busy += time.perf_counter() - self._since
            self._empty.set()

    def busy(self) -> float:
        """Seconds during which at least one request was inside, since the last call."""
        now = time.perf_counter()
        busy, self._busy = self._busy, 0.0
        if self.inside:
            busy, self._since = busy + now - self._since, now
        return busy

    async def close(self) -> None:
        """Keep new requests out, and return once none is inside."""
        self._open.clear()
        await self._empty.wait()

    def open(self) -> None:
        """Admit requests again."""
        self._open.set()


class Phase(Progress):
    """A step's current phase, for status requests to the engine; nothing is displayed or written."""

    def __init__(self, run: str, max_steps: int) -> None:
        self._nowhere = open(os.devnull, "w")  # noqa: SIM115 — closed by `close`
        super().__init__(run, max_steps, stream=self._nowhere)
        self.name = "loading"

    def phase(self, name: str, done: int | None = None, total: int | None = None) -> None:
        """See `Progress.phase`."""
        self.name = name

    def close(self) -> None:
        """See `Progress.close`."""
        super().close()
        self._nowhere.close()


@dataclass(slots=True, kw_only=True)
class ServedRun(Run):
    """A run of the training server."""

    gate: Gate = field(default_factory=Gate)
    warned: list[str] = field(default_factory=list[str])
    """Warnings from the signals of the current step."""

    @property
    def kept_policies(self) -> int:
        """See `Run.kept_policies`: enough for the oldest policy that a trained group may come from."""
        return self.config.training.max_off_policy_steps

    @property
    def unscored_limit(self) -> None:
        """See `Run.unscored_limit`."""

    @property
    def non_finite_limit(self) -> None:
        """See `Training.non_finite_limit`."""

    async def settle(self) -> None:
        """See `Run.settle`."""
        await self.gate.close()

    def warn(self, warning: WarningRecord) -> None:
        """See `Run.warn`."""
        super(ServedRun, self).warn(warning)
        self.warned.append(f"signal {warning.name} {warning.kind}: {warning.message}")

    @contextmanager
    def taking_a_step(self) -> Generator[None]:
        """Context of one step; the gate is open afterwards, even after an error."""
        self.warned.clear()
        try:
            yield
        finally:
            self.gate.open()
