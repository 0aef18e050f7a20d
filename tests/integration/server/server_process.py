"""A real server with its real engine, in processes of their own, and what a client does with it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.processes import wait_until

FAKE = [sys.executable, "-m", "tests.integration.server.fake_server"]
"""A server whose engine is the fake one."""
_ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+")


class Server:
    """`groupwise serve` on one output folder; may be killed and begun again."""

    def __init__(
        self,
        folder: Path,
        *words: str,
        command: Sequence[str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        """`command` in place of `groupwise serve`: it is given the folder, the port and the words. It runs in `cwd`."""
        self.folder = folder
        self._cwd = cwd
        self._command = command
        self.log = folder.with_name(f"{folder.name}.log")
        self._words = words
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def begin(self) -> str:
        """Start it and wait until it listens; its URL."""
        port = self.url.rpartition(":")[2] or "0"
        serve = [sys.executable, "-m", "groupwise", "serve"]
        usual = [*serve, "--output-dir", str(self.folder), "--port", port]
        command = [*self._command, str(self.folder), port] if self._command else usual
        before = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *self._words],
                cwd=self._cwd,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        process = self._process

        def address() -> str:
            match = _ADDRESS.search(self.log.read_bytes()[before:].decode())
            assert match or process.poll() is None, self.log.read_text()
            return match[0] if match else ""

        self.url = wait_until(address, "the server's address", details=self.log.read_text)
        return self.url

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def engine(self) -> int | None:
        """The process that holds the model; None where there is none at the moment."""
        children = _children(self.pid)
        return next((pid for pid in children if b"engine.child_process" in _command(pid)), None)

    def kill(self) -> None:
        """As the kernel does where memory is short."""
        assert self._process is not None
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._process.wait(20)

    def end(self) -> int:
        """Ask it to end; its exit code."""
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(60)


@contextmanager
def running(
    folder: Path, *words: str, command: Sequence[str] | None = None, cwd: Path | None = None
) -> Iterator[Server]:
    """A server that has begun, and is gone afterwards."""
    server = Server(folder, *words, command=command, cwd=cwd)
    server.begin()
    try:
        yield server
    finally:
        server.kill()


def _children(pid: int) -> list[int]:
    """All processes below this one."""
    pids: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                pids += [child, *_children(child)]
    return pids


def _command(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""
