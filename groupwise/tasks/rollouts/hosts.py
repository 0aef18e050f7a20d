"""Hosts of environments: worker processes that can be killed, or a thread of the run.

An environment is user code, which may hang, crash and fork, so each worker process runs one call at a time with a time limit, and a
worker that exceeds it is killed and replaced; its other rollouts continue in the new one (see `sessions`). All rollouts of a group
run in the same worker, chosen by the draw.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from typing import Any, Protocol

from groupwise.core.errors import EnvironmentWorkerError, RunError
from groupwise.core.reward_call.request import unpicklable
from groupwise.core.types import from_json
from groupwise.tasks.rewards.inprocess import LimitedThread, ThreadCall
from groupwise.tasks.rewards.pool import Answered, Died, TimedOut, WorkerKind, WorkerPool
from groupwise.tasks.rollouts.sessions import Reply, SessionCall, Sessions

KIND = WorkerKind("environment worker", EnvironmentWorkerError, "rollout.start_limit")


class EnvironmentHost(Protocol):
    """Holds the environments of all rollouts in progress."""

    async def start(self) -> None:
        """Prepare; optional. Raises EnvironmentWorkerError if that fails."""
        ...

    async def ask(self, call: SessionCall, limit: float) -> Reply:
        """Make a call, in which each piece of user code may take `limit` seconds, or `call.repeat_limit` if it is repeated.

        Errors of the environment are not raised; they are in the reply.
        """
        ...

    async def close(self) -> None:
        """End everything, including calls in progress."""
        ...


class WorkerHost:
    """Environments in worker processes; an `EnvironmentHost`.

    `factory` names a function (`package.module:function`) that each worker calls with `arguments`; it returns `Sessions`.
    """

    def __init__(
        self,
        factory: str,
        arguments: Mapping[str, Any],
        *,
        workers: int = 1,
        start_limit: float = 60.0,
    ) -> None:
        """`start_limit` in seconds, for the start of a worker."""
        self._pools = [
            WorkerPool(KIND, factory, arguments, workers=1, start_limit=start_limit)
            for _ in range(workers)
        ]

    async def start(self) -> None:
        """See `EnvironmentHost.start`."""
        for pool in self._pools:
            await pool.start()

    async def ask(self, call: SessionCall, limit: float) -> Reply:
        """See `EnvironmentHost.ask`."""
        pool = self._pools[call.draw % len(self._pools)]
        try:
            pickled = pickle.dumps(call)
        except Exception as error:  # values of user classes may raise anything here
            culprits = ", ".join(f"`{name}`" for name in unpicklable(call.columns))
            raise EnvironmentWorkerError(
                f"A dataset value (column {culprits}) cannot be sent to the environment workers: {error}. "
                "Keep plain values in the dataset and make the objects in the environment."
            ) from error
        outcome = await pool.ask(pickled, limit, call.repeat_limit)
        match outcome:
            case Answered(message):
                # User code might have written anything into a worker's message.
                try:
                    return from_json(Reply, json.dumps(message["answer"]))
                except (KeyError, ValueError) as error:
                    return Reply(
                        outcome="failed", reason=f"the environment worker's answer is none: {error}"
                    )
            case TimedOut(reason):
                return Reply(outcome="timed_out", reason=reason)
            case Died(reason):
                return Reply(outcome="failed", reason=reason)

    async def close(self) -> None:
        """See `EnvironmentHost.close`."""
        for pool in self._pools:
            await pool.close()


class LocalHost:
    """Environments in one thread of this process, which cannot be killed; an `EnvironmentHost`."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._thread = LimitedThread("environments", _too_slow)

    async def start(self) -> None:
        """Does nothing: the thread is ready once it is created."""

    async def ask(self, call: SessionCall, limit: float) -> Reply:
        """See `EnvironmentHost.ask`. Raises EnvironmentWorkerError once a call takes too long, and in every later call."""

        async def work(job: ThreadCall) -> Reply:
            return await self._sessions.reply(call, job.note)

        return await self._thread.call(work, limit)

    async def close(self) -> None:
        """See `EnvironmentHost.close`."""
        await self._thread.close()


def _too_slow(running: str, limit: float) -> RunError:
    return EnvironmentWorkerError(
        f"The environment's `{running}` took longer than {limit:g} s. It runs inside this process, where it cannot be "
        "killed and replaced, because the task cannot be imported by another process or rollout.in_process is set. Make "
        "it faster, raise rollout.time_limit, or move it into a task file."
    )
