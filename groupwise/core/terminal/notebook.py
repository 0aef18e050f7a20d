"""Shows things in a notebook: HTML if a kernel displays it (Jupyter, Colab, Kaggle), plain text everywhere else.

The content may come from a model or a dataset, so all of it is cleaned and escaped.
"""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from html import escape
from typing import Any, Protocol

from groupwise.core.terminal.quantities import duration
from groupwise.core.terminal.text import clean, one_line

FONT = "13px ui-sans-serif, system-ui, sans-serif"
STYLE = f"font: {FONT}; border-collapse: collapse; margin: .3em 0"
CELL = "text-align: left; vertical-align: top; padding: .2em .9em .2em 0; white-space: pre-wrap"


class Displayable(Protocol):
    """An object that can be shown as HTML and as text."""

    def as_html(self) -> str: ...
    def __str__(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells under a title; with `header`, a name above each column."""

    title: str
    rows: Sequence[Sequence[str]]
    header: Sequence[str] = ()
    unbroken: tuple[int, ...] = ()
    """Columns whose lines are never wrapped, even on a narrow page."""

    def __str__(self) -> str:
        """Columns side by side, each as wide as its longest cell."""
        lines = [
            [one_line(cell) for cell in row]
            for row in ([self.header] if self.header else []) + list(self.rows)
        ]
        widths = [
            max(len(row[i]) for row in lines if i < len(row))
            for i in range(max(map(len, lines), default=0))
        ]
        body = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()
            for row in lines
        ]
        return "\n".join([*([self.title] if self.title else []), *(f"  {line}" for line in body)])

    def as_html(self) -> str:
        """An HTML table."""
        head = "".join(
            f'<th style="{CELL}; opacity: .6">{as_html(name)}</th>' for name in self.header
        )
        lines: list[str] = []
        for row in self.rows:
            cells = ""
            for column, cell in enumerate(row):
                # The first column is faint if no header names the columns: it then holds the names of facts.
                style = f"{CELL}; opacity: .6" if column == 0 and not self.header else CELL
                style += "; white-space: pre" if column in self.unbroken else ""
                cells += f'<td style="{style}">{as_html(cell)}</td>'
            lines.append(f"<tr>{cells}</tr>")
        title = (
            f'<caption style="text-align: left; font-weight: 600">{as_html(self.title)}</caption>'
            if self.title
            else ""
        )
        return f'<table style="{STYLE}">{title}<thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table>'

    def _repr_html_(self) -> str:
        return self.as_html()


@dataclass(frozen=True, slots=True)
class Code:
    """Lines to copy, under a title."""

    title: str
    text: str

    def __str__(self) -> str:
        """The title, and the lines indented below it."""
        return "\n".join([self.title, *(f"  {line}".rstrip() for line in self.text.splitlines())])

    def as_html(self) -> str:
        """An HTML block. If the page is narrower, its lines wrap, but not within words (Jupyter's own style for `pre` would)."""
        title = f'<div style="font: {FONT}; font-weight: 600">{as_html(self.title)}</div>'
        style = "margin: .3em 0 .6em; white-space: pre-wrap; word-break: normal"
        return f'{title}<pre style="{style}">{as_html(self.text)}</pre>'


class Output:
    """An output below the cell; each drawing replaces the one before."""

    def __init__(self) -> None:
        self._handle: Any = None

    def draw(self, kernel: Any, html: str) -> None:
        """Draw `html`. `kernel` is the module `IPython.display`."""
        content = kernel.HTML(html)
        if self._handle is None:
            self._handle = kernel.display(content, display_id=True)
        else:
            self._handle.update(content)


_shared: ContextVar[Output | None] = ContextVar("shared", default=None)


@contextmanager
def one_output() -> Generator[None]:
    """Everything shown inside (tables, pages of trainings) shares one output below the cell; each drawing replaces the one before."""
    token = _shared.set(Output())
    try:
        yield
    finally:
        _shared.reset(token)


def output() -> Output:
    """The output to draw into next: a new one, except inside `one_output`."""
    return _shared.get() or Output()


@contextmanager
def shown_while(work: str) -> Generator[None]:
    """Show the name of long work and the time that passes below the cell; outside a kernel nothing.

    Inside `one_output`, what is shown next takes its place.
    """
    kernel = kernel_display()
    if kernel is None:
        yield
        return
    place, cell, started_at, ended = output(), copy_context(), time.monotonic(), threading.Event()

    def draw() -> None:
        while True:
            passed = duration(time.monotonic() - started_at)
            html = f'<div style="font: {FONT}">{as_html(work)} · {passed} elapsed</div>'
            cell.copy().run(place.draw, kernel, html)
            if ended.wait(1.0):
                return

    thread = threading.Thread(target=draw, name="notebook wait", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def show(shown: Displayable) -> None:
    """Show it to the reader: below the cell, or on standard output."""
    kernel = kernel_display()
    if kernel is None:
        tell(str(shown))
    else:
        output().draw(kernel, shown.as_html())


def tell(text: str) -> None:
    """Print a line for the user of the cell or the script."""
    sys.stdout.write(f"{clean(text)}\n")


def kernel_display() -> Any | None:
    """`IPython.display` if a kernel displays results; None in a terminal, a script or a file."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return importlib.import_module("IPython.display") if hasattr(shell, "kernel") else None


def as_html(text: str) -> str:
    """Untrusted text as harmless HTML."""
    return escape(clean(text))
