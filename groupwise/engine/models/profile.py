"""Records torch's operations during a piece of work: every operator with its time, as a trace file and as a table.

The trace covers this process and its GPU. A learner's calls can be marked in it, which shows the operators that belong to each call.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from groupwise.core.types import (
    Learner,
    LossSpec,
    OptimiserParams,
    Policy,
    PolicyRole,
    Prediction,
    Row,
    UpdateResult,
)

OPERATORS = 40
"""Number of lines in the table."""
NAME_WIDTH = 60
QUIET = "6"
"""Log level that silences torch's tracer on standard error; the tracer reads it when it first traces."""


class Trace:
    """A recording of torch's work; complete once the `tracing` context has ended."""

    def __init__(self, profiler: profile) -> None:
        self._profiler = profiler

    def write(self, file: Path) -> None:
        """Write it in Chrome's trace format, for Perfetto and chrome://tracing. Raises OSError if the file cannot be written."""
        with file.open("w"):  # the profiler's own error would not give the reason
            pass
        self._profiler.export_chrome_trace(str(file))

    def table(self) -> str:
        """The operators with the longest own time, excluding operators that they call."""
        order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        return self._profiler.key_averages().table(
            sort_by=order, row_limit=OPERATORS, max_name_column_width=NAME_WIDTH
        )


@contextmanager
def tracing() -> Generator[Trace]:
    """Trace this thread's operations, and those it starts on a GPU. Results do not change; the work is slower."""
    os.environ.setdefault("KINETO_LOG_LEVEL", QUIET)
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, acc_events=True) as profiler:
        yield Trace(profiler)


class MarkedLearner:
    """A learner whose calls are marked in the trace by their names."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner

    async def forward_backward(
        self, rows: Sequence[Row], loss: LossSpec, denominators: Mapping[str, float]
    ) -> dict[str, float]:
        """See `groupwise.core.types.Learner.forward_backward`."""
        with record_function("learner.forward_backward"):
            return await self._learner.forward_backward(rows, loss, denominators)

    async def trained_logprobs(self) -> list[tuple[float, ...]] | None:
        """See `groupwise.core.types.Learner.trained_logprobs`."""
        return await self._learner.trained_logprobs()

    async def update(self, params: OptimiserParams) -> UpdateResult:
        """See `groupwise.core.types.Learner.update`."""
        with record_function("learner.update"):
            return await self._learner.update(params)

    def discard(self) -> None:
        """See `groupwise.core.types.Learner.discard`."""
        self._learner.discard()

    async def publish(self, version: int) -> Policy:
        """See `groupwise.core.types.Learner.publish`."""
        with record_function("learner.publish"):
            return await self._learner.publish(version)

    async def logprobs(
        self, rows: Sequence[Row], role: PolicyRole = "policy"
    ) -> list[tuple[float, ...]]:
        """See `groupwise.core.types.Learner.logprobs`."""
        with record_function(f"learner.logprobs of the {role}"):
            return await self._learner.logprobs(rows, role)

    async def predictions(self, rows: Sequence[Row]) -> list[Prediction]:
        """See `groupwise.core.types.Learner.predictions`."""
        with record_function("learner.predictions"):
            return await self._learner.predictions(rows)

    async def save(self, folder: str) -> None:
        """See `groupwise.core.types.Learner.save`."""
        with record_function("learner.save"):
            await self._learner.save(folder)

    def load(self, folder: str) -> None:
        """See `groupwise.core.types.Learner.load`."""
        self._learner.load(folder)
