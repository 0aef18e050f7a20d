"""Shows the progress of a transfer of files in one line of the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from groupwise.core.terminal.quantities import byte_size
from groupwise.core.terminal.text import one_line, shorten

if TYPE_CHECKING:
    from groupwise.jobs.fleet.download import Tell

SHOW_SECONDS = 0.2
"""Seconds before the first line, and between two: a quick transfer shows none."""
WIDEST = 78


@contextmanager
def progress() -> Generator[Tell, None, None]:
    """A line that is written over, and removed at the end in any case. Nothing if standard error is no terminal."""
    from groupwise.jobs.fleet.download import tell_nobody

    if not sys.stderr.isatty():
        yield tell_nobody
        return
    last, shown = time.monotonic(), False

    def tell(here: int, of: int, what: str) -> None:
        nonlocal last, shown
        if time.monotonic() - last < SHOW_SECONDS:
            return
        last, shown = time.monotonic(), True
        line = f"{byte_size(here)} of {byte_size(of)}, {one_line(what)}"
        typer.echo(f"\r\x1b[K{shorten(line, WIDEST)}", err=True, nl=False)

    try:
        yield tell
    finally:
        if shown:
            typer.echo("\r\x1b[K", err=True, nl=False)
