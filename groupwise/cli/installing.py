"""Shows how a Python environment is built on a machine, from the log of `builder.py`.

A line that begins with two spaces was written by pip: it is a line of progress, which the next one replaces in a terminal, and is not shown
elsewhere. Every other line is a stage or a message, and stays. If the build fails, pip's last lines are shown before the reason.

    BuildLog      `groupwise fleet vm prepare`: the whole log is a file here
    LaunchedLog   `groupwise launch`: the build begins the log of the job, which stays at its place
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from pathlib import Path

from groupwise.core.terminal.ticker import Ticker
from groupwise.jobs.launch.bootstrap import BUILDING, READY

OF_PIP = "  "
SHOWN_LINES = 20
"""Lines of pip that are shown after a failure."""
SOURCE = re.compile(r" \(from .*\)$")
"""What pip adds to the name of a requirement: where it is asked for."""
STAGE = re.compile(r"[1-4]/4 |made in \d+ s$")


def progress_of(line: str) -> str:
    """A line of pip, as progress: `Collecting torch==2.13.0`."""
    return SOURCE.sub("", line.strip())


class BuildLog:
    """The log of one build: shown line by line, and kept in a file."""

    def __init__(self, ticker: Ticker, file: Path, label: str = "") -> None:
        """`label`: text before each line that is shown, if several builds share the terminal."""
        self.file = file
        self._ticker, self._label = ticker, label
        self._of_pip: deque[str] = deque(maxlen=SHOWN_LINES)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("", encoding="utf-8")

    def add(self, line: str) -> None:
        """Take a line of the log, or a message about the build."""
        with self.file.open("a", encoding="utf-8") as whole:
            whole.write(line + "\n")
        if line.startswith(OF_PIP):
            self._of_pip.append(line)
            self._ticker.show(self._label + progress_of(line))
        else:
            if STAGE.match(line):
                self._of_pip.clear()
            self._ticker.clear()  # what pip did is over
            self._ticker.note(self._label + line)

    def show_failure(self) -> None:
        """Show what pip wrote last in the stage that failed, and the file with the whole log."""
        self._ticker.clear()
        for line in self._of_pip:
            self._ticker.note(self._label + line)
        if self._of_pip:
            self._ticker.note(f"{self._label}the whole log: {self.file}")


class LaunchedLog:
    """Passes on the log of a job; of a build at its beginning, without the lines of pip."""

    def __init__(self, write: Callable[[bytes], None], ticker: Ticker, whole: str) -> None:
        """`write` receives what is to be shown. `whole`: the command that prints the whole log."""
        self._write, self._ticker, self._whole = write, ticker, whole
        self._of_pip: deque[bytes] = deque(maxlen=SHOWN_LINES)
        self._incomplete: bytes = b""
        """What was received and not passed on: a line without its end, while a build may be in progress."""
        self._building: bool | None = None
        """Unknown until the first line is."""

    def write(self, data: bytes) -> None:
        """Take a piece of the log; it may end within a line."""
        data, self._incomplete = self._incomplete + data, b""
        if self._building is None:
            first = f"{BUILDING}\n".encode()
            if len(data) < len(first) and first.startswith(data):
                self._incomplete = data
                return
            self._building = data.startswith(first)
        while self._building and b"\n" in data:
            line, _, data = data.partition(b"\n")
            self._add(line)
        if self._building:
            self._incomplete = data
        elif data:
            self._write(data)

    def end(self) -> None:
        """Nothing follows, so the last line is complete."""
        if self._incomplete:
            self._write(self._incomplete)
            self._incomplete = b""
        self._ticker.clear()

    def _add(self, line: bytes) -> None:
        """Take a line of the builder."""
        text = line.decode("utf-8", "replace")
        if text.startswith(OF_PIP):
            self._of_pip.append(line)
            self._ticker.show(progress_of(text))
            return
        self._ticker.clear()
        if STAGE.match(text) or text in (BUILDING, READY):
            self._of_pip.clear()
        for of_pip in self._of_pip:  # this line is the reason of a failure
            self._write(of_pip + b"\n")
        if self._of_pip:
            self._write(f"  the whole log: {self._whole}\n".encode())
            self._of_pip.clear()
        self._write(line + b"\n")
        self._building = text != READY
