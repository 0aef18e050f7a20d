"""Common to every call to the training server: address, key and time limits; which failures may pass, and when to retry. Does no I/O.

Failures that may pass are retried: a lost connection, a time-out, the problems that `KINDS` marks with `retry`, and the equivalent statuses
of proxies. The wait is random between zero and a bound that doubles (full jitter); if the server gives a time (`Retry-After`), that is
added. If nothing listens at the address, there is no server: a call gives up sooner then. An outage is logged as one warning, and its end
as another: retries may last many minutes.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx2
from pydantic import BaseModel, ValidationError

from groupwise.api.client.errors import (
    ClientError,
    NoAnswer,
    NoServer,
    StrangeAnswer,
    Unavailable,
    refused_error,
)
from groupwise.api.http.failures import MAY_PASS, certificate_problem, find_cause, problem_in
from groupwise.api.openai_client.response_parsing import excerpt
from groupwise.api.schemas.keys import VARIABLE
from groupwise.api.schemas.problems import KINDS
from groupwise.core.errors import UsageError
from groupwise.core.retry import Backoff, Outage, Retry, Timing

log = logging.getLogger(__name__)

A = TypeVar("A", bound=BaseModel)

URL_VARIABLE = "GROUPWISE_URL"
DEFAULT_URL = "http://127.0.0.1:8000"
RETRY_TIMEOUT = 900.0
"""Seconds during which a call is retried, counted from its first attempt."""
NO_SERVER_TIMEOUT = 120.0
"""The same while connections are refused, since the first of these refusals: a server that is started again listens within seconds. A
`retry_timeout` that the caller has chosen holds for them too.
"""
TIMEOUT = 300.0
"""Seconds without a byte after which an attempt counts as lost. Long, because a slow machine samples for minutes."""
CONNECT_TIMEOUT = 10.0
LIMITS = httpx2.Limits(max_connections=None, max_keepalive_connections=32)
"""No limit on connections: some calls wait for minutes, and others must still be sent."""
LOADING_REPORTED = 10.0
"""Seconds of waiting for a started run before a warning says so: the server may load its model for minutes."""
FIRST, LONGEST = 0.5, 30.0
"""Bounds of the wait, in seconds: before the second attempt, and the largest one after doubling."""


@dataclass(frozen=True, slots=True)
class Connection:
    """The server's address, the key, and the time limits."""

    url: str
    key: str | None = field(default=None, repr=False)
    retry_timeout: float = RETRY_TIMEOUT
    timeout: float = TIMEOUT
    timing: Timing = field(default_factory=Timing, repr=False)
    outage: Outage = field(default_factory=lambda: Outage(log.warning), repr=False, compare=False)
    """Shared by all calls of a client, because they fail together."""

    @classmethod
    def of(
        cls,
        url: str | None,
        key: str | None,
        retry_timeout: float,
        timeout: float,
        timing: Timing | None,
    ) -> Connection:
        """Fill in arguments that are None from the environment. Raises UsageError, which never contains a key."""
        url = (url or os.environ.get(URL_VARIABLE) or DEFAULT_URL).strip()
        parts = urlsplit(url)
        if "@" in parts.netloc:
            raise UsageError(
                f"The URL of {parts.hostname} holds a user name or password. Leave them out; the key comes from {VARIABLE}."
            )
        is_server = parts.scheme in ("http", "https") and parts.hostname
        if not is_server or parts.query or parts.fragment:
            raise UsageError(
                f"{url!r:.200} is not a URL of a server. Give something like {DEFAULT_URL}."
            )
        key = (key or os.environ.get(VARIABLE) or "").strip()
        if not all("!" <= letter <= "~" for letter in key):
            raise UsageError(
                f"The key has spaces, line ends or characters beyond ASCII in it. Give the key alone, or set {VARIABLE} to it."
            )
        return cls(
            f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}",
            key or None,
            retry_timeout,
            timeout,
            timing or Timing(),
        )

    @property
    def no_server_timeout(self) -> float:
        """Seconds during which refused connections are retried."""
        return NO_SERVER_TIMEOUT if self.retry_timeout == RETRY_TIMEOUT else self.retry_timeout

    def report_failure(self, error: ClientError, seconds: float) -> None:
        """Report that a call failed and will be retried for up to `seconds`, unless the server itself refused it."""
        if isinstance(error, NoAnswer | StrangeAnswer | Unavailable):
            # Once nothing listens, the time is shorter than a lost connection's, so that it is said again.
            kind = "no server" if isinstance(error, NoServer) else ""
            self.outage.begin(f"{error} Trying again for up to {seconds:.0f} seconds.", kind)

    def report_answer(self) -> None:
        """Report that the server answers again, if an outage was reported."""
        self.outage.end(f"{self.url} answers again.")

    @contextmanager
    def reporting_start(self, settings: Mapping[str, Any]) -> Generator[None]:
        """Report, once that takes long, that the start of a run with these settings is waited for."""
        model = settings.get("model_id", "the model")
        message = f"Waiting for {self.url} to load {model}; this may take minutes."
        timer = threading.Timer(LOADING_REPORTED, log.warning, (message,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def retry(self, seconds: float | None = None) -> Retry:
        """The attempts of one call, for `retry_timeout` or so many seconds. All pauses but a `Retry-After` may be short (full jitter)."""
        backoff = Backoff(FIRST, LONGEST, self.timing.jitter, low=0.0)
        seconds = self.retry_timeout if seconds is None else seconds
        return _CallRetry(seconds, backoff, self.timing.clock, self.no_server_timeout)

    @property
    def http_options(self) -> dict[str, Any]:
        """Arguments of the httpx2 client, except for its transport."""
        return {
            "base_url": self.url,
            "headers": {"Authorization": f"Bearer {self.key}"} if self.key else {},
            "limits": LIMITS,
        }


class _CallRetry(Retry):
    """Gives up sooner while nothing listens at the address."""

    def __init__(
        self,
        seconds: float,
        backoff: Backoff,
        clock: Callable[[], float],
        no_server_timeout: float,
    ) -> None:
        super().__init__(seconds, backoff, clock)
        self._no_server_timeout = no_server_timeout
        self._refused_since: float | None = None

    @property
    def left(self) -> float:
        """See `Retry.left`."""
        if self._refused_since is None:
            return super().left
        return min(super().left, self._no_server_timeout - (self._clock() - self._refused_since))

    def next(self, error: Exception, least: float = 0.0) -> float:
        """See `Retry.next`."""
        if not isinstance(error, NoServer):
            self._refused_since = None
        elif self._refused_since is None:
            self._refused_since = self._clock()
        return super().next(error, least)


def network_failure(error: httpx2.RequestError, connection: Connection) -> tuple[NoAnswer, bool]:
    """The caller's error for a lost request or response, and whether a retry may help."""
    if untrusted := certificate_problem(connection.url, error):
        return NoAnswer(untrusted), False
    where = f"`url` or the variable {URL_VARIABLE} says where it is."
    if find_cause(error, ConnectionRefusedError):
        return NoServer(
            f"Nothing listens at {connection.url} (connection refused): the server is still starting, has ended, or runs elsewhere; "
            f"{where} If it has ended, start it again with the same output_dir, within {connection.no_server_timeout:.0f} seconds."
        ), True
    kind = type(error).__name__
    return NoAnswer(
        f"{connection.url} does not answer ({kind}{f': {error}' if str(error) else ''}). Look whether the server runs there; {where}"
    ), True


def refusal(response: httpx2.Response, connection: Connection) -> tuple[ClientError, bool]:
    """The caller's error for an unsuccessful response, and whether a retry may help."""
    problem = problem_in(response, connection.timing.today())
    if problem is None:
        error = strange(response, "no problem of this protocol")
        return error, response.status_code in MAY_PASS
    kind = KINDS.get(problem.code)
    return refused_error(problem), kind.retry if kind else problem.status in MAY_PASS


def stream_end_error(connection: Connection) -> NoAnswer:
    """The caller's error for an event stream that ended; it should never end."""
    return NoAnswer(f"{connection.url} ends the event stream again and again.")


def read_answer(kind: type[A], response: httpx2.Response) -> A:
    """The response body as a model. Raises StrangeAnswer."""
    try:
        return kind.model_validate_json(response.content)
    except ValidationError:
        raise strange(response, "no answer of this protocol") from None


def strange(response: httpx2.Response, problem: str) -> StrangeAnswer:
    """The caller's error for a response that is not of this protocol."""
    return StrangeAnswer(
        f"{response.request.method} {response.request.url.path} was answered with {response.status_code} and what is {problem}: "
        f"{excerpt(response.content)}. Look whether the URL is that of a training server, and whether there is a proxy in between.",
        status=response.status_code,
    )
