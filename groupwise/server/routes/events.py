"""Server-sent events. A client whose stream was interrupted resumes it with the id of the last event that it received.

A stream sends the existing events, then waits for the next; a comment every few seconds keeps proxies from closing it. It ends when the
server shuts down. Each stream holds a connection, so their number is limited.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Annotated

from fastapi import Depends, Header
from fastapi.sse import EventSourceResponse, ServerSentEvent

from groupwise.api.http.route import Route
from groupwise.api.schemas.keys import Role
from groupwise.api.schemas.problems import Refusal
from groupwise.core.waiting import wait_for_first
from groupwise.server.routes.context import Context

TAG = "training"
AT_ONCE = 100
"""Number of events read from the ledger at a time."""
LONGEST_WAIT = 60.0
"""Seconds after which the ledger is read again, even if no event was announced."""
TRY_AGAIN = 5.0
"""Seconds after which a refused client may try again."""
RECONNECT = 2000
"""Milliseconds after which a disconnected browser reconnects."""


LastEventId = Annotated[
    int | None,
    Header(
        description="Of the last event that the client has had; the next ones follow. Without it: those from now on.",
        ge=0,
        lt=2**63,
    ),
]


async def stream_slot(context: Context, last_event_id: LastEventId = None) -> AsyncGenerator[int]:
    """Reserve one of the streams that may be open at once, until the response is over; yields the event after which the stream starts.

    Refusals are raised here, because after the start of a stream the status can no longer be changed.
    """
    metrics, max_streams = context.serving.metrics, context.serving.config.max_event_streams
    if context.serving.ending.is_set():
        raise Refusal("shutting_down")
    if metrics.event_streams >= max_streams:
        raise Refusal(
            "rate_limited",
            f"{max_streams} streams of events are open already, which is max_event_streams of the server. "
            "GET /status tells the same, once.",
            retry_after=TRY_AGAIN,
        )
    metrics.event_streams += 1
    try:
        if last_event_id is None:
            last_event_id = await context.service.last_event()
        yield last_event_id
    finally:
        metrics.event_streams -= 1


async def events(
    context: Context, last_id: Annotated[int, Depends(stream_slot)]
) -> AsyncGenerator[ServerSentEvent]:
    """Stream events from now on, or after `Last-Event-ID`; each has an id, a kind, and data as in `EventData`."""
    service, serving = context.service, context.serving
    yield ServerSentEvent(comment="events follow", retry=RECONNECT)
    while not serving.ending.is_set():
        for event in await service.events(last_id, AT_ONCE):
            yield ServerSentEvent(
                raw_data=event.model_dump_json(), event=event.kind, id=str(event.id)
            )
            last_id = event.id
        await wait_for_first(
            serving.service.next_event(last_id, LONGEST_WAIT), serving.ending.wait()
        )


ROUTES = (
    Route(
        method="GET",
        path="/events",
        handler=events,
        role=Role.READ,
        tag=TAG,
        media_type="text/event-stream",
        codes=("invalid_request", "shutting_down"),
        response_class=EventSourceResponse,
    ),
)
