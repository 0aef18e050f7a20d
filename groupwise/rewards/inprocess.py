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
from typing import Any, TypeVar

from groupwise.errors import GroupwiseError, RewardWorkerError, RunError
from groupwise.plugins import explain
from groupwise.rewards.plain import plain
from groupwise.rewards.rubric import NO_REWARD, Rubric
from groupwise.rewards.scoring import GroupScore, ScoreRequest, unscored
from groupwise.rewards.text import CompletionText
from groupwise.rewards.threads import DaemonThreads
from groupwise.types import Prompt

ComputeMetrics = Callable[
    [Sequence[Prompt], Sequence[CompletionText], Sequence[dict[str, Any]]], dict[str, Any]
]


T = TypeVar("T")

_END_LIMIT = 1.0
"""Seconds that an idle thread may take to end."""


@dataclass(frozen=True, slots=True)
class RubricScorer:
    """What a factory for `RewardWorkers` returns: a rubric and the task's metrics, both ready to be called."""

    rubric: Rubric | None
    """None: the task has no reward functions, and none applies."""
    compute_metrics: ComputeMetrics

    async def score(self, request: ScoreRequest, started: Callable[[str], None]) -> GroupScore:
        """See `Rubric.score`."""
        if self.rubric is None:  # the rewards are those of the task's environment
            return unscored(len(request.completions), "failed", NO_REWARD)
        return await self.rubric.score(request, started)


class LimitedThread:
    """One thread that does one call after the other; a call that exceeds its limit ends the run."""

    def __init__(self, name: str, too_slow: Callable[[str, float], RunError]) -> None:
        """`too_slow` makes the error from what was running and its limit in seconds."""
        self._too_slow = too_slow
        self._runner = _Runner()
        self._thread: DaemonThreads[Work] = DaemonThreads([self._runner], name)
        self._given_up: RunError | None = None

    async def call(self, call: Callable[[Work], Awaitable[T]], limit: float | None = None) -> T:
        """The result of a coroutine function, run there; it notes when a piece of user code begins, which has the whole limit.

        Raises what `too_slow` makes when that is exceeded, then and ever after.
        """
        if self._given_up is not None:
            raise self._given_up
        job = Work(call)
        done = asyncio.wrap_future(self._thread.submit(job))
        if limit is None:
            return await done
        begun = asyncio.wrap_future(job.begun)
        await asyncio.wait({done, begun}, return_when=asyncio.FIRST_COMPLETED)
        while not done.done() and (left := job.since + limit - time.monotonic()) > 0:
            await asyncio.wait({done}, timeout=left)
        if done.done() and not done.cancelled():
            return done.result()
        if self._given_up is None:
            self._given_up = self._too_slow(job.running, limit)
            self._thread.close()
        raise self._given_up

    async def close(self) -> None:
        """Give up the calls that wait, and the one that is under way: nobody waits for its end."""
        self._thread.close()
        if not self._runner.busy:
            await asyncio.to_thread(self._thread.join, _END_LIMIT)


class InProcessScorer:
    """Scores groups one after the other in a thread of this process; a `Scorer`."""

    def __init__(
        self, rubric: Rubric | None, compute_metrics: ComputeMetrics, *, time_limit: float = 30.0
    ) -> None:
        """`time_limit` in seconds for a reward function's call; None for `rubric`: see `RubricScorer`."""
        self._scorer = RubricScorer(rubric, compute_metrics)
        self._time_limit = time_limit
        self._thread = LimitedThread("rewards", _too_slow)

    async def start(self) -> None:
        """The thread is ready as soon as it is made."""

    async def score(self, request: ScoreRequest) -> GroupScore:
        """Score one group. Raises RewardWorkerError when it takes too long, then and ever after."""

        async def work(job: Work) -> GroupScore:
            try:
                return await self._scorer.score(request, job.note)
            except Exception as error:  # noqa: BLE001 — whatever user code did, only its group fails
                reason = f"scoring raised {explain(error).strip()}"
                return unscored(len(request.completions), "failed", reason)

        return await self._thread.call(work, self._time_limit)

    async def compute_metrics(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[CompletionText],
        rows: Sequence[dict[str, Any]],
    ) -> dict[str, Any]:
        """The task's metrics, as JSON values; without a time limit, because nothing could be done about it."""

        async def work(job: Work) -> dict[str, Any]:
            return plain(self._scorer.compute_metrics(prompts, completions, rows))

        try:
            return await self._thread.call(work)
        except GroupwiseError as error:
            raise RewardWorkerError(str(error)) from error
        except Exception as error:  # user code may raise anything
            raise RewardWorkerError(f"compute_metrics raised {explain(error).strip()}") from error

    async def close(self) -> None:
        """Give up the calls that wait, and the one that is under way: nobody waits for its end."""
        await self._thread.close()


def _too_slow(running: str, limit: float) -> RunError:
    return RewardWorkerError(
        f"The reward function `{running}` took longer than {limit:g} s. It runs inside this "
        "process, where it cannot be killed and replaced, because it keeps state or cannot be imported by another "
        "process. Make it faster, raise the limit, or move it into a task file."
    )


@dataclass(slots=True)
class Work:
    """A call for the thread, and what the thread notes about it."""

    call: Callable[[Work], Awaitable[Any]]
    begun: Future[None] = field(default_factory=Future[None])
    running: str = "?"
    since: float = 0.0
    """When the function that is `running` was begun, on the monotonic clock."""

    def note(self, name: str, *, repeated: bool = False) -> None:
        """Hear that a function begins; each has the whole time limit, and nothing is repeated in a process that lives."""
        self.running, self.since = name, time.monotonic()


class _Runner:
    """Runs coroutines in the thread's own event loop, so that a blocking one blocks nothing else."""

    def __init__(self) -> None:
        self.busy = False

    def begin(self) -> None:
        self._loop = asyncio.Runner()

    def do(self, job: Work) -> Any:
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
