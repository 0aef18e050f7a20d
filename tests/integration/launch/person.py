"""A user of `groupwise launch`: a project, a home folder, and a terminal."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any
from unittest import mock

from groupwise.cli.main import main

TIMEOUT_S = 240.0


@dataclass
class Person:
    """One of them, on a machine that is known by its home folder."""

    project: Path
    home: Path
    state: str = "state"
    """What this machine knows of launched jobs: another word is another machine."""
    begun: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        return {
            **{name: value for name, value in os.environ.items() if "GROUPWISE" not in name},
            "HOME": str(self.home),
            "XDG_STATE_HOME": str(self.home / self.state),
            "XDG_CACHE_HOME": str(self.home / "cache"),
        }

    def types(self, *words: str, code: int | None = 0) -> "Typed":
        """`groupwise launch …`, until it has ended: in this process, which has the person's variables meanwhile."""
        out, err = BytesIO(), BytesIO()
        with (
            mock.patch.dict(os.environ, self.environment, clear=True),
            chdir(self.project),
            redirect_stdout(TextIOWrapper(out, "utf-8", write_through=True)) as shown,
            redirect_stderr(TextIOWrapper(err, "utf-8", write_through=True)) as told,
        ):
            ended = main(["launch", *words])
        for each in (shown, told):
            each.flush()
        typed = Typed(out.getvalue().decode(), err.getvalue().decode(), ended)
        assert code is None or typed.code == code, typed
        return typed

    def begins(self, *words: str) -> subprocess.Popen[bytes]:
        """The same, in a terminal that stays open; what it says is in the project's `said`."""
        with (self.project.parent / "said").open("wb") as said:
            process = subprocess.Popen(
                [sys.executable, "-m", "groupwise", "launch", *words],
                cwd=self.project,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
            )
        self.begun.append(process)
        return process

    def sees(self, text: str) -> None:
        """Waits until that stands in the terminal."""
        self.waits(lambda: text in self.said())

    def finds(self, path: str) -> None:
        """Waits until it is there, below the home."""
        self.waits((self.home / path).exists)

    def waits(self, holds: Callable[[], bool]) -> None:
        """For as long as the terminal is open."""
        deadline = time.monotonic() + TIMEOUT_S
        while not holds():
            goes_on = self.begun[-1].poll() is None and time.monotonic() < deadline
            assert goes_on or holds(), self.said()
            time.sleep(0.02)

    def said(self) -> str:
        return (self.project.parent / "said").read_text()

    def result(self, name: str) -> dict[str, Any]:
        """What stands in `launch-result.json`."""
        return json.loads((self.project / "launches" / name / "launch-result.json").read_text())

    def holding(self, canary: str, *others: Path) -> list[Path]:
        """Files of the home, of what came back and of other folders that hold it."""
        places = (self.home, self.project / "launches", *others)
        files = (path for place in places for path in place.rglob("*") if path.is_file())
        return [path for path in files if canary.encode() in path.read_bytes()]

    @property
    def holding_step(self) -> Path:
        """While it is there, trainings of the project's task go no further than to the step that stands in it."""
        return self.home.parent / "holding"

    @contextmanager
    def held_at(self, step: int) -> Iterator[None]:
        """Trainings wait there."""
        self.holding_step.write_text(f"{step}")
        yield
        self.holding_step.unlink()

    def leaves(self) -> None:
        """Nothing of the terminals goes on."""
        for process in self.begun:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()


@dataclass(frozen=True)
class Typed:
    """A command that has ended."""

    out: str
    err: str
    code: int
