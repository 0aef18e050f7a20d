"""A rubric with the task's metrics, and its scoring in one thread of this process.

The thread is for functions that another process cannot import (closures of a notebook) and for those that keep state
between calls. A thread cannot be killed: a call that exceeds its limit there ends the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from groupwise.errors import GroupwiseError, RewardWorkerError
from groupwise.plugins import explain
from groupwise.rewards.plain import plain
from groupwise.rewards.rubric import Rubric
from groupwise.rewards.scoring import GroupScore, ScoreRequest
from groupwise.rewards.text import CompletionText
from groupwise.rewards.threads import DaemonThreads
from groupwise.types import Prompt

ComputeMetrics = Callable[
    [Sequence[Prompt], Sequence[CompletionText], Sequence[dict[str, Any]]], dict[str, Any]
]


@dataclass(frozen=True, slots=True)
class RubricScorer:
    """What a factory for `RewardWorkers` returns: a rubric and the task's metrics, both ready to be called."""

    rubric: Rubric
    compute_metrics: ComputeMetrics

    async def score(self, request: ScoreRequest, started: Callable[[str], None]) -> GroupScore:
        """See `Rubric.score`."""
        return await self.rubric.score(request, started)


class InProcessScorer:
    """Scores groups one after the other in a thread of this process; a `Scorer`."""

    def __init__(
        self, rubric: Rubric, compute_metrics: ComputeMetrics, *, time_limit: float = 30.0
    ) -> None:
        """`time_limit` in seconds for one group, counted from when its turn comes."""
        self._scorer = RubricScorer(rubric, compute_metrics)
        self._time_limit = time_limit
        self._runner = _Runner()
        self._thread: DaemonThreads[_Work] = DaemonThreads([self._runner], "rewards")
        self._given_up: RewardWorkerError | None = None
        self._running = "?"

    async def start(self) -> None:
        """The thread is ready as soon as it is made."""

    async def score(self, request: ScoreRequest) -> GroupScore:
        """Score one group. Raises RewardWorkerError when it takes too long, then and ever after."""

        async def work() -> GroupScore:
            return await self._scorer.score(request, self._note)

        return await self._within_limit(work)

    async def compute_metrics(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[CompletionText],
        rows: Sequence[dict[str, Any]],
    ) -> dict[str, Any]:
        """The task's metrics, as JSON values; without a time limit, because nothing could be done about it."""

        async def work() -> dict[str, Any]:
            return plain(self._scorer.compute_metrics(prompts, completions, rows))

        try:
            return await asyncio.wrap_future(self._thread.submit(_Work(work, Future())))
        except GroupwiseError as error:
            raise RewardWorkerError(str(error)) from error
        except Exception as error:  # user code may raise anything
            raise RewardWorkerError(f"compute_metrics raised {explain(error).strip()}") from error

    async def close(self) -> None:
        """Let the thread end after the call it is at, and give up those that wait."""
        self._thread.close()
        if self._given_up is None:
            await asyncio.to_thread(self._thread.join, self._time_limit)

    def _note(self, name: str) -> None:
        self._running = name

    async def _within_limit(self, work: Callable[[], Awaitable[GroupScore]]) -> GroupScore:
        if self._given_up is not None:
            raise self._given_up
        job = _Work(work, Future())
        done = asyncio.wrap_future(self._thread.submit(job))
        begun = asyncio.wrap_future(job.begun)
        await asyncio.wait({done, begun}, return_when=asyncio.FIRST_COMPLETED)
        finished, _ = await asyncio.wait({done}, timeout=self._time_limit)
        if finished and not done.cancelled():
            return done.result()
        if self._given_up is None:
            self._given_up = RewardWorkerError(self._too_slow())
            self._thread.close()
        raise self._given_up

    def _too_slow(self) -> str:
        return (
            f"The reward function `{self._running}` took longer than {self._time_limit:g} s. It runs inside this "
            "process, where it cannot be killed and replaced, because it keeps state or cannot be imported by another "
            "process. Make it faster, raise the limit, or move it into a task file."
        )


@dataclass(frozen=True, slots=True)
class _Work:
    call: Callable[[], Awaitable[Any]]
    begun: Future[None]


class _Runner:
    """Runs coroutines in the thread's own event loop, so that a blocking one blocks nothing else."""

    def begin(self) -> None:
        self._loop = asyncio.Runner()

    def do(self, job: _Work) -> Any:
        job.begun.set_result(None)

        async def run() -> Any:
            return await job.call()

        return self._loop.run(run())

    def end(self) -> None:
        self._loop.close()
