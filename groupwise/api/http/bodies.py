"""Reads request bodies within a limit of bytes and of time, and only as long as the server accepts work.

A body may be compressed (`Content-Encoding: gzip`). The limit then counts both as it comes and unpacked, and unpacking stops there, so that
a small body cannot fill the memory.

The server calls `give_up` when it shuts down: a client that sends one byte a minute cannot delay the
shutdown.

Large bodies are parsed and validated one after the other in one thread (`read_body`), so small requests compete for the interpreter with
that thread alone, however many large bodies arrive. `short_thread_switches` keeps such waits short.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import sys
import zlib
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TypeVar

from starlette.types import Receive

from groupwise.api.schemas.problems import Refusal

BODY_SECONDS = 120.0
"""Seconds in which a body must arrive; slower requests are refused."""
SHUTTING_DOWN_RETRY = 5.0
"""`Retry-After` of a server that is shutting down: seconds after which another server, or the same one again, may answer."""


GZIP = 16
"""Added to zlib's window bits: the data has the header of gzip."""
LARGE = 256 * 1024
"""Bytes of a body above which it is parsed and validated in the thread of large bodies."""
VERY_LARGE = 4 << 20
"""Bytes of a body above which the memory used to read it is returned to the system."""
SWITCH_SECONDS = 0.0005
"""Seconds for which a thread computes while another one waits for the interpreter. A small request takes the interpreter dozens of times,
and waits that long each time if a large body is being parsed; Python's default of 5 ms would add up to a quarter of a second.
"""

T = TypeVar("T")
_body_thread = ThreadPoolExecutor(1, "large bodies")


class ClientGone(Exception):
    """The client disconnected, or does not read the response."""


class Bodies:
    """Reads bodies, and knows which are being read."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: maximum number of bytes of a body."""
        self._max_bytes = max_bytes
        self._limits: set[asyncio.Timeout] = set()
        self._is_shutting_down = False

    @property
    def coming(self) -> int:
        """The number of bodies being read."""
        return len(self._limits)

    async def read(
        self, headers: Mapping[str, str], receive: Receive, max_bytes: int | None = None
    ) -> bytes:
        """The whole body. Refuses with `too_large`, `timed_out` or `shutting_down`; ClientGone if the client disconnects.

        `max_bytes`: the limit of this route, where it is below that of the server.
        """
        if self._is_shutting_down:
            raise Refusal("shutting_down", retry_after=SHUTTING_DOWN_RETRY)
        limit_of_body = self._max_bytes if max_bytes is None else min(max_bytes, self._max_bytes)
        length = headers.get("content-length", "")
        if length.isdecimal() and len(length) < 20 and int(length) > limit_of_body:
            raise self._too_large(limit_of_body)
        try:
            async with asyncio.timeout(BODY_SECONDS) as limit:
                self._limits.add(limit)
                try:
                    parts: list[bytes] = []
                    size, more_body = 0, True
                    while more_body:
                        message = await receive()
                        if message["type"] == "http.disconnect":
                            raise ClientGone
                        parts.append(message.get("body", b""))
                        size += len(parts[-1])
                        if size > limit_of_body:
                            raise self._too_large(limit_of_body)
                        more_body = message.get("more_body", False)
                    body = b"".join(parts)
                finally:
                    self._limits.discard(limit)
        except TimeoutError:
            if self._is_shutting_down:
                raise Refusal("shutting_down", retry_after=SHUTTING_DOWN_RETRY) from None
            raise Refusal(
                "timed_out", f"The body was not here within {BODY_SECONDS:g} seconds."
            ) from None
        encoding = headers.get("content-encoding", "identity").strip().lower()
        if encoding in ("identity", "") or not body:
            return body
        if encoding not in ("gzip", "x-gzip"):
            raise _encoding_refusal(
                f"is {encoding[:100]!r}; bodies are taken as they are, or compressed by gzip"
            )
        return await asyncio.to_thread(self._unpack, body, limit_of_body)

    def _unpack(self, body: bytes, limit: int) -> bytes:
        unpacked = zlib.decompressobj(wbits=zlib.MAX_WBITS | GZIP)
        try:
            content = unpacked.decompress(body, limit + 1)
        except zlib.error as error:
            raise _encoding_refusal(f"is gzip, but the body is not ({error})") from None
        if len(content) > limit:
            raise self._too_large(limit)
        if not unpacked.eof or unpacked.unused_data:
            raise _encoding_refusal("is gzip, but the body is cut off, or has bytes after its end")
        return content

    def give_up(self) -> None:
        """Stop waiting for incomplete bodies."""
        self._is_shutting_down = True
        now = asyncio.get_running_loop().time()
        for limit in self._limits:
            limit.reschedule(now)

    def _too_large(self, limit: int) -> Refusal:
        owner = (
            "max_body_bytes of the server" if limit == self._max_bytes else "what this route takes"
        )
        return Refusal(
            "too_large",
            f"The body has more than {limit} bytes, which is {owner}. Send less at once.",
        )


def _encoding_refusal(problem: str) -> Refusal:
    field = "Content-Encoding"
    return Refusal("unsupported_media_type", f"{field} {problem}.", field=field, problem=problem)


async def read_body(body: bytes, read: Callable[[bytes], T]) -> T:
    """The result of `read`, which parses and validates a body; the thread of large bodies runs it if the body is large."""
    if len(body) <= LARGE:
        return read(body)
    return await asyncio.get_running_loop().run_in_executor(_body_thread, read, body)


@contextmanager
def short_thread_switches() -> Generator[None]:
    """Let threads take turns every `SWITCH_SECONDS`, and let garbage collection skip all objects that exist already: to visit them takes a
    tenth of a second after each large body.
    """
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        sys.setswitchinterval(interval)


def give_memory_back() -> None:
    """A second from now, when no reference to the body is left: collect garbage, since exceptions keep their frames alive, and make glibc
    return free memory to the system.
    """

    def trim() -> None:
        with suppress(AttributeError, OSError):
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)

    asyncio.get_running_loop().call_later(1.0, _body_thread.submit, trim)
