"""Runs a program, and ends it with everything that it started.

It ends with the process that started it, even after kill -9 (Linux), and at the latest by `end`. Its output goes to a log, from which a
secret is removed when the program has ended.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from uuid import uuid4

from groupwise.core.processes.process_tree import MARK, has_ended, kill_process_tree
from groupwise.core.rendezvous import without_rank
from groupwise.core.terminal.text import clean

POLL_SECONDS = 0.05
"""Seconds between two checks of a program that is waited for."""
MESSAGE_LINES, MESSAGE_CHARS = 3, 300
"""A message shows so many last lines of a log, and of each at most so many characters."""
FRAMES = "╭│╰─"
"""First characters of the lines of a framed traceback, which messages leave out."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class ProcessGroup:
    """A program and all processes that it started. As a context manager, it ends all of them."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        folder: Path,
        log: Path,
        environment: Mapping[str, str],
        secret: str | None = None,
        niceness: int = 0,
        standard_input: Path | None = None,
        standard_output: Path | None = None,
    ) -> None:
        """Start the program in `folder`; `environment` is added to this process's own without its rank. `niceness` lowers its priority.

        It reads `standard_input` if that is given. Its standard output goes to `standard_output`, if given, instead of the log.
        """
        self.log = log
        self._outputs = (log, standard_output) if standard_output else (log,)
        self._secret = secret
        self._mark = uuid4().hex
        with ExitStack() as files:
            log_file = files.enter_context(log.open("ab"))
            input_file = (
                files.enter_context(standard_input.open("rb"))
                if standard_input
                else subprocess.DEVNULL
            )
            output_file = (
                files.enter_context(standard_output.open("ab")) if standard_output else log_file
            )
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "groupwise.core.processes.run_tied"),
                    *(str(os.getpid()), self._mark, str(niceness), *words),
                ],
                cwd=folder,
                stdin=input_file,
                stdout=output_file,
                stderr=log_file,
                env={**without_rank(os.environ), **environment, MARK: self._mark},
                start_new_session=True,
            )

    @property
    def has_ended(self) -> bool:
        """True if the program itself has ended."""
        return has_ended(self.process)

    def wait(self, seconds: float) -> int | None:
        """The return code; None if it has not ended after `seconds`."""
        deadline = time.monotonic() + seconds
        while not self.has_ended:
            if time.monotonic() > deadline:
                return None
            time.sleep(POLL_SECONDS)
        return self.end()

    def end(self) -> int:
        """End all remaining processes; returns the return code of the program."""
        if self.process.returncode is None:
            kill_process_tree(self.process.pid, self._mark)
        code = self.process.wait()
        if self._secret is not None and self._secret.encode() in (content := self.log.read_bytes()):
            self.log.write_bytes(content.replace(self._secret.encode(), "…".encode()))
        return code

    def trim_output(self, most: int) -> None:
        """Cut its log and its output, if longer than `most` bytes, to their last half. What is written at that moment may be lost."""
        for file in self._outputs:
            if file.stat().st_size > most:
                with file.open("rb") as reader:
                    reader.seek(-(most // 2), os.SEEK_END)
                    tail = reader.read(most // 2)
                os.truncate(file, 0)  # the program appends, so that it goes on at the new end
                with file.open("ab") as writer:
                    writer.write(tail)

    def last_output(self) -> str:
        """The last lines of its log, for a message."""
        text = _COLOUR.sub("", self.log.read_text(encoding="utf-8", errors="replace"))
        lines = [clean(line).strip() for line in text.splitlines()]
        lines = [line for line in lines if line and line[0] not in FRAMES]
        return "\n".join(line[:MESSAGE_CHARS] for line in lines[-MESSAGE_LINES:])

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()


def free_port() -> int:
    """A loopback port that is free now, for a program that is about to start."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]
