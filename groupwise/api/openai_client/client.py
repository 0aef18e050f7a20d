"""The client for OpenAI-compatible services.

    endpoint = Endpoint("http://127.0.0.1:8000/v1", "my-model")
    async with Client(endpoint, concurrency=16) as client:
        answer = await client.chat([{"role": "user", "content": "Two and two?"}], n=4, temperature=1.0)

Any number of calls may be made at once: `concurrency` of them are in flight, the others wait. Failures that may pass (no connection,
a time-out, 408, 409, 425, 429, 5xx) are retried `retries` times; `waiting.py` decides when. Every other failure, and one that
persists, is an EndpointError that shows the response.

The key is read from the environment variable that the endpoint names. It appears nowhere else: not in the endpoint, in a
message or in a log, even if the service repeats it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx2

from groupwise.api.openai_client.bounded_responses import ResponseTooLarge, read_response_async
from groupwise.api.openai_client.response_parsing import (
    Choices,
    error_in,
    holds_error,
    read_answer,
    read_models,
)
from groupwise.api.openai_client.waiting import (
    MAX_RETRY_AFTER,
    OVERLOAD_STATUSES,
    Pause,
    backoff,
    is_retryable,
    retry_after,
)
from groupwise.core.errors import EndpointError, UsageError
from groupwise.core.loopback import async_direct_transport
from groupwise.core.retry import Timing
from groupwise.core.types import Message

logger = logging.getLogger(__name__)

CONNECT_LIMIT = 30.0
"""Limit for connecting, in seconds; the rest of a request's time belongs to the service."""
MAX_RESPONSE = 64 << 20
"""Bytes of a response that are read, unpacked: more than a hundred completions of the longest kind."""
QUOTA_CODES = frozenset({"insufficient_quota"})
"""Codes of a 429 for which no retry helps."""
REFUSALS_OF_N = frozenset({400, 422})
"""Statuses with which services that return only one choice refuse a larger `n`."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A service and the model to use there. Raises UsageError for an invalid URL."""

    base_url: str
    """URL before /chat/completions, such as `http://127.0.0.1:8000/v1`; if it has no path, /v1 is added."""
    model: str
    api_key_env: str = "OPENAI_API_KEY"
    """The environment variable with the key; if it is not set, requests have no key."""
    timeout: float = 900.0
    """Seconds for one attempt, from the request to the last byte of its response."""
    retries: int = 8
    """How often a request is retried before the error is raised."""
    socket: str | None = None
    """File of the Unix socket at which a service of this machine listens; None: it listens at the URL's address."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "base_url", checked_url(self.base_url))

    def key(self) -> str | None:
        """The key, or None if the variable is not set. Raises UsageError if it contains characters that no header can hold."""
        key = os.environ.get(self.api_key_env, "").strip()
        if not all("!" <= letter <= "~" for letter in key):
            raise UsageError(
                f"The environment variable {self.api_key_env} holds something that is not a key: it has spaces, line ends or "
                "characters beyond ASCII in it. Set it to the key alone."
            )
        return key or None


class Client:
    """Calls an endpoint. Use it as an asynchronous context manager."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        concurrency: int = 16,
        timing: Timing | None = None,
        transport: httpx2.AsyncBaseTransport | None = None,
        keep_connections: bool = True,
    ) -> None:
        """Runs at most `concurrency` requests at once. `transport` replaces the network.

        Without `keep_connections` each request opens a new connection, so it never uses one that the service has closed meanwhile.
        """
        self.endpoint = endpoint
        self._key = endpoint.key()
        self._timing = timing or Timing()
        self._pause = Pause(self._timing)
        self._slots = asyncio.Semaphore(concurrency)
        self._one_at_a_time = False
        limits = httpx2.Limits(
            max_connections=concurrency,
            max_keepalive_connections=concurrency if keep_connections else 0,
        )
        self._http = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            timeout=httpx2.Timeout(endpoint.timeout, connect=min(CONNECT_LIMIT, endpoint.timeout)),
            limits=limits,
            transport=transport
            or async_direct_transport(endpoint.base_url, limits=limits, uds=endpoint.socket),
        )

    async def __aenter__(self) -> Client:
        await self._http.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.__aexit__(kind, error, trace)

    @property
    def pause(self) -> float:
        """Seconds until the pause that the service asked for is over."""
        return self._pause.left

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        n: int = 1,
        temperature: float | None = None,
        top_p: float | None = None,
        max_tokens: int | None = None,
        seed: int | None = None,
        stop: Sequence[str] | None = None,
        extra: Mapping[str, Any] | None = None,
        or_fewer: bool = False,
    ) -> Choices:
        """`n` completions of a conversation. Arguments that are None are left to the service.

        `extra` holds further fields of the request; None as a value removes a field. If a service returns fewer choices than
        requested, the rest is requested again, with the seed increased by the number received; `or_fewer` accepts fewer.
        """
        body = {"model": self.endpoint.model, "messages": [dict(message) for message in messages]}
        knobs = _sampling_fields(temperature, top_p, max_tokens, stop)
        return await self._request_all(
            "/chat/completions", body | knobs, n, seed, extra or {}, or_fewer
        )

    async def complete(
        self,
        prompt: str,
        *,
        n: int = 1,
        temperature: float | None = None,
        top_p: float | None = None,
        max_tokens: int | None = None,
        seed: int | None = None,
        stop: Sequence[str] | None = None,
        extra: Mapping[str, Any] | None = None,
        or_fewer: bool = False,
    ) -> Choices:
        """`n` continuations of a text, without a chat template; everything else as in `chat`."""
        body = {"model": self.endpoint.model, "prompt": prompt}
        knobs = _sampling_fields(temperature, top_p, max_tokens, stop)
        return await self._request_all("/completions", body | knobs, n, seed, extra or {}, or_fewer)

    async def models(self, *, retries: int | None = None) -> tuple[str, ...]:
        """The names of the served models; `retries` replaces the endpoint's number."""
        return await self.ask("GET", "/models", None, read_models, retries)

    async def reach(self) -> None:
        """Raises EndpointError if there is no response, or the key is refused. A service need not list its models."""
        try:
            await self.ask("GET", "/models", None, len, 0)
        except EndpointError as error:
            if error.status in (None, 401, 403):
                raise

    async def _request_all(
        self,
        path: str,
        body: Mapping[str, Any],
        n: int,
        seed: int | None,
        extra: Mapping[str, Any],
        or_fewer: bool,
    ) -> Choices:
        answer = await self._request_choices(path, body, n, seed, extra)
        while len(answer.texts) < n and not or_fewer:
            received = len(answer.texts)
            next_seed = None if seed is None else seed + received
            answer += await self._request_choices(path, body, n - received, next_seed, extra)
        return answer.first(n)

    async def _request_choices(
        self,
        path: str,
        body: Mapping[str, Any],
        n: int,
        seed: int | None,
        extra: Mapping[str, Any],
    ) -> Choices:
        """Request up to `n` choices, and return at least one; exactly one if the service refuses to return several."""
        n = 1 if self._one_at_a_time else n
        count_fields: dict[str, Any] = {} if n == 1 else {"n": n}
        seed_fields: dict[str, Any] = {} if seed is None else {"seed": seed}
        body_sent = {**body, **count_fields, **seed_fields, **extra}
        body_sent = {name: value for name, value in body_sent.items() if value is not None}
        try:
            return await self.ask(
                "POST", path, body_sent, lambda body: read_answer(body, self.endpoint.model)
            )
        except EndpointError as refused:
            if n == 1 or refused.status not in REFUSALS_OF_N:
                raise
            answer = await self._request_choices(path, body, 1, seed, extra)
            # A request for one choice succeeded, so `n` was the reason for the refusal.
            self._one_at_a_time = True
            return answer

    async def ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        read: Callable[[bytes], T],
        retries: int | None = None,
    ) -> T:
        """Send a request and return `read` of the response body. Failures that may pass are retried, `retries` times if given.

        For routes that have no method of their own; `path` is one below the base URL, or a whole URL. `read` raises EndpointError for a
        body that it cannot use.
        """
        url = path if "://" in path else self.endpoint.base_url + path
        limit = self.endpoint.retries if retries is None else retries
        waits = backoff(self._timing)
        for attempt in range(limit + 1):
            try:
                async with self._slots:
                    await self._pause.over()
                    answer = await self._send_once(method, url, body)
            except _TransientFailure as failure:
                if attempt == limit:
                    times_text = "" if limit == 0 else f" ({limit + 1} times)"
                    error = self._endpoint_error(
                        method, url, f"{failure}{times_text}", failure.status
                    )
                    error.is_retryable = True
                    raise error from failure.__cause__
                wait = failure.retry_after or waits.next()
                if failure.status not in OVERLOAD_STATUSES:
                    await self._timing.sleep(wait)
                elif self._pause.extend(wait):
                    logger.info(
                        "%s answers %s: no request goes there for %.1f s",
                        *(self.endpoint.base_url, failure.status, wait),
                    )
            else:
                try:
                    return read(answer)
                except EndpointError as error:
                    raise self._endpoint_error(method, url, str(error), None) from None
        raise AssertionError("a request is answered, repeated or given up")

    async def _send_once(self, method: str, url: str, body: Mapping[str, Any] | None) -> bytes:
        """The body of one response. Raises _TransientFailure if another attempt may succeed, else EndpointError."""
        content = None if body is None else json.dumps(body).encode()
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            async with asyncio.timeout(self.endpoint.timeout):
                request = self._http.build_request(method, url, content=content, headers=headers)
                streamed = await self._http.send(request, stream=True)
                answer = await read_response_async(streamed, MAX_RESPONSE)
        except ResponseTooLarge as error:
            raise self._endpoint_error(method, url, str(error), None) from None
        except (TimeoutError, httpx2.TimeoutException) as error:
            raise _TransientFailure(f"no answer in {self.endpoint.timeout:g} s") from error
        except httpx2.TransportError as error:
            raise _TransientFailure(f"{type(error).__name__}: {error}") from error
        except httpx2.HTTPError as error:
            raise self._endpoint_error(
                method, url, f"{type(error).__name__}: {error}", None
            ) from error
        status = answer.status_code
        if status == 200 and not holds_error(answer.content):
            return answer.content
        text, code, status_in_body = error_in(answer.content)
        if status == 200:
            status = status_in_body or status
        if "Location" in answer.headers:
            text = f"it has moved to {answer.headers['Location']}; change the base URL"
        if is_retryable(status) and code not in QUOTA_CODES:
            seconds = retry_after(answer.headers.get("Retry-After"), self._timing.today())
            if seconds is None or seconds <= MAX_RETRY_AFTER:
                raise _TransientFailure(f"status {status}: {text}", status, seconds)
            text = f"{text} (it asks to be called again in {seconds:,.0f} s, which is too long to wait)"
        raise self._endpoint_error(method, url, f"status {status}: {text}", status)

    def _endpoint_error(
        self, method: str, url: str, problem: str, status: int | None
    ) -> EndpointError:
        message = f"{method} {url}: {problem}"
        if status in (401, 403):
            key_problem = "holds a key that is refused" if self._key else "is not set"
            message += f"\nThe environment variable {self.endpoint.api_key_env} {key_problem}."
        return EndpointError(message.replace(self._key, "…") if self._key else message, status)


