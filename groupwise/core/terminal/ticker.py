"""One line that shows the progress of long work: redrawn in place in a terminal, a new line now and then everywhere else."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from groupwise.core.terminal.text import clean, one_line, shorten

REDRAW = 0.2
"""Minimum number of seconds between two drawings of the line in a terminal."""


class Ticker:
    """Use it as a context manager. It writes to standard error; standard output is for results."""

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        every: float | None = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`every`: seconds between two lines if the stream cannot be redrawn; None: then it gets the notes only."""
        self._stream = stream if stream is not None else sys.stderr
        self._redraws = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._pause = REDRAW if self._redraws else every or 0.0
        self._notes_only = every is None and not self._redraws
        self._clock = clock
        self._next_draw_at = clock()
        self._line = self._last_drawn = ""

    def __enter__(self) -> Ticker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._redraw()
        if self._redraws and self._last_drawn:
            self._write_text("\n")

    def show(self, line: str) -> None:
        """Set the line; it is written if enough time has passed, and when the work ends."""
        self._line = one_line(line)
        if self._clock() >= self._next_draw_at:
            self._redraw()

    def note(self, text: str) -> None:
        """Add a line for the reader; it stays above the progress line."""
        self._write_text(("\r\x1b[K" if self._redraws else "") + clean(text) + "\n")
        self._last_drawn = ""
        if self._redraws:
            self._redraw()

    def clear(self) -> None:
        """Remove the line, so that something else can be written."""
        if self._redraws and self._last_drawn:
            self._write_text("\r\x1b[K")
        self._line = self._last_drawn = ""

    def _redraw(self) -> None:
        if self._line == self._last_drawn or self._notes_only:
            return
        self._last_drawn = self._line
        self._next_draw_at = self._clock() + self._pause
        if self._redraws:
            self._write_text(
                "\r\x1b[K" + shorten(self._line, shutil.get_terminal_size().columns - 1)
            )
        else:
            self._write_text(self._line + "\n")

    def _write_text(self, text: str) -> None:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._stream.write(text.encode(encoding, "replace").decode(encoding))
        self._stream.flush()
