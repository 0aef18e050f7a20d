"""Lines of a server's log cannot affect the terminal that shows them, whoever wrote their contents."""

from __future__ import annotations

import logging
import sys

from groupwise.api.http.logs import TextFormatter


def test_control_characters_are_escaped_in_log_messages_and_tracebacks() -> None:
    try:
        raise ValueError("bad\x1b]0;owned\x07 \u202ename")
    except ValueError:
        failed = sys.exc_info()
    record = logging.LogRecord("uvicorn.error", logging.ERROR, "", 1, "\n%s", ("\x1b[2J",), failed)
    told = TextFormatter().format(record)
    assert "ValueError: bad␛]0;owned␇" in told
    assert "⏎␛[2J" in told
    for sign in "\x1b\x07\u202e":
        assert sign not in told
    assert told.count("\n") > 2, "lines stay lines"
