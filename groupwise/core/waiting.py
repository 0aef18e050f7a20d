"""Waits for changes and events, and ends background tasks, all within one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

AGAIN = 1.0
"""Seconds until a task is cancelled once more: a cancellation that coincides with a result is lost in `asyncio.wait_for`."""


class ChangeNotifier:
    """Wakes waiting tasks after every change; each then checks its condition again."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def notify(self) -> None:
        """Wake the waiting tasks: something has changed."""
        event, self._next = self._next, asyncio.Event()
        event.set()

    @property
    def next_event(self) -> asyncio.Event:
        """The event that the next `notify` sets. Read it before checking the condition, or a change in between is missed."""
        return self._next


async def wait_at_most(seconds: float, event: asyncio.Event) -> bool:
    """Return True when the event is set, or False after `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False


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


async def wait_for_first(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """Wait until one of these has ended, and cancel the others. Returns what has ended, mostly one result, or raises its error."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        ended_tasks, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return [task.result() for task in ended_tasks]
    finally:
        await cancel_and_wait(*tasks)
