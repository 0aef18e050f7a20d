"""Ending tasks that were begun for as long as something is open."""

from __future__ import annotations

import asyncio
from typing import Any

AGAIN = 1.0
"""Seconds until a task that has not ended is cancelled once more: a cancellation that meets a result is lost in `asyncio.wait_for`."""


async def ended(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel those that still run, and wait until all have ended; what they raised was theirs to report."""
    running = {task for task in tasks if task is not None}
    while running:
        for task in running:
            task.cancel()
        done, running = await asyncio.wait(running, timeout=AGAIN)
        for task in done:
            if not task.cancelled():
                task.exception()
