"""Times retries to a service that could not answer: how long to wait, and the pause that all callers share.

The wait doubles from one attempt to the next, with chance in it, so that callers that failed together do not come back together.
If the service says how long (`Retry-After`, in seconds or as a date), that holds. A service that is asked too fast pauses
all callers, not only the one that it refused.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

FIRST = 1.0
"""Seconds before the second attempt; each further one doubles it."""
LONGEST = 60.0
"""Seconds that a wait grows to by doubling."""
MAX_RETRY_AFTER = 900.0
"""Longest pause, in seconds, that a service may ask for; if it asks for more, it is better to stop and go on later."""
SPREAD = 0.1
"""Share of a common pause over which the callers come back one after the other."""

SERVER_CANNOT = frozenset({501, 505, 511})
"""Statuses of servers that will not do it next time either."""
ASK_AGAIN = frozenset({408, 409, 425, 429})
"""Statuses below 500 that may pass: time-outs, conflicts, too early, too fast."""
TOO_FAST = frozenset({429, 503})
"""Statuses of a service that wants a pause from all callers."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Clocks, sleep and random numbers. Tests replace them and need not wait."""

    clock: Callable[[], float] = time.monotonic
    today: Callable[[], float] = time.time
    """Seconds since 1970, for a `Retry-After` that is a date."""
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    sleep_blocking: Callable[[float], None] = time.sleep
    chance: Callable[[], float] = random.random
    """Uniform in [0, 1)."""


class Pause:
    """The time until which no request is sent."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._from = self._until = -math.inf

    def extend(self, seconds: float) -> bool:
        """Let all callers wait for `seconds` from now on; True if that prolongs the pause."""
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
        """Wait for the end of the pause, and of the one that may have begun meanwhile."""
        while (left := self.left) > 0:
            spread = SPREAD * (self._until - self._from)
            await self._timing.sleep(left + spread * self._timing.chance())


def may_pass(status: int) -> bool:
    """True if a service that answered with this status may succeed later."""
    return status in ASK_AGAIN or (status >= 500 and status not in SERVER_CANNOT)


def wait_after(attempt: int, chance: float) -> float:
    """Seconds to wait after attempt number `attempt` (from 0): between half and all of what doubling gives."""
    return min(LONGEST, FIRST * 2.0 ** min(attempt, 30)) * (0.5 + 0.5 * chance)


def retry_after(header: str | None, today: float) -> float | None:
    """Seconds that a `Retry-After` asks for; None if there is none, or none that can be read."""
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
