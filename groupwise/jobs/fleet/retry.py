"""Retries against a fleet that does not answer, so that a restart of its API or database does not end the following of a job after hours.

A single question has its own few tries, and fails within seconds, since a person waits for it. Following, waiting, submitting and
transferring files are retried for minutes, because nothing is lost by that: the request may be repeated, and says where it goes on. One
message says that the fleet is away, and one that it is back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from groupwise.api.schemas.problems import Refusal
from groupwise.core.errors import GroupwiseError, RunError

T = TypeVar("T")
ASK_ON = 600.0
"""Seconds of retries against a fleet that does not answer."""
PAUSE = 1.0
"""Seconds between two retries; each question has further tries with pauses of its own."""
PASSING = frozenset({"database_away", "shutting_down", "in_progress", "timed_out"})
"""Refusals by which an API says that it can answer later."""
log = logging.getLogger(__name__)


class AwayError(RunError):
    """The fleet, or its database, does not answer."""

    code = "away"

    def __init__(self, message: str, *, passing: bool = True) -> None:
        """`passing`: it may answer later without anybody changing what was asked, or how."""
        super().__init__(message)
        self.passing = passing


class Patience:
    """How long to keep asking one fleet while following, waiting, submitting or fetching."""

    def __init__(
        self,
        seconds: float = ASK_ON,
        *,
        tell: Callable[[str], None] = log.warning,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`tell`: called when the fleet is away, and when it is back; without it a warning is logged."""
        self.seconds = seconds
        self._tell, self._sleep, self._clock = tell, sleep, clock

    def ask(self, question: Callable[[], T]) -> T:
        """Ask a repeatable question until it is answered. At the end of patience its last error is raised."""
        silence = self.silence()
        while True:
            try:
                answer = question()
            except GroupwiseError as error:
                silence.goes_on(error)
            else:
                silence.is_over()
                return answer

    def silence(self) -> Silence:
        """The tracker of one silence, for callers that do not use `ask`."""
        return Silence(self.seconds, self._tell, self._sleep, self._clock)


class Silence:
    """A time without an answer."""

    def __init__(
        self,
        seconds: float,
        tell: Callable[[str], None],
        sleep: Callable[[float], None],
        clock: Callable[[], float],
    ) -> None:
        self._seconds = seconds
        self._tell, self._sleep, self._clock = tell, sleep, clock
        self._since: float | None = None

    def goes_on(self, error: GroupwiseError) -> None:
        """Pause before the next question. Raises the error where another would not help, or has been tried for long enough."""
        now = self._clock()
        since = now if self._since is None else self._since
        if not is_passing(error) or now - since >= self._seconds:
            raise error
        if self._since is None:
            self._since = now
            self._tell(
                f"the fleet does not answer, and is asked on for {self._seconds / 60:g} minutes: {error.message}"
            )
        self._sleep(PAUSE)

    def is_over(self) -> None:
        """It has answered."""
        if self._since is not None:
            self._since = None
            self._tell("the fleet answers again")


def is_passing(error: GroupwiseError) -> bool:
    """True if the same question may be answered later."""
    if isinstance(error, Refusal):
        return error.code in PASSING
    return isinstance(error, AwayError) and error.passing
