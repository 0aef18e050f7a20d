"""Awaiting an asynchronous piece of work from code that is not async."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from groupwise.loops.interruption import Interruption

T = TypeVar("T")


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, also where an event loop is running already (notebooks): there in a thread of its own.

    Interrupting the waiting thread asks a run to end cleanly, and cancels anything else.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    inner: list[asyncio.AbstractEventLoop] = []

    async def noted() -> T:
        inner.append(asyncio.get_running_loop())
        return await work

    with ThreadPoolExecutor(max_workers=1) as thread:
        done = thread.submit(asyncio.run, noted())
        try:
            return done.result()
        except KeyboardInterrupt:
            _end(inner)
            return done.result()


def _end(loops: Iterable[asyncio.AbstractEventLoop]) -> None:
    if Interruption.open_ones:
        Interruption.open_ones[-1].ask()
        return
    for loop in loops:
        for task in asyncio.all_tasks(loop):
            loop.call_soon_threadsafe(task.cancel)
