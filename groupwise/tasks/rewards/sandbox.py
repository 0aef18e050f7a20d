"""A sandbox for untrusted Python code: a separate process with isolated resources, limited usage and a guaranteed end.

`run` runs source code as a script; a `Box` runs source code or a function of this package, with sockets for communication. A fresh
interpreter (`sandbox_child`) builds the box from the mechanisms of this system and reports which protections hold: each has a name
in `PROTECTIONS`, and the result lists the mechanisms that provide it. Linux offers most of them to any user; an unavailable
protection is reported as missing, not replaced. Inside there are only the standard library, one empty folder, none of this
process's environment variables, and limits on time, memory, processes, files and output.

A program's behaviour never raises an error here; `SandboxError` means that the box itself could not be built.

A box guards against code that a model writes during its training, by accident or for reward. It is not a security boundary against
attacks on the kernel, and it does not limit the memory of all processes of a box together.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import pwd
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal

from groupwise.core.errors import SandboxError
from groupwise.core.processes.frames import FrameBuffer, add_frame
from groupwise.core.processes.process_tree import MARK, has_ended, kill_process_tree

Ending = Literal["finished", "failed", "timed_out", "killed"]
"""`finished`: exit code 0; `failed`: another one; `timed_out`: out of wall-clock or CPU time; `killed`: ended by a signal."""

PROTECTIONS = {
    "network": "no connection can be made",
    "files": "no file can be opened but those of Python and those in its own folder",
    "disk": "its folder lives in memory and is bounded",
    "processes": "it sees no process but its own, and the kernel ends them all at once",
    "user": "it runs as a user who owns nothing",
    "calls": "system calls that reach other processes or rare parts of the kernel are refused",
}
"""Protections of a box and their meaning; the system decides which of them hold."""

MECHANISMS = ("namespaces", "user", "landlock", "seccomp")
"""Mechanisms that provide the protections. Leaving one out shows what holds without it."""

START_LIMIT = 30.0
"""Seconds within which a box must be built; a busy machine needs a few."""
_END_LIMIT = 3.0
"""Seconds that a box may take to end by itself before its processes are searched for and killed."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Resources that a program may use. Sizes are in bytes."""

    seconds: float = 5.0
    """Wall-clock time from the start of the program."""
    memory: int = 512 << 20
    """Address space of each process."""
    processes: int = 16
    """Most processes at once, threads included."""
    disk: int = 16 << 20
    """Limit of all files together, if protection `disk` holds."""
    file_size: int = 8 << 20
    open_files: int = 64
    output: int = 64 << 10
    """Limit of standard output and of standard error each; the rest is discarded."""

    @property
    def cpu_seconds(self) -> int:
        """CPU time of each process; slightly more than `seconds`, because wall-clock time is the intended limit."""
        return math.ceil(self.seconds) + 1


@dataclass(frozen=True, slots=True)
class Result:
    """The exit, output and protections of an ended program."""

    ending: Ending
    code: int | None
    """Exit code; negative: the signal that ended it; None if the time ran out first."""
    output: bytes
    errors: bytes
    cut: bool
    """True if standard output exceeded its limit."""
    seconds: float
    """Wall-clock time since the start of the program."""
    held: Mapping[str, tuple[str, ...]]
    """Protection → the mechanisms that provided it; empty if it did not hold."""

    @property
    def missing(self) -> tuple[str, ...]:
        """Protections that did not hold."""
        return missing(self.held)


