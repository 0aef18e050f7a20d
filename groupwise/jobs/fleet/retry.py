"""Retries against a fleet that does not answer: following a job for hours must survive a restart of the fleet's API or database.

A single request has its own few tries, and fails within seconds, since a user waits for it. Following, waiting, submitting and
transferring files are retried for minutes, which is safe: the request may be repeated, and states where to continue. One message is printed
when the fleet stops answering, and one when it answers again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from groupwise.api.schemas.problems import Refusal
from groupwise.core.errors import GroupwiseError, RunError
from groupwise.core.retry import Backoff, Retry

T = TypeVar("T")
RETRY_SECONDS = 600.0
"""Seconds of retries against a fleet that does not answer."""
PAUSE = 1.0
"""Seconds between two retries; each request has further tries with shorter pauses."""
TEMPORARY_REFUSALS = frozenset({"database_away", "shutting_down", "in_progress", "timed_out"})
"""Refusals after which an API can answer later."""
log = logging.getLogger(__name__)


class AwayError(RunError):
    """The fleet, or its database, does not answer."""

    code = "away"

    def __init__(self, message: str, *, temporary: bool = True) -> None:
        """`temporary`: it may answer later without any change to the request."""
        super().__init__(message)
        self.temporary = temporary


class RequestRetries:
    """How long to keep asking one fleet while following, waiting, submitting or fetching."""

    def __init__(
        self,
        seconds: float = RETRY_SECONDS,
        *,
        tell: Callable[[str], None] = log.warning,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`tell`: called when the fleet stops answering, and when it answers again; by default these messages are logged as warnings."""
        self.seconds = seconds
        self._tell, self._sleep, self._clock = tell, sleep, clock

    def ask(self, request: Callable[[], T]) -> T:
        """Repeat a safe request until it is answered. When the time is over, its last error is raised."""
        outage = self.outage()
        while True:
            try:
                answer = request()
            except GroupwiseError as error:
                outage.pause_or_raise(error)
            else:
                outage.end()
                return answer

    def outage(self) -> Outage:
        """Track a period without an answer, for callers that do not use `ask`."""
        backoff = Backoff(PAUSE, PAUSE, low=1.0)
        return Outage(
            self.seconds, Retry(self.seconds, backoff, self._clock), self._tell, self._sleep
        )


class Outage:
    """A period without an answer."""

    def __init__(
        self,
        seconds: float,
        retry: Retry,
        tell: Callable[[str], None],
        sleep: Callable[[float], None],
    ) -> None:
        self._seconds, self._retry = seconds, retry
        self._tell, self._sleep = tell, sleep
        self._is_reported = False

    def pause_or_raise(self, error: GroupwiseError) -> None:
        """Pause before the next request. Raises the error if another try would not help, or the time for retries is over."""
        if not is_temporary(error):
            raise error
        pause = self._retry.next(error)
        if not self._is_reported:
            self._is_reported = True
            self._tell(
                f"the fleet does not answer, and is asked on for {self._seconds / 60:g} minutes: {error.message}"
            )
        self._sleep(pause)

    def end(self) -> None:
        """Note that the fleet has answered."""
        self._retry.renew()
        if self._is_reported:
            self._is_reported = False
            self._tell("the fleet answers again")


def is_temporary(error: GroupwiseError) -> bool:
    """True if the same request may be answered later."""
    if isinstance(error, Refusal):
        return error.code in TEMPORARY_REFUSALS
    return isinstance(error, AwayError) and error.temporary
