"""Writes the output of a worker process to the log, line by line."""

from __future__ import annotations

import logging
import os
import subprocess
import threading
from collections import deque

logger = logging.getLogger(__name__)

_LINES_PER_CALL = 200
_LINE_LENGTH = 2000


class Output:
    """Reads a worker's output and logs it, a limited number of lines per call, so the log cannot fill up."""

    def __init__(self, process: subprocess.Popen[bytes], prefix: str) -> None:
        assert process.stdout is not None
        self._stream = process.stdout
        self._prefix = prefix
        self._lines_left = _LINES_PER_CALL
        self._tail: deque[str] = deque(maxlen=5)
        self._thread = threading.Thread(
            target=self._read_lines, name=f"{prefix} output", daemon=True
        )
        self._thread.start()

    def begin_call(self) -> None:
        """Reset the number of lines that may be logged, for the next call."""
        self._lines_left = _LINES_PER_CALL

    def last_output(self) -> str:
        """The last lines, for a message."""
        self.join()
        return (
            "".join(f"\n  {line}" for line in ("Its last output:", *self._tail))
            if self._tail
            else ""
        )

    def join(self) -> None:
        """Wait up to a second for the rest of the output of a killed process."""
        self._thread.join(1.0)

    def _read_lines(self) -> None:
        with self._stream as stream:
            pending = b""
            while piece := os.read(stream.fileno(), 1 << 16):
                *lines, pending = (pending + piece).split(b"\n")
                if len(pending) > _LINE_LENGTH:
                    lines, pending = [*lines, pending], b""
                self._log(lines)
            self._log([pending] if pending else [])

    def _log(self, lines: list[bytes]) -> None:
        for line in lines[: max(self._lines_left, 0)]:
            text = line[:_LINE_LENGTH].decode(errors="replace").rstrip("\r")
            self._tail.append(text)
            logger.info("%s: %s", self._prefix, text)
        if self._lines_left > 0 and len(lines) >= self._lines_left:
            logger.info("%s: (the rest of this call's output is left out)", self._prefix)
        self._lines_left -= len(lines)
