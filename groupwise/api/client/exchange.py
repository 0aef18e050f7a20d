"""Turns one call into an answer: decides what to send, which responses are answers, and when to retry. Does no I/O.

`exchange` is a generator that says what to do next (`Send` a request, `Sleep`) and receives the result; a client, synchronous or not,
does as it says. Every attempt of a call carries the same idempotency key, so that it does not matter which of them arrived. Retried are
failures that may pass: a lost connection, a time-out, the problems that the table calls so, and the statuses by which proxies say the
same. The wait is chosen by chance between nothing and a bound that doubles (full jitter); if the server names a time, it begins after
that. A server that does not answer is logged as a warning, once, and once more when it answers again: patience lasts for many minutes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import ssl
import time
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar
from urllib.parse import urlsplit

import httpx2
from pydantic import ValidationError

from groupwise.api.client.errors import ClientError, NoAnswer, StrangeAnswer, Unavailable, refused
from groupwise.api.openai_client.waiting import retry_after
from groupwise.api.schemas.idempotency import HEADER, new_idempotency_key
from groupwise.api.schemas.keys import VARIABLE
from groupwise.api.schemas.problems import KINDS, Problem
from groupwise.core.errors import UsageError
from groupwise.core.plugins import printable

log = logging.getLogger(__name__)

T = TypeVar("T")

URL_VARIABLE = "GROUPWISE_URL"
DEFAULT_URL = "http://127.0.0.1:8000"
RETRY_TIMEOUT = 900.0
"""Seconds from the first attempt of a call to the last one's end."""
TIMEOUT = 300.0
"""Seconds without a byte after which an attempt counts as lost. Long, because a slow machine samples for minutes."""
CONNECT_TIMEOUT = 10.0
FIRST, LONGEST = 0.5, 30.0
"""Seconds: bound of the wait before the second attempt, and what doubling ends at."""
MAX_CHARACTERS_IN_MESSAGE = 300
"""Characters of a strange answer that a message shows."""
MAY_PASS = frozenset({408, 425, 429, 502, 503, 504})
"""Statuses of answers that are no problem of ours, which a proxy gives and which may pass."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Clocks, sleep and chance. Tests give their own and need not wait."""

    clock: Callable[[], float] = time.monotonic
    today: Callable[[], float] = time.time
    """Seconds since 1970, for a `Retry-After` that is a date."""
    sleep: Callable[[float], None] = time.sleep
    sleep_async: Callable[[float], Awaitable[None]] = asyncio.sleep
    chance: Callable[[], float] = random.random
    """Uniform in [0, 1)."""


@dataclass(slots=True)
class Outage:
    """Tracks whether a server failure has been reported. Shared by all calls of a client, as they fail together."""

    told: bool = False
    tell: Callable[[str], None] = log.warning

    @contextmanager
    def told_to(self, tell: Callable[[str], None]) -> Generator[None]:
        """Report to `tell` instead while this is open."""
        before, self.tell = self.tell, tell
        try:
            yield
        finally:
            self.tell = before

    def begins(self, error: ClientError, seconds: float) -> None:
        """A call failed, and is tried again for so many seconds."""
        if not self.told and isinstance(error, NoAnswer | StrangeAnswer | Unavailable):
            self.told = True
            self.tell(f"{error} Trying again for up to {seconds:.0f} seconds.")

    def ends(self, url: str) -> None:
        """A call was answered."""
        if self.told:
            self.told = False
            self.tell(f"{url} answers again.")