class _TransientFailure(Exception):
    """A failure that another attempt may avoid."""

    def __init__(
        self, what: str, status: int | None = None, retry_after: float | None = None
    ) -> None:
        """`retry_after`: seconds after which the service asks for a retry."""
        super().__init__(what)
        self.status = status
        self.retry_after = retry_after


def checked_url(url: str) -> str:
    """A base URL in the form to which paths are appended. Raises UsageError, whose text never contains a password."""
    parts = urlsplit(url.strip())
    if "@" in parts.netloc:
        raise UsageError(
            f"The base URL of {parts.hostname} holds a user name or password. Keys come only from the environment: leave "
            "them out of the URL, and set the variable."
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(
            f"{url!r} is not a base URL. Give something like http://127.0.0.1:8000/v1."
        )
    if parts.query or parts.fragment:
        raise UsageError(
            f"The base URL of {parts.hostname} has something behind its path (? or #). Give what comes before "
            "/chat/completions alone; a key belongs into the environment."
        )
    path = parts.path.rstrip("/").removesuffix("/chat/completions").removesuffix("/completions")
    return f"{parts.scheme}://{parts.netloc}{path or '/v1'}"


def _sampling_fields(
    temperature: float | None,
    top_p: float | None,
    max_tokens: int | None,
    stop: Sequence[str] | None,
) -> dict[str, Any]:
    return {
        "temperature": temperature,
        "top_p": top_p,
        "max_tokens": max_tokens,
        "stop": list(stop) if stop else None,
    }
