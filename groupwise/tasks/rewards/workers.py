"""Reward functions in worker processes that can be killed and replaced at any time.

The run calls `RewardWorkers`; each worker scores one group at a time. A worker that takes too long or crashes is replaced, and its
group is returned unscored with the reason. Results do not depend on the worker. `pool` has the details.
"""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from groupwise.core.errors import RewardWorkerError
from groupwise.core.reward_call.request import GroupScore, ScoreRequest, unpicklable, unscored_group
from groupwise.core.reward_call.text import CompletionText
from groupwise.core.types import Prompt, from_json
from groupwise.tasks.rewards.pool import (
    Answered,
    CallOutcome,
    Died,
    TimedOut,
    WorkerKind,
    WorkerPool,
)

METRICS_LIMIT_FACTOR = 10
"""`compute_metrics` sees a whole evaluation, so its time limit is this multiple of a group's."""


class RewardWorkers:
    """Scores groups in worker processes; a `Scorer`.

    `factory` names a function (`package.module:function`); each worker calls it with `arguments`, which must be
    expressible as JSON, as keywords. It returns an object with `score(request, started) -> GroupScore` and
    `compute_metrics(prompts, completions, rows) -> dict`, each sync or async, such as a `RubricScorer`.
    """

    def __init__(
        self,
        factory: str,
        arguments: Mapping[str, Any],
        *,
        workers: int = 1,
        time_limit: float = 30.0,
        start_limit: float = 60.0,
    ) -> None:
        """Limits in seconds: `time_limit` for a reward function's call, `start_limit` for the start of a worker."""
        self._time_limit = time_limit
        self._pool = WorkerPool(
            WorkerKind("reward worker", RewardWorkerError, "rewards.start_limit"),
            factory,
            arguments,
            workers=workers,
            start_limit=start_limit,
        )

    async def start(self) -> None:
        """Start the workers and wait until they are ready. Raises RewardWorkerError if one cannot be.

        Calling it is optional; the first call starts them too.
        """
        await self._pool.start()

    async def score(self, request: ScoreRequest) -> GroupScore:
        """Score one group. Raises RewardWorkerError only if no worker can be started or reached."""
        outcome = await self._ask_pool(request, self._time_limit)
        count = len(request.completions)
        match outcome:
            case Answered(message):
                score = from_json(GroupScore, json.dumps(message["score"]))
                if len(score.members) != count:
                    reason = (
                        f"the scorer gave {len(score.members)} verdicts for {count} completions"
                    )
                    return unscored_group(count, "failed", reason)
                return score
            case TimedOut(reason):
                return unscored_group(count, "timed_out", reason)
            case Died(reason):
                return unscored_group(count, "failed", reason)

    async def compute_metrics(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[CompletionText],
        rows: Sequence[dict[str, Any]],
    ) -> dict[str, Any]:
        """The task's metrics, as JSON values. Raises RewardWorkerError if they raise, hang or crash."""
        request = (list(prompts), list(completions), list(rows))
        outcome = await self._ask_pool(request, self._time_limit * METRICS_LIMIT_FACTOR)
        if not isinstance(outcome, Answered):
            raise RewardWorkerError(f"compute_metrics gave no answer: {outcome.reason}")
        return outcome.message["metrics"]

    async def close(self) -> None:
        """Kill the workers and all that they started, and wait until they are reaped."""
        await self._pool.close()

    async def _ask_pool(self, request: Any, limit: float) -> CallOutcome:
        return await self._pool.ask(_pickle_request(request), limit)


def _pickle_request(request: Any) -> bytes:
    try:
        return pickle.dumps(request)
    except Exception as error:  # values of user classes may raise anything here
        culprits = unpicklable(request.columns) if isinstance(request, ScoreRequest) else []
        which = f" (column {', '.join(f'`{name}`' for name in culprits)})" if culprits else ""
        raise RewardWorkerError(
            f"A dataset value cannot be sent to the reward workers{which}: {error}. "
            "Keep plain values in the dataset and make the objects in the reward function."
        ) from error


if __name__ == "__main__":
    from groupwise.tasks.rewards.worker_process import main

    main(int(sys.argv[1]), int(sys.argv[2]))