@dataclass(frozen=True, slots=True)
class Connection:
    """The server's address, the key, and the time limits."""

    url: str
    key: str | None = field(default=None, repr=False)
    patience: float = RETRY_TIMEOUT
    timeout: float = TIMEOUT
    timing: Timing = field(default_factory=Timing, repr=False)
    outage: Outage = field(default_factory=Outage, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        url: str | None,
        key: str | None,
        patience: float,
        timeout: float,
        timing: Timing | None,
    ) -> Connection:
        """Fill in arguments that are None from the environment. Raises UsageError, which never contains a key."""
        return cls(
            _checked_url(url or os.environ.get(URL_VARIABLE) or DEFAULT_URL),
            _checked_key(key or os.environ.get(VARIABLE)),
            patience,
            timeout,
            timing or Timing(),
        )

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def limits(self, waits: float = 0.0) -> httpx2.Timeout:
        """Time limits of one attempt whose answer the server may keep back for `waits` seconds."""
        return httpx2.Timeout(
            self.timeout + waits, connect=min(CONNECT_TIMEOUT, self.timeout), pool=None
        )


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A request, and how its answer is read."""

    method: str
    path: str
    read: Callable[[httpx2.Response], T]
    """Raises ValidationError or ValueError for what is no answer."""
    body: bytes | None = None
    query: Mapping[str, str] = field(default_factory=dict[str, str])
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    waits: float = 0.0
    """Seconds for which the server may keep the answer back on purpose."""


@dataclass(frozen=True, slots=True)
class Send:
    """Make this attempt; the generator is sent the response, or the error that came in its place."""

    method: str
    path: str
    headers: Mapping[str, str]
    query: Mapping[str, str]
    body: bytes | None
    timeout: httpx2.Timeout


@dataclass(frozen=True, slots=True)
class Sleep:
    """Wait so many seconds; the generator is sent None."""

    seconds: float


Reply = httpx2.Response | httpx2.RequestError | None
Exchange = Generator[Send | Sleep, Reply, T]


def exchange(call: Call[T], connection: Connection) -> Exchange[T]:
    """The answer to a call. Raises ClientError."""
    patience = Patience(connection)
    headers = dict(call.headers)
    if call.method != "GET":
        headers[HEADER] = new_idempotency_key()
    if call.body is not None:
        headers.setdefault("Content-Type", "application/json")
    send = Send(
        call.method,
        call.path,
        headers,
        call.query,
        call.body,
        connection.limits(call.waits),
    )
    while True:
        reply = yield send
        assert reply is not None
        if isinstance(reply, httpx2.Response) and reply.is_success:
            connection.outage.ends(connection.url)
            return _read(call, reply)
        error, may_pass = _failure(reply, connection)
        if not may_pass:
            raise error
        wait = patience.wait(error)
        connection.outage.begins(error, patience.left)
        yield Sleep(wait)


async def driven(
    steps: Exchange[T],
    attempt: Callable[[Send], Awaitable[httpx2.Response | httpx2.RequestError]],
    sleep: Callable[[float], Awaitable[None]],
) -> T:
    """Do what an exchange says, until it has the answer; for callers that send from coroutines."""
    todo = next(steps)
    while True:
        reply = None
        if isinstance(todo, Send):
            reply = await attempt(todo)
        else:
            await sleep(todo.seconds)
        try:
            todo = steps.send(reply)
        except StopIteration as end:
            return end.value


class Patience:
    """Time left for retries, and the waits in between."""

    def __init__(self, connection: Connection) -> None:
        self._seconds = connection.patience
        self._timing = connection.timing
        self.renew()

    def renew(self) -> None:
        """Something was achieved: from the beginning."""
        self._began = self._timing.clock()
        self._failures = 0

    @property
    def left(self) -> float:
        """Seconds in which another attempt may begin."""
        return self._seconds - (self._timing.clock() - self._began)

    def wait(self, error: ClientError) -> float:
        """Seconds until the next attempt; raises the error if they would end beyond the patience."""
        bound = min(LONGEST, FIRST * 2.0 ** min(self._failures, 30))
        self._failures += 1
        wait = (error.retry_after or 0.0) + bound * self._timing.chance()
        if wait > self.left:
            raise error
        return wait


def lost(error: httpx2.RequestError, connection: Connection) -> NoAnswer:
    """Convert a network failure to the caller's error."""
    if (refused := _not_trusted(error)) is not None:
        return NoAnswer(
            f"{connection.url} shows a certificate that is not trusted here ({refused.verify_message}). Where an authority of your own has "
            "signed it, set SSL_CERT_FILE to the file with that authority's certificate; where it is for another name, use that name "
            "in the URL."
        )
    kind = type(error).__name__
    return NoAnswer(
        f"{connection.url} does not answer ({kind}{f': {error}' if str(error) else ''}). Look whether the server runs there; "
        f"`url` or the variable {URL_VARIABLE} says where it is."
    )


def _not_trusted(error: BaseException | None) -> ssl.SSLCertVerificationError | None:
    """Why the server's certificate was refused, if that is what went wrong."""
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return error


def ended(connection: Connection) -> NoAnswer:
    """The caller's error for an endless stream that has ended."""
    return NoAnswer(f"{connection.url} ends the event stream again and again.")


def strange(response: httpx2.Response, why: str) -> StrangeAnswer:
    """The caller's error for an answer that is not of this protocol."""
    text = " ".join(printable(response.content.decode("utf-8", "replace")).split())
    shown = (
        text
        if len(text) <= MAX_CHARACTERS_IN_MESSAGE
        else f"{text[:MAX_CHARACTERS_IN_MESSAGE]}… ({len(response.content)} bytes)"
    )
    return StrangeAnswer(
        f"{response.request.method} {response.request.url.path} was answered with {response.status_code} and what is {why}: "
        f"{shown or 'an empty body'}. Look whether the URL is that of a training server, and whether a proxy stands before it.",
        status=response.status_code,
    )


def _read(call: Call[T], response: httpx2.Response) -> T:
    try:
        return call.read(response)
    except (ValidationError, ValueError):
        raise strange(response, "no answer of this protocol") from None


def _failure(
    reply: httpx2.Response | httpx2.RequestError, connection: Connection
) -> tuple[ClientError, bool]:
    """The error, and whether asking again may help."""
    if isinstance(reply, httpx2.RequestError):
        return lost(reply, connection), _not_trusted(reply) is None
    told = retry_after(reply.headers.get("Retry-After"), connection.timing.today())
    try:
        problem = Problem.model_validate_json(reply.content)
    except ValidationError:
        error = strange(reply, "no problem of this protocol")
        return error, reply.status_code in MAY_PASS
    if told is not None:
        problem = problem.model_copy(update={"retry_after": told})
    kind = KINDS.get(problem.code)
    may_pass = kind.retry if kind else problem.status in MAY_PASS
    return refused(problem), may_pass


def _checked_url(given: str) -> str:
    parts = urlsplit(given.strip())
    if "@" in parts.netloc:
        raise UsageError(
            f"The URL of {parts.hostname} holds a user name or password. Leave them out; the key comes from {VARIABLE}."
        )
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise UsageError(
            f"{given!r:.200} is no URL of a server. Give something like {DEFAULT_URL}."
        )
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"


def _checked_key(given: str | None) -> str | None:
    key = (given or "").strip()
    if not all("!" <= letter <= "~" for letter in key):
        raise UsageError(
            f"The key has spaces, line ends or characters beyond ASCII in it. Give the key alone, or set {VARIABLE} to it."
        )
    return key or None
