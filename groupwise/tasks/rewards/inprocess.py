"""A rubric with the task's metrics, and its scoring in one thread of this process.

The thread is for functions that another process cannot import (closures of a notebook) and for those that keep state between calls.
A thread cannot be killed: if a call exceeds its limit, its thread is abandoned, its group is returned unscored as from a worker,
and the next call gets a fresh thread. If too many threads hang, the run ends. The end of the run does not wait for them: they are
daemon threads.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from groupwise.core.errors import GroupwiseError, RewardWorkerError, RunError
from groupwise.core.plugins import explain
from groupwise.core.processes.threads import DaemonThreads
from groupwise.core.reward_call.call import loop_of_thread
from groupwise.core.reward_call.plain import plain
from groupwise.core.reward_call.request import GroupScore, ScoreRequest, unscored_group
from groupwise.core.reward_call.text import CompletionText
from groupwise.core.types import Prompt
from groupwise.tasks.rewards.rubric import NO_REWARD, Rubric

ComputeMetrics = Callable[
    [Sequence[Prompt], Sequence[CompletionText], Sequence[dict[str, Any]]], dict[str, Any]
]

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_HANGING = 3
"""Reward threads that may hang at the same time. A hanging thread keeps its memory and may use CPU time of the run."""
_END_LIMIT = 1.0
"""Seconds to wait for an idle thread to end."""


def no_metrics(*_: Any) -> dict[str, Any]:
    """The metrics of rewards that belong to no task."""
    return {}


@dataclass(frozen=True, slots=True)
class RubricScorer:
    """Scores with a rubric and the task's metrics; returned by a factory for `RewardWorkers`."""

    rubric: Rubric | None
    """None if the task has no reward functions, or none applies."""
    compute_metrics: ComputeMetrics = no_metrics

    async def score(self, request: ScoreRequest, started: Callable[[str], None]) -> GroupScore:
        """See `Rubric.score`."""
        if self.rubric is None:  # the rewards are those of the task's environment
            return unscored_group(len(request.completions), "failed", NO_REWARD)
        return await self.rubric.score(request, started)


class TooSlow(Exception):
    """A call exceeded its limit and was abandoned with its thread; the next call gets another thread."""


class LimitedThread:
    """One thread that runs calls one after the other. If a call exceeds its limit, the thread is abandoned, or the run ends."""

    def __init__(
        self, name: str, too_slow: Callable[[str, float], RunError], spare: int = 0
    ) -> None:
        """`too_slow` makes the error that ends the run once more than `spare` threads hang, from the name of the running code and
        its limit in seconds.
        """
        self._name = name
        self._too_slow = too_slow
        self._spare = spare
        self._hanging_threads: list[DaemonThreads[ThreadCall]] = []
        self._final_error: RunError | None = None
        self._start_thread()

    def _start_thread(self) -> None:
        self._runner = _Runner()
        self._thread: DaemonThreads[ThreadCall] = DaemonThreads([self._runner], self._name)

    async def call(
        self, call: Callable[[ThreadCall], Awaitable[T]], limit: float | None = None
    ) -> T:
        """The result of a coroutine function, run in the thread. It notes the start of each piece of user code; each piece may take
        `limit` seconds.

        Raises TooSlow if a piece takes longer. If too many threads hang, raises the error made by `too_slow`, from then on in every
        call.
        """
        while self._final_error is None:
            thread, job = self._thread, ThreadCall(call)
            done = asyncio.wrap_future(thread.submit(job))
            start = asyncio.wrap_future(job.started)
            await asyncio.wait({done, start}, return_when=asyncio.FIRST_COMPLETED)
            while not done.done():
                remaining = None if limit is None else job.since + limit - time.monotonic()
                if remaining is not None and remaining <= 0:
                    break
                await asyncio.wait({done}, timeout=remaining)
            if done.done() and not done.cancelled():
                return done.result()
            done.cancel()  # ignore a late result of the thread
            job.abandoned = True
            if thread is self._thread and self._final_error is None:
                self._abandon_thread(job.running, limit or 0.0)
        raise self._final_error

    def _abandon_thread(self, running: str, limit: float) -> NoReturn:
        """Abandon the thread. Calls that wait in it are cancelled, and `call` runs them in the new thread."""
        self._thread.close()
        self._hanging_threads = [
            *(thread for thread in self._hanging_threads if not thread.join(0.0)),
            self._thread,
        ]
        if len(self._hanging_threads) > self._spare:
            self._final_error = self._too_slow(running, limit)
            raise self._final_error
        self._start_thread()
        raise TooSlow(f"the call took longer than {limit:g} s; `{running}` was running")

    async def close(self) -> None:
        """Abandon the waiting calls and the running one, without waiting for it to end."""
        self._spare = 0  # start no replacement thread
        self._thread.close()
        if not self._runner.busy:
            await asyncio.to_thread(self._thread.join, _END_LIMIT)


