"""Watching a job from here: its log as it grows, its checkpoints as they become whole, its results at the end.

Nothing here keeps the job going: whoever watches may leave at any moment, and another one goes on from the log's offset and the files that
are here already. A place that does not answer for a while is asked again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from groupwise.jobs.clouds.backend import (
    Backend,
    Busy,
    CloudError,
    Fetched,
    Handle,
    Status,
    Unreachable,
)

PIECE = 1 << 20
"""Bytes of a log at a time."""
LOOK_SECONDS = 20.0
"""Seconds for which one look waits for news."""
AGAIN_SECONDS = 5.0
"""Before a place that did not answer is asked again."""
PATIENCE_SECONDS = 900.0
"""Seconds of silence after which watching is given up."""

Answer = TypeVar("Answer")


class Watch:
    """One job, watched until it has ended."""

    def __init__(
        self, results: Path, write: Callable[[bytes], None], say: Callable[[str], None]
    ) -> None:
        """`results`: where files go. `write` gets the bytes of the log, `say` what there is to tell."""
        self._results, self._write, self._say = results, write, say
        self._offset = 0
        self._waited_for = ""

    async def until_ended(self, backend: Backend, handle: Handle) -> tuple[Status, Fetched]:
        """How it ended; all of the log has been written then, and the results are here. Raises CloudError.

        Called again, also with another way to the place, it goes on where it was.
        """
        status = await self._asked(lambda: backend.status(handle))
        fetched_of: tuple[int, int | None] = (0, None)
        while True:
            self._tell_of_queue(status)
            await self._write_on(backend, handle, status.log_size)
            now = (status.checkpoints, status.step)
            if status.ending is not None:
                return status, await self._asked(lambda: backend.fetch(handle, self._results))
            if status.checkpoints and now != fetched_of:
                with suppress(Busy):  # it saves faster than they travel: the next ones, then
                    await patiently(
                        lambda: backend.fetch(handle, self._results), self._say, (Unreachable,)
                    )
            fetched_of = now
            status = await self._changed(backend, handle, status)

    def _tell_of_queue(self, status: Status) -> None:
        if status.waits_for != self._waited_for:
            self._waited_for = status.waits_for
            self._say(f"waits: {status.waits_for}" if status.waits_for else "it has left the queue")

    async def _changed(self, backend: Backend, handle: Handle, seen: Status) -> Status:
        return await self._asked(lambda: backend.wait(handle, seen, LOOK_SECONDS))

    async def _write_on(self, backend: Backend, handle: Handle, size: int) -> None:
        """The log up to there."""
        while self._offset < size:
            part = await self._asked(lambda: backend.log(handle, self._offset, PIECE))
            if not part.data:
                return
            self._write(part.data)
            self._offset += len(part.data)

    async def _asked(self, ask: Callable[[], Awaitable[Answer]]) -> Answer:
        return await patiently(ask, self._say)


async def patiently(
    ask: Callable[[], Awaitable[Answer]],
    say: Callable[[str], None],
    passing: tuple[type[CloudError], ...] = (Unreachable, Busy),
) -> Answer:
    """Ask until there is an answer. What is `passing` is raised after PATIENCE_SECONDS without one, anything else at once."""
    waited = 0.0
    while True:
        try:
            answer = await ask()
        except passing as error:
            if waited >= PATIENCE_SECONDS:
                raise
            if not waited:
                say(f"{error.message} Asking again.")
            await asyncio.sleep(AGAIN_SECONDS)
            waited += AGAIN_SECONDS
            continue
        if waited:
            say("it answers again")
        return answer
