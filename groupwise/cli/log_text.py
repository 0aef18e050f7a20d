"""Writes the log of a job, whose bytes are not trusted."""

from __future__ import annotations

import codecs
import sys
from typing import BinaryIO, TextIO, cast

from groupwise.core.terminal.text import clean


class LogWriter:
    """Writes bytes unchanged to a program, and as text without control characters to a terminal.

    A piece may end within a multi-byte character; the rest comes with the next piece.
    """

    def __init__(self, *, err: bool = False) -> None:
        """`err`: write to standard error, because standard output is used for a document."""
        self._err = err
        self._letters = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, data: bytes, *, last: bool = False) -> None:
        """Write a piece of the log. `last`: nothing follows, so an incomplete character is shown as such."""
        stream = sys.stderr if self._err else sys.stdout
        if is_terminal(stream):
            encoding = stream.encoding or "utf-8"
            visible = clean(self._letters.decode(data, last).replace("\r", "\n"))
            stream.write(visible.encode(encoding, "replace").decode(encoding))
        else:
            stream.flush()
            cast("BinaryIO", stream.buffer).write(data)
        stream.flush()

    def end(self) -> None:
        """End a log: an incomplete character is shown as such. Later writes belong to another log."""
        self.write(b"", last=True)
        self._letters.reset()


def is_terminal(stream: TextIO) -> bool:
    """True if the stream is a terminal, so that a person reads it."""
    return stream.isatty()
