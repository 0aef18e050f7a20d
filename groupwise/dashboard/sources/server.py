"""The dashboard's view of a training server: makes one request a second for all pages."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from groupwise.api.schemas.activity import ActivityAnswer
from groupwise.api.schemas.training import StatusAnswer
from groupwise.core.errors import GroupwiseError
from groupwise.dashboard.sources.cached_values import (
    NEWER_VALUE_TIMEOUT,
    BackgroundValue,
    CachedCall,
)

REFRESH_SECONDS = 10.0
"""Seconds after which a page is refreshed without news: the shown ages of leases and silences change."""
RETRY_TIMEOUT, TIMEOUT = 3.0, 10.0
"""Seconds for which requests to a remote server are retried, and within which it must respond."""
VOLATILE_FIELDS = {
    "at": True,
    "clients": True,
    "loop_elsewhere": {"silent_seconds"},
    "groups": {"__all__": {"lease_seconds"}},
    "waiting": {"__all__": {"seconds"}},
    "sessions": {"__all__": {"silent_seconds", "let_go_seconds"}},
}
"""Fields that change every second, or with each request, and do not count as news."""


class ServerLike(Protocol):
    """The methods of `TrainingClient` and of a server in this process that are used here."""

    def status(self) -> StatusAnswer: ...
    def activity(self) -> ActivityAnswer: ...


class WatchedServer:
    """A training server as pages see it. Thread-safe."""

    def __init__(self, server: ServerLike, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._answers = CachedCall(
            lambda: (server.status(), server.activity()), "The server", clock
        )
        self._stamp = BackgroundValue(self._compute_stamp, clock)

    def ask(self) -> tuple[StatusAnswer, ActivityAnswer]:
        """Status and activity. Raises ClientError if the server does not answer, and `too_busy` while others wait for that."""
        return self._answers.get()

    def stamp(self, timeout: float = NEWER_VALUE_TIMEOUT) -> str | None:
        """A text that changes whenever the page has something new to show."""
        return self._stamp.latest(timeout)

    def end(self) -> None:
        """Stop background requests, so the client can be closed."""
        self._stamp.end()

    def _compute_stamp(self) -> str:
        try:
            status, activity = self.ask()
        except GroupwiseError as error:
            return error.code
        ticks = int(self._clock() // REFRESH_SECONDS)
        visible = (
            status.model_dump_json(exclude={"memory"}),
            activity.model_dump_json(
                exclude=VOLATILE_FIELDS  # pyright: ignore[reportArgumentType]
            ),
        )
        return f"{ticks} {' '.join(visible)}"
