"""Decides whether the Hugging Face Hub may be asked, and whether its errors are temporary.

A job that failed because the hub did not answer should be retried; one that named something the hub does not have should not.
`is_temporary` tells them apart. A temporary error ends the process with `errors.EX_TEMPFAIL`.
"""

from __future__ import annotations

import os
import socket
from functools import cache
from urllib.parse import urlsplit

PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
TOKEN_ELSEWHERE = "GROUPWISE_HUB_TOKEN_ELSEWHERE"
"""Set while a command is only tried locally, before it is sent to the place that has the token (`groupwise launch modal --secret`)."""
TEMPORARY_STATUSES = frozenset({408, 425, 429, *range(500, 600)})
"""HTTP statuses of a service that is busy or broken, independent of the request."""
TRANSPORT = frozenset({"httpx", "httpcore", "requests", "urllib3", "aiohttp"})
"""Packages whose errors without a status are connection errors."""


def is_offline() -> bool:
    """True if the hub must not be asked (`HF_HUB_OFFLINE`)."""
    return os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")


@cache
def is_reachable() -> bool:
    """True if the hub can be reached at all; tried once, to avoid waiting for many retries. With a proxy it is assumed."""
    if is_offline():
        return False
    if any(os.environ.get(name) for name in PROXIES):
        return True
    url = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    port = url.port or (80 if url.scheme == "http" else 443)
    try:
        socket.create_connection((url.hostname or "", port), timeout=5).close()
    except OSError:
        return False
    return True


def is_temporary(error: BaseException) -> bool:
    """True if the same request may succeed later: the hub did not answer, was busy, or the connection broke."""
    if is_offline():
        return False
    if not is_reachable():
        return True
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:  # the error and its chain of causes
        seen.add(id(cause))
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if isinstance(status, int):
            temporary = status in TEMPORARY_STATUSES
        else:
            package = type(cause).__module__.partition(".")[0]
            temporary = isinstance(cause, ConnectionError | TimeoutError) or package in TRANSPORT
        if temporary:
            return True
        cause = cause.__cause__ or cause.__context__
    return False
