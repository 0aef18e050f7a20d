"""Notifies open pages that their content has changed: one event stream for each page.

The stream only signals that something is new, and the page then reloads its content. So no intermediate change is lost, and a page
that was suspended is up to date after one request.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from groupwise.api.schemas.problems import Refusal
from groupwise.dashboard.context import DashboardContext
from groupwise.dashboard.pages import visitor_of
from groupwise.dashboard.sources.runs import folder_mtime, stamp_of
from groupwise.runs.folder import RESULTS

CHECK_INTERVAL = 1.0
"""Seconds between two checks."""
KEEPALIVE_INTERVAL = 15.0
"""Seconds after which something is sent in any case: proxies close silent connections, and a closed browser is noticed by sending."""
MAX_STREAMS = 100
RETRY_SECONDS = 5.0

StampFunction = Callable[[], Any]
"""A function whose value changes when a page has news."""


class Streams:
    """Limits the number of open streams."""

    def __init__(self, most: int = MAX_STREAMS) -> None:
        self._free = threading.Semaphore(most)

    def acquire(self) -> None:
        """Count a new stream. Raises `too_busy`."""
        if not self._free.acquire(blocking=False):
            raise Refusal(
                "too_busy", f"{MAX_STREAMS} pages are open; close some.", retry_after=RETRY_SECONDS
            )

    def release(self) -> None:
        """Count a stream that has ended."""
        self._free.release()


async def live(request: Request) -> Response:
    """The stream of what the address names: `?run=NAME` (also several), `?fleet` or `?server`; without these, of all runs and their
    results.
    """
    context: DashboardContext = request.app.state.context
    if visitor_of(request) is None:
        raise Refusal("unauthorised")
    stamp = stamp_function(context, request)
    streams: Streams = request.app.state.streams
    streams.acquire()
    return StreamingResponse(
        _stream_events(context, stamp, streams, request),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


def stamp_function(context: DashboardContext, request: Request) -> StampFunction:
    """The function to watch for the page of this address."""
    runs = [context.run(name) for name in request.query_params.getlist("run")[:20]]
    if runs:
        # State of a run: its record, the results of evaluations in its folder, and whether a process works on it.
        return lambda: [
            (stamp_of(path), folder_mtime(path / RESULTS), context.runs.entry(path).info.state)
            for path in runs
        ]
    for name, watched in (("fleet", context.fleet), ("server", context.server)):
        if name in request.query_params and watched is not None:
            return watched.stamp
    return context.runs.stamp


async def _stream_events(
    context: DashboardContext, stamp: StampFunction, streams: Streams, request: Request
) -> AsyncGenerator[bytes]:
    """Send news until the browser disconnects or the dashboard ends."""
    try:
        yield b"retry: 3000\n\n"
        last_stamp, silent_seconds = await asyncio.to_thread(stamp), 0.0
        while not context.ending.is_set() and not await request.is_disconnected():
            await asyncio.sleep(CHECK_INTERVAL)
            new_stamp, silent_seconds = (
                await asyncio.to_thread(stamp),
                silent_seconds + CHECK_INTERVAL,
            )
            if new_stamp != last_stamp:
                last_stamp, silent_seconds = new_stamp, 0.0
                yield b"event: changed\ndata: \n\n"
            elif silent_seconds >= KEEPALIVE_INTERVAL:
                silent_seconds = 0.0
                yield b": still here\n\n"
    finally:
        streams.release()
