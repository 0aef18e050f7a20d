"""Times retries to a service that could not answer: the wait before each one, and the pause that all callers share.

The wait doubles from one attempt to the next and is partly random, so callers that failed together do not retry together.
If the service gives a time (`Retry-After`, in seconds or as a date), that is used. A service that reports too many requests pauses
all callers, not only the one that it refused.
"""

from __future__ import annotations

import math
from email.utils import parsedate_to_datetime

from groupwise.core.retry import Backoff, Timing

FIRST_WAIT = 1.0
"""Seconds before the second attempt; doubled for each further one."""
LONGEST_WAIT = 60.0
"""Maximum wait in seconds."""
MAX_RETRY_AFTER = 900.0
"""Longest pause, in seconds, that a service may ask for; if it asks for more, the call fails, and the work can be resumed later."""
SPREAD = 0.1
"""After a common pause, the callers start again spread over this share of its length."""

PERMANENT_STATUSES = frozenset({501, 505, 511})
"""Statuses from 500 on for which a retry cannot succeed."""
RETRYABLE_STATUSES = frozenset({408, 409, 425, 429})
"""Statuses below 500 for which a retry may succeed: time-out, conflict, too early, too many requests."""
OVERLOAD_STATUSES = frozenset({429, 503})
"""Statuses of an overloaded service, which pause all callers."""


class Pause:
    """A pause during which no caller sends a request."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._from = self._until = -math.inf

    def extend(self, seconds: float) -> bool:
        """Pause all callers for `seconds` from now; True if that prolongs the pause."""
        now = self._timing.clock()
        if now + seconds <= self._until:
            return False
        self._from, self._until = now, now + seconds
        return True

    @property
    def left(self) -> float:
        """Seconds until it ends."""
        return max(self._until - self._timing.clock(), 0.0)

    async def over(self) -> None:
        """Wait for the end of the pause, and of a pause that started meanwhile."""
        while (remaining := self.left) > 0:
            spread = SPREAD * (self._until - self._from)
            await self._timing.sleep(remaining + spread * self._timing.jitter())


def is_retryable(status: int) -> bool:
    """True if a request that was answered with this status may succeed later."""
    return status in RETRYABLE_STATUSES or (status >= 500 and status not in PERMANENT_STATUSES)


def backoff(timing: Timing) -> Backoff:
    """The waits before the attempts after the first."""
    return Backoff(FIRST_WAIT, LONGEST_WAIT, timing.jitter)


def retry_after(header: str | None, today: float) -> float | None:
    """Seconds in a `Retry-After` header; None if the header is missing or invalid."""
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(header).timestamp() - today
        except (ValueError, OverflowError):
            return None
    return max(seconds, 0.0) if math.isfinite(seconds) else None