def missing(protections: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """The protections that no mechanism provides."""
    return tuple(name for name, mechanisms in protections.items() if not mechanisms)


async def run(
    source: str,
    *,
    stdin: bytes = b"",
    limits: Limits | None = None,
    require: Sequence[str] = (),
    without: Sequence[str] = (),
    common_imports: bool = False,
) -> Result:
    """Run source code as a Python script in a box; `common_imports`: common modules need no import; see `sandbox_child.known_names`.

    Raises SandboxError if no box can be built.
    """
    program = {"source": source, "common_imports": common_imports}
    async with Box(program, stdin=stdin, limits=limits, require=require, without=without) as box:
        return await box.result()


class Box:
    """One program in its box, from `async with` on; leaving the block ends the program and everything that it started."""

    def __init__(
        self,
        program: Mapping[str, Any],
        *,
        stdin: bytes = b"",
        limits: Limits | None = None,
        channels: Sequence[socket.socket] = (),
        require: Sequence[str] = (),
        without: Sequence[str] = (),
    ) -> None:
        """`program` has the keys `source` and optionally `common_imports`, or `function` (`package.module:name`) and `arguments`.

        The function must be in the standard library or this package. `channels` become descriptors 3, 4, … of the program; close
        them here as soon as the box is entered. Nothing is run unless the protections in `require` hold. `without` lists mechanisms
        to leave out.
        """
        self._program = program
        self._stdin = stdin
        self._limits = limits or Limits()
        self._channels = channels
        self._require = require
        self._without = without
        self._mark = secrets.token_hex(8)
        self._buffer = FrameBuffer()
        self._held: dict[str, tuple[str, ...]] | None = None
        self._since = 0.0

    async def __aenter__(self) -> Box:
        self._folder = Path(tempfile.mkdtemp(prefix="groupwise-box-"))
        self._folder.chmod(0o711)
        for name in ("home", "python"):
            (self._folder / name).mkdir(mode=0o700)
        self._control, warden_end = socket.socketpair()
        self._control.setblocking(False)
        try:
            with warden_end:
                self._process = self._start_warden(warden_end)
        except OSError as error:
            self._control.close()
            _delete_tree(self._folder)
            raise SandboxError(f"A process for a sandbox cannot be started: {error}.") from error
        streams = (self._process.stdout, self._process.stderr)
        self._streams = [_Stream(stream, self._limits.output) for stream in streams if stream]
        for stream in self._streams:
            await stream.open()
        with suppress(OSError):  # it has ended: `result` reports that
            orders = {
                "program": dict(self._program),
                "folder": str(self._folder),
                "limits": {**asdict(self._limits), "cpu_seconds": self._limits.cpu_seconds},
                "channels": [channel.fileno() for channel in self._channels],
                "user": _free_user(),
                "require": list(self._require),
                "without": list(self._without),
            }
            await asyncio.get_running_loop().sock_sendall(
                self._control, add_frame(json.dumps(orders).encode())
            )
        return self

    async def __aexit__(self, *_: object) -> None:
        self._control.close()  # the warden's order to end
        deadline = time.monotonic() + _END_LIMIT
        pause = 0.001
        try:
            while not has_ended(self._process) and time.monotonic() < deadline:
                await asyncio.sleep(pause)
                pause = min(2 * pause, 0.02)
        finally:
            kill_process_tree(self._process.pid, self._mark)
            self._process.wait()
            for stream in self._streams:
                stream.close()
            # Outside the event loop: deleting many files could take longer than the time limits of other boxes.
            await asyncio.to_thread(_delete_tree, self._folder)

    async def wait_until_running(self) -> Mapping[str, tuple[str, ...]]:
        """Wait until the program runs; returns the protections that hold. Raises SandboxError if the box could not be built."""
        if self._held is not None:
            return self._held
        try:
            async with asyncio.timeout(START_LIMIT):
                report = await self._next_report()
        except TimeoutError:
            raise SandboxError(f"A sandbox was not built after {START_LIMIT:g} s.") from None
        if report is not None and "refused" in report:
            raise SandboxError(
                f"This system does not let a sandbox be closed: {', '.join(report['refused'])} was required, and does not hold. "
                "Run on Linux with Landlock and user namespaces, or require less."
            )
        if report is None or "begun" not in report:
            await self._drain_output()
            problem = (report or {}).get("broken") or self._streams[1].text() or "it said nothing"
            raise SandboxError(f"A sandbox could not be built: {_last_line(problem)}")
        self._held = {name: tuple(mechanisms) for name, mechanisms in report["begun"].items()}
        self._since = time.monotonic()
        return self._held

    async def result(self) -> Result:
        """Wait until the program has ended or its time is over. Raises SandboxError if the box could not be built."""
        protections = await self.wait_until_running()
        code: int | None = None
        ending: Ending = "timed_out"
        with suppress(TimeoutError):
            async with asyncio.timeout(self._since + self._limits.seconds - time.monotonic()):
                code = await self._exit_code()
                if code != -signal.SIGXCPU:
                    ending = "killed" if code < 0 else "failed" if code else "finished"
        seconds = time.monotonic() - self._since
        self._control.close()
        await self._drain_output()
        output, errors = (bytes(stream.kept) for stream in self._streams)
        cut = self._streams[0].cut
        return Result(ending, code, output, errors, cut, seconds, protections)

    async def _exit_code(self) -> int:
        """The program's exit code, returned once the warden reports that no process is left; −SIGKILL if its first process was killed."""
        code = -signal.SIGKILL
        while (report := await self._next_report()) is not None and "over" not in report:
            code = report["ended"]
        return code

    async def _next_report(self) -> dict[str, Any] | None:
        """The warden's next report; None if there is none."""
        while (frame := self._buffer.take()) is None:
            piece = b""
            with suppress(OSError):
                piece = await asyncio.get_running_loop().sock_recv(self._control, 1 << 16)
            if not piece:
                return None
            self._buffer.add(piece)
        return json.loads(frame)

    async def _drain_output(self) -> None:
        """Wait for the rest of the output, which ends with the last process of the box."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_LIMIT):
                for stream in self._streams:
                    await stream.wait_for_end()

    def _start_warden(self, warden_end: socket.socket) -> subprocess.Popen[bytes]:
        """Starts the warden. Its interpreter finds the standard library and this package, but no site packages and no secrets."""
        numbers = [warden_end.fileno(), *(channel.fileno() for channel in self._channels)]
        stdin_file = self._folder / "stdin"
        stdin_file.write_bytes(self._stdin)
        with stdin_file.open("rb") as stdin:  # read-only: the file is on a disk without a limit
            stdin_file.unlink()
            variables = {name: os.environ[name] for name in _KEPT if name in os.environ}
            home = str(self._folder / "home")
            paths = {"HOME": home, "TMPDIR": home, "PYTHONPATH": str(_PACKAGE)}
            return subprocess.Popen(
                [
                    sys.executable,
                    *_BARE,
                    "-m",
                    "groupwise.tasks.rewards.sandbox_child",
                    str(numbers[0]),
                ],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=numbers,
                start_new_session=True,
                cwd=self._folder,
                env={**variables, **_ENVIRONMENT, **paths, MARK: self._mark},
            )


class _Stream:
    """One output stream of a program: all of it is read, only the beginning is kept."""

    def __init__(self, pipe: IO[bytes], limit: int) -> None:
        self.kept = bytearray()
        self.cut = False
        self._pipe = pipe
        self._limit = limit
        self._transport: asyncio.BaseTransport | None = None

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        self._transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), self._pipe
        )
        self._task = asyncio.create_task(self._read_stream(reader))

    async def _read_stream(self, reader: asyncio.StreamReader) -> None:
        while piece := await reader.read(1 << 16):
            room = self._limit - len(self.kept)
            self.kept += piece[:room]
            self.cut = self.cut or len(piece) > room

    async def wait_for_end(self) -> None:
        """Wait for the end of the stream."""
        await asyncio.shield(self._task)

    def text(self) -> str:
        """The kept output as text."""
        return self.kept.decode(errors="replace")

    def close(self) -> None:
        """Stop reading."""
        if self._transport is None:
            self._pipe.close()
            return
        self._task.cancel()
        self._transport.close()


_BARE = ("-s", "-S", "-P", "-B")
"""No site packages, no script folder on the path, no bytecode files. `-I` is not used, because it would ignore PYTHONHASHSEED."""
_ENVIRONMENT = {
    "LANG": "C.UTF-8",
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "PYTHONHASHSEED": "0",  # makes the order of sets deterministic
    "PYTHONUTF8": "1",
}
_KEPT = ("LD_LIBRARY_PATH",)
"""Environment variables that are kept: without them some interpreters do not start."""
_PACKAGE = Path(__file__).parents[3]
"""Folder that this package is imported from."""
_USERS = range(1 << 30, 1 << 31)
"""User ids that normally do not exist."""


def _free_user() -> int:
    """A user id without files or processes, different from that of any concurrent box; the own id unless this process is root."""
    if os.geteuid() != 0:
        return os.geteuid()
    top = min(_USERS.stop, _highest_user() + 1)
    low = min(_USERS.start, top // 2)
    for _ in range(100):
        user = low + secrets.randbelow(max(1, top - low))
        try:
            pwd.getpwuid(user)
        except KeyError:
            return user
    return 0


def _highest_user() -> int:
    """The highest user id of this system or container."""
    try:
        ranges = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    except OSError:
        return (1 << 16) - 3
    return max(int(first) + int(count) - 1 for first, _, count in ranges)


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def _delete_tree(folder: Path) -> None:
    """Delete files that a program left, including unreadable folders and folders nested deeper than any path can be.

    Each level is emptied by moving its folders up, so paths never grow.
    """
    pending = [entry.path for entry in os.scandir(folder)]
    count = 0
    with suppress(OSError):  # some files may remain in the folder for temporary files
        while pending:
            directory = pending.pop()
            os.chmod(directory, 0o700)
            for entry in os.scandir(directory):
                if entry.is_dir(follow_symlinks=False):
                    os.chmod(entry.path, 0o700)
                    count += 1
                    pending.append(str(folder / f"{count}"))
                    os.rename(entry.path, pending[-1])
                else:
                    os.unlink(entry.path)
            os.rmdir(directory)
        folder.rmdir()
