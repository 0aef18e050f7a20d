"""A rubric with the task's metrics, and its scoring in one thread of this process.

The thread is for functions that another process cannot import (closures of a notebook) and for those that keep state
between calls. A thread cannot be killed: a call that exceeds its limit there ends the run. Nor is it waited for when the
run ends: it is a daemon and goes with the process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from groupwise.errors import GroupwiseError, RewardWorkerError
from groupwise.plugins import explain
from groupwise.rewards.plain import plain
from groupwise.rewards.rubric import Rubric
from groupwise.rewards.scoring import GroupScore, ScoreRequest, unscored
from groupwise.rewards.text import CompletionText
from groupwise.rewards.threads import DaemonThreads
from groupwise.types import Prompt

ComputeMetrics = Callable[
    [Sequence[Prompt], Sequence[CompletionText], Sequence[dict[str, Any]]], dict[str, Any]
]


_END_LIMIT = 1.0
"""Seconds that an idle thread may take to end."""


@dataclass(frozen=True, slots=True)
class RubricScorer:
    """What a factory for `RewardWorkers` returns: a rubric and the task's metrics, both ready to be called."""

    rubric: Rubric | None
    """None: the task has no rewards, and nobody may ask for scores."""
    compute_metrics: ComputeMetrics

    async def score(self, request: ScoreRequest, started: Callable[[str], None]) -> GroupScore:
        """See `Rubric.score`."""
        assert self.rubric is not None, "a task without rewards was asked for scores"
        return await self.rubric.score(request, started)


class InProcessScorer:
    """Scores groups one after the other in a thread of this process; a `Scorer`."""

    def __init__(
        self, rubric: Rubric | None, compute_metrics: ComputeMetrics, *, time_limit: float = 30.0
    ) -> None:
        """`time_limit` in seconds for a reward function's call; None for `rubric`: see `RubricScorer`."""
        self._scorer = RubricScorer(rubric, compute_metrics)
        self._time_limit = time_limit
        self._runner = _Runner()
        self._thread: DaemonThreads[_Work] = DaemonThreads([self._runner], "rewards")
        self._given_up: RewardWorkerError | None = None

    async def start(self) -> None:
        """The thread is ready as soon as it is made."""

    async def score(self, request: ScoreRequest) -> GroupScore:
        """Score one group. Raises RewardWorkerError when it takes too long, then and ever after."""

        async def work(job: _Work) -> GroupScore:
            try:
                return await self._scorer.score(request, job.note)
            except Exception as error:  # noqa: BLE001 — whatever user code did, only its group fails
                reason = f"scoring raised {explain(error).strip()}"
                return unscored(len(request.completions), "failed", reason)

        return await self._within_limit(_Work(work))

    async def compute_metrics(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[CompletionText],
        rows: Sequence[dict[str, Any]],
    ) -> dict[str, Any]:
        """The task's metrics, as JSON values; without a time limit, because nothing could be done about it."""

        async def work(job: _Work) -> dict[str, Any]:
            return plain(self._scorer.compute_metrics(prompts, completions, rows))

        try:
            return await asyncio.wrap_future(self._thread.submit(_Work(work)))
        except GroupwiseError as error:
            raise RewardWorkerError(str(error)) from error
        except Exception as error:  # user code may raise anything
            raise RewardWorkerError(f"compute_metrics raised {explain(error).strip()}") from error

    async def close(self) -> None:
        """Give up the calls that wait, and the one that is under way: nobody waits for its end."""
        self._thread.close()
        if not self._runner.busy:
            await asyncio.to_thread(self._thread.join, _END_LIMIT)

    async def _within_limit(self, job: _Work) -> GroupScore:
        if self._given_up is not None:
            raise self._given_up
        done = asyncio.wrap_future(self._thread.submit(job))
        begun = asyncio.wrap_future(job.begun)
        await asyncio.wait({done, begun}, return_when=asyncio.FIRST_COMPLETED)
        while not done.done() and (left := job.since + self._time_limit - time.monotonic()) > 0:
            await asyncio.wait({done}, timeout=left)
        if done.done() and not done.cancelled():
            return done.result()
        if self._given_up is None:
            self._given_up = RewardWorkerError(self._too_slow(job))
            self._thread.close()
        raise self._given_up

    def _too_slow(self, job: _Work) -> str:
        return (
            f"The reward function `{job.running}` took longer than {self._time_limit:g} s. It runs inside this "
            "process, where it cannot be killed and replaced, because it keeps state or cannot be imported by another "
            "process. Make it faster, raise the limit, or move it into a task file."
        )


@dataclass(slots=True)
class _Work:
    """A call for the thread, and what the thread notes about it."""

    call: Callable[[_Work], Awaitable[Any]]
    begun: Future[None] = field(default_factory=Future[None])
    running: str = "?"
    since: float = 0.0
    """When the function that is `running` was begun, on the monotonic clock."""

    def note(self, name: str) -> None:
        """Hear that a function begins; each has the whole time limit."""
        self.running, self.since = name, time.monotonic()


class _Runner:
    """Runs coroutines in the thread's own event loop, so that a blocking one blocks nothing else."""

    def __init__(self) -> None:
        self.busy = False

    def begin(self) -> None:
        self._loop = asyncio.Runner()

    def do(self, job: _Work) -> Any:
        self.busy, job.since = True, time.monotonic()
        job.begun.set_result(None)

        async def run() -> Any:
            return await job.call(job)

        try:
            return self._loop.run(run())
        finally:
            self.busy = False

    def end(self) -> None:
        self._loop.close()
