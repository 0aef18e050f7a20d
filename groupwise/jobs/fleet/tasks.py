"""Ending background tasks, and waiting for events."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

AGAIN = 1.0
"""Seconds until a task is cancelled once more: a cancellation that coincides with a result is lost in `asyncio.wait_for`."""


async def wait_at_most(seconds: float, event: asyncio.Event) -> None:
    """Return when the event is set, or after `seconds`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


async def cancel_and_wait(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel the tasks that still run, and wait until all have ended. Their errors are dropped: the tasks report them themselves."""
    running_tasks = {task for task in tasks if task is not None}
    while running_tasks:
        for task in running_tasks:
            task.cancel()
        ended_tasks, running_tasks = await asyncio.wait(running_tasks, timeout=AGAIN)
        for task in ended_tasks:
            if not task.cancelled():
                task.exception()