class InProcessScorer:
    """Scores groups one after the other in a thread of this process; a `Scorer`."""

    def __init__(
        self,
        rubric: Rubric | None,
        compute_metrics: ComputeMetrics = no_metrics,
        *,
        time_limit: float = 30.0,
    ) -> None:
        """`time_limit` is in seconds for the call of a reward function. `rubric` may be None, see `RubricScorer`."""
        self._scorer = RubricScorer(rubric, compute_metrics)
        self._time_limit = time_limit
        self._thread = LimitedThread("rewards", _too_slow, MAX_HANGING)

    async def start(self) -> None:
        """Does nothing: the thread is ready once it is created."""

    async def score(self, request: ScoreRequest) -> GroupScore:
        """Score one group; `timed_out` if it takes too long. Raises RewardWorkerError once too many threads hang, and in every
        later call.
        """

        async def work(job: ThreadCall) -> GroupScore:
            try:
                return await self._scorer.score(request, job.note)
            except Exception as error:  # noqa: BLE001 — any error of user code fails only its group
                reason = f"scoring raised {explain(error).strip()}"
                return unscored_group(len(request.completions), "failed", reason)

        try:
            return await self._thread.call(work, self._time_limit)
        except TooSlow as error:
            logger.warning("rewards: %s; its thread is left behind", error)
            return unscored_group(len(request.completions), "timed_out", str(error))

    async def compute_metrics(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[CompletionText],
        rows: Sequence[dict[str, Any]],
    ) -> dict[str, Any]:
        """The task's metrics, as JSON values; without a time limit, because there is nothing to fall back on."""

        async def work(job: ThreadCall) -> dict[str, Any]:
            with loop_of_thread():
                return plain(self._scorer.compute_metrics(prompts, completions, rows))

        try:
            return await self._thread.call(work)
        except GroupwiseError as error:
            raise RewardWorkerError(str(error)) from error
        except Exception as error:  # user code may raise anything
            raise RewardWorkerError(f"compute_metrics raised {explain(error).strip()}") from error

    async def close(self) -> None:
        """Abandon the waiting calls and the running one, without waiting for it to end."""
        await self._thread.close()


def _too_slow(running: str, limit: float) -> RunError:
    return RewardWorkerError(
        f"The reward function `{running}` took longer than {limit:g} s, and {MAX_HANGING} calls before it still hang. They run "
        "inside this process, where nothing can be killed, because a function keeps state or cannot be imported by another "
        "process. Make it faster, raise the limit, or move it into a task file."
    )


@dataclass(slots=True)
class ThreadCall:
    """A call for the thread, with the thread's notes about it."""

    call: Callable[[ThreadCall], Awaitable[Any]]
    started: Future[None] = field(default_factory=Future[None])
    running: str = "?"
    since: float = 0.0
    """Start of the function that is `running`, on the monotonic clock."""
    abandoned: bool = False

    def note(self, name: str, *, repeated: bool = False) -> None:
        """Note that a function starts, which restarts the time limit. `repeated` is ignored: nothing is repeated in a process that
        is still alive.

        Raises TooSlow in an abandoned call, because its other functions must not run concurrently with those of the next call.
        """
        if self.abandoned:
            raise TooSlow
        self.running, self.since = name, time.monotonic()


class _Runner:
    """Runs coroutines in the thread's own event loop, so a blocking one blocks nothing else."""

    def __init__(self) -> None:
        self.busy = False

    def begin(self) -> None:
        self._loop = asyncio.Runner()

    def do(self, job: ThreadCall) -> Any:
        self.busy, job.since = True, time.monotonic()
        job.started.set_result(None)

        async def run() -> Any:
            return await job.call(job)

        try:
            return self._loop.run(run())
        finally:
            self.busy = False

    def end(self) -> None:
        self._loop.close()
