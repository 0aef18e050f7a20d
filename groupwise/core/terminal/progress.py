"""The progress of long work: a live view in a terminal or a notebook, plain lines everywhere else.

The loop reports events (`phase`, `step`, `note`), and this module decides how to show them. In a terminal it redraws one
block in place and restores the screen at the end, even after an error; in a notebook it redraws an output below the cell. In a file, a
pipe or a dumb terminal it writes the title, then a line for every `logging_steps` steps, without control characters. It writes to standard
error; standard output is for results.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from groupwise.core.terminal.board import Board, Metrics
from groupwise.core.terminal.notebook import kernel_display
from groupwise.core.terminal.page import Page
from groupwise.core.terminal.text import clean, one_line
from groupwise.core.types import Group

if TYPE_CHECKING:  # a dry run shows no progress, and rich takes 50 ms
    from rich.live import Live


class Progress:
    """Shows the progress of `total_steps` steps, `start_step` of them done before. Use it as a context manager."""

    def __init__(
        self,
        title: str,
        total_steps: int,
        start_step: int = 0,
        stream: TextIO | None = None,
        *,
        logging_steps: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from rich.console import Console

        self._stream = stream if stream is not None else sys.stderr
        self._logging_steps = logging_steps
        self._board = Board(one_line(title), total_steps, start_step, clock)
        self._console = Console(file=self._stream, highlight=False, markup=False, emoji=False)
        self._live: Live | None = None
        kernel = kernel_display() if stream is None else None
        self._page = None if kernel is None else Page(kernel, self._board, clock)

    @property
    def live(self) -> bool:
        """True if the view is redrawn in place, in a terminal that can move its cursor."""
        return (
            self._page is None and _is_terminal(self._stream) and not self._console.is_dumb_terminal
        )

    def __enter__(self) -> Progress:
        self._board.start()
        if self._page is not None:
            self._page.start()
        elif not self.live and self._board.done < self._board.total:
            # A log may have two runs: a warm-up, then the training.
            first = self._board.done + 1
            self._write_line(f"{self._board.title}: steps {first} to {self._board.total}")
        if self.live:
            from rich.live import Live

            self._live = Live(
                get_renderable=lambda: self._board.view(self._console.width),
                console=self._console,
                refresh_per_second=2,
                redirect_stdout=_is_terminal(sys.stdout),
                redirect_stderr=self._stream is sys.stderr,
                vertical_overflow="crop",
            )
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave the last view on the screen and restore the cursor; a second call does nothing."""
        live, self._live = self._live, None
        if live is not None:
            self._board.phase("", None, None)
            live.stop()
        if self._page is not None:
            self._board.phase("", None, None)
            self._page.close()

    def phase(self, name: str, done: int | None = None, total: int | None = None) -> None:
        """Show the current phase of the step, such as `sampling`, and how much of it is done. Only live views show it."""
        self._board.phase(one_line(name), done, total)
        if self._page is not None:
            self._page.tick()

    def step(self, step: int, metrics: Metrics, groups: Sequence[Group] = ()) -> None:
        """Report that step `step` (an index from 0) is done, with its metrics. A notebook shows completions of its groups."""
        self._board.step(step, metrics)
        if self._page is not None:
            self._page.step(step, metrics, groups)
        elif self._live is not None:
            self._live.refresh()
        elif self._board.done % self._logging_steps == 0 or self._board.done == self._board.total:
            self._write_line(self._board.line())

    def note(self, text: str) -> None:
        """Add a line for the reader; it stays above the view."""
        if self._page is not None:
            self._page.note(text)
        else:
            self._write_line(clean(text))

    def _write_line(self, text: str) -> None:
        if self._live is not None:
            from rich.text import Text

            self._console.print(Text(text), soft_wrap=True)
            return
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
        self._stream.flush()


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"
