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
from groupwise.core.retry import Backoff, ReportedRetry, Retry

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
        retry = self.retry()
        while True:
            try:
                answer = request()
            except GroupwiseError as error:
                self.pause_or_raise(retry, error)
            else:
                retry.end()
                return answer

    def retry(self) -> ReportedRetry:
        """Retries of one request, for callers that do not use `ask`."""
        return ReportedRetry(
            Retry(self.seconds, Backoff(PAUSE, PAUSE, low=1.0), self._clock),
            self._tell,
            lambda error: (
                f"the fleet does not answer, and is asked on for {self.seconds / 60:g} minutes: {error}"
            ),
            "the fleet answers again",
        )

    def pause_or_raise(self, retry: ReportedRetry, error: GroupwiseError) -> None:
        """Pause before the next request. Raises the error if another try would not help, or the time for retries is over."""
        if not is_temporary(error):
            raise error
        self._sleep(retry.pause(error))


def is_temporary(error: GroupwiseError) -> bool:
    """True if the same request may be answered later."""
    if isinstance(error, Refusal):
        return error.code in TEMPORARY_REFUSALS
    return isinstance(error, AwayError) and error.temporary
