"""Watches a job from this machine: shows its log as it grows, fetches checkpoints as they are completed, and the results at the end.

The job does not depend on a watcher: a watcher may end at any moment, and another one continues from the log's offset and the files that
were fetched. If a place does not answer for a while, the request is repeated.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from groupwise.core.retry import Backoff, ReportedRetry, Retry
from groupwise.jobs.clouds.backend import (
    Backend,
    Busy,
    CloudError,
    FetchedResults,
    Handle,
    Status,
    Unreachable,
)

PIECE = 1 << 20
"""Most bytes of a log that are read at once."""
LOOK_SECONDS = 20.0
"""Seconds for which one `wait` call waits for changes."""
RETRY_SECONDS = 5.0
"""Seconds before a request without an answer is repeated."""
RETRY_TIMEOUT = 900.0
"""Seconds without an answer, from the end of the first request that got none, after which watching is given up."""

Result = TypeVar("Result")


class Watch:
    """One job, watched until it has ended."""

    def __init__(
        self, results: Path, write: Callable[[bytes], None], say: Callable[[str], None]
    ) -> None:
        """`results`: the folder for files. `write` receives the bytes of the log, `say` messages for users."""
        self._results, self._write, self._say = results, write, say
        self._offset = 0
        self._waited_for = ""

    async def until_ended(self, backend: Backend, handle: Handle) -> tuple[Status, FetchedResults]:
        """Watch the job to its end; writes its whole log and fetches its results. Returns how it ended. Raises CloudError.

        If called again, even with another backend of the same place, it continues at the same offset.
        """
        status = await self._with_retries(lambda: backend.status(handle))
        fetched_of: tuple[int, int | None] = (0, None)
        while True:
            if status.waits_for != self._waited_for:
                self._waited_for = status.waits_for
                self._say(
                    f"waits: {status.waits_for}" if status.waits_for else "it has left the queue"
                )
            while self._offset < status.log_size:
                part = await self._with_retries(lambda: backend.log(handle, self._offset, PIECE))
                if not part.data:
                    break
                self._write(part.data)
                self._offset += len(part.data)
            progress = (status.checkpoints, status.step)
            if status.ending is not None:
                return status, await self._with_retries(
                    lambda: backend.fetch(handle, self._results)
                )
            if status.checkpoints and progress != fetched_of:
                # If it saves faster than files are transferred, the next fetch gets the later ones.
                with suppress(Busy):
                    await with_retries(
                        lambda: backend.fetch(handle, self._results), self._say, (Unreachable,)
                    )
            fetched_of = progress
            status = await self._with_retries(partial(backend.wait, handle, status, LOOK_SECONDS))

    async def _with_retries(self, call: Callable[[], Awaitable[Result]]) -> Result:
        return await with_retries(call, self._say)


async def with_retries(
    call: Callable[[], Awaitable[Result]],
    say: Callable[[str], None],
    passing: tuple[type[CloudError], ...] = (Unreachable, Busy),
) -> Result:
    """Repeat a request until there is an answer. Errors in `passing` are raised only after RETRY_TIMEOUT without an answer, others at
    once."""
    retry = Retry(
        RETRY_TIMEOUT, Backoff(RETRY_SECONDS, RETRY_SECONDS, low=1.0), clock=time.monotonic
    )
    retry.renew()  # the time counts from the first failure
    reported_retry = ReportedRetry(
        retry, say, lambda error: f"{error} Asking again.", "it answers again"
    )
    while True:
        try:
            answer = await call()
        except passing as error:
            await asyncio.sleep(reported_retry.pause(error))
        else:
            reported_retry.end()
            return answer
