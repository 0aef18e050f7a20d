"""Reads responses up to a limit, so that a server, or what stands in its place, cannot fill its client's memory.

The limit counts bytes as they are after unpacking: a kilobyte of gzip may become a megabyte. Clients send with `stream=True` and read the
response here.
"""

from __future__ import annotations

import httpx2

MAX_BYTES = 1 << 30
"""Limit for responses of our own servers: hundreds of thousands of completions with their tokens."""
OF_THE_BODY = frozenset({"content-encoding", "content-length", "transfer-encoding"})
"""Headers that describe the body as it was sent, no longer as it was read."""


class ResponseTooLarge(Exception):
    """A response has more bytes than its client reads."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"the answer has more than {limit:,} bytes; no more is read")


def read_response(response: httpx2.Response, limit: int = MAX_BYTES) -> httpx2.Response:
    """The response with its body, unpacked. The streamed one is closed. Raises ResponseTooLarge, and what httpx2 raises."""
    parts: list[bytes] = []
    size = 0
    try:
        for part in response.iter_bytes():
            parts.append(part)
            size += len(part)
            if size > limit:
                raise ResponseTooLarge(limit)
    finally:
        response.close()
    return _with_body(response, parts)


async def read_response_async(response: httpx2.Response, limit: int = MAX_BYTES) -> httpx2.Response:
    """See `read_response`."""
    parts: list[bytes] = []
    size = 0
    try:
        async for part in response.aiter_bytes():
            parts.append(part)
            size += len(part)
            if size > limit:
                raise ResponseTooLarge(limit)
    finally:
        await response.aclose()
    return _with_body(response, parts)


def _with_body(response: httpx2.Response, parts: list[bytes]) -> httpx2.Response:
    headers = [
        (name, value)
        for name, value in response.headers.multi_items()
        if name.lower() not in OF_THE_BODY
    ]
    return httpx2.Response(
        response.status_code, headers=headers, content=b"".join(parts), request=response.request
    )
