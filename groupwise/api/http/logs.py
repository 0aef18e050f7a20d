"""The server's log, for people or as JSON: steps, other events, and requests; the text form shows only requests that were refused.

The line of a request identifies the caller by the id of the key, and the request by its method and path. It never contains a key, a
header or a body. Text from a client is cleaned first.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from typing import Any, Literal, cast

from groupwise.core.terminal.text import clean, one_line

ACCESS = logging.getLogger("groupwise.api.http.access")
NOTHING_YET = 408
"""Status that the poll of a call of the Tinker API gets while the result is not ready."""
LONGEST_PATH = 200
"""Maximum number of characters of a path in a line."""


class TextFormatter(logging.Formatter):
    """`12:00:01 INFO message`. Safe for a terminal: names and texts of others may be in messages and exceptions.

    A message is always one line, so no name can imitate another message; a traceback keeps its lines.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`."""
        return clean(super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.formatMessage`."""
        return one_line(super().formatMessage(record))


class JsonFormatter(logging.Formatter):
    """One JSON object per line; the entries of a record's `facts` are keys of it."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "at": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= cast("Mapping[str, Any]", getattr(record, "facts", {}))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True, default=str)


def is_noteworthy(record: logging.LogRecord) -> bool:
    """False for requests that succeeded (each group has two) or polled: people do not need them."""
    if record.name != ACCESS.name:
        return True
    status = cast("Mapping[str, Any]", getattr(record, "facts", {}))["status"]
    return status >= 400 and status != NOTHING_YET


def configure(kind: Literal["text", "json"]) -> logging.Handler:
    """Send the logs of the package and uvicorn to stderr; returns the handler, which the caller removes at the end."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if kind == "json" else TextFormatter())
    if kind == "text":
        handler.addFilter(is_noteworthy)
    root = logging.getLogger()
    root.addHandler(handler)
    logging.getLogger("groupwise").setLevel(logging.INFO)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    return handler


def log_request(
    *, request_id: str, method: str, path: str, status: int, seconds: float, key_id: str, code: str
) -> None:
    """Log a finished request. `code`: of the problem body that answered it, or empty."""
    visible_path = one_line(path)[:LONGEST_PATH]
    milliseconds = round(seconds * 1000, 1)
    facts = {
        "request_id": request_id,
        "method": method,
        "path": visible_path,
        "status": status,
        "milliseconds": milliseconds,
        "key": key_id,
        "code": code or None,
    }
    ACCESS.info(
        "%s %s %d%s %.1f ms key=%s request=%s",
        one_line(method)[:16],
        visible_path,
        status,
        f" {code}" if code else "",
        milliseconds,
        key_id or "-",
        request_id,
        extra={"facts": facts},
    )
