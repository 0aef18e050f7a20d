"""The main process's side of ranks that each have a model of their own: one on each GPU, or on several machines.

On one machine they are started here. Under torchrun the process of its rank 0 runs the whole program and starts that rank beside it; the
others, which are there already, hear by torchrun's store where to call, and are let in by a word that only they were told. From then on
there is no difference: calls go over lines, gradients are added up among the ranks (`groupwise.learner.collective`).

A thread of its own starts them, and lives as long as they do, because the kernel's parent-death signal goes by threads. The end of a line
is the end of its rank; it ends all others, and every call then fails with the reason. Machines that are elsewhere have other disks: what
they are to load is sent with the call.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import selectors
import signal
import socket
import sys
import threading
from asyncio import wrap_future
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, Popen, TimeoutExpired
from typing import Any

from groupwise.errors import RunError, WorkerLostError
from groupwise.plugins import explain
from groupwise.ranks.calls import ENVIRONMENT, RESUME, Calls, how, log_here, settle
from groupwise.ranks.launched import Launched, gpu_of
from groupwise.ranks.line import Answered, Failed, Leave, Line, PeerSetup, Ready, Setup, Told
from groupwise.ranks.peer import GREETING
from groupwise.rewards.output import Output
from groupwise.rewards.processes import NO_GPU

_END_LIMIT = 10.0
"""Seconds that killed processes may take to end (they may hang in the kernel)."""
_HERE = "127.0.0.1"
_LOADS = frozenset({"learner.load", "sampler.load"})
"""Calls that read a folder."""
_READ = (".safetensors", ".json")
_QUIET = 30
"""Seconds after which a quiet machine is asked whether it is there; twice as long without an answer, and it is lost."""
_WORD = 32
"""Bytes of the word that lets ranks in."""


class Peers(Calls):
    """`count` worker processes that each make the same and host it; of `place`'s torchrun, where that has started them."""

    def __init__(self, count: int, place: Launched | None) -> None:
        super().__init__()
        self.count = count
        self._place = place
        self._by_rank: dict[int, Line] = {}
        self._started: dict[int, Popen[bytes]] = {}
        self._outputs: list[Output] = []
        self._pids: dict[int, int] = {}
        self._setup: tuple[Setup, bool] | None = None
        self._meeting: socket.socket | None = None
        self._door: socket.socket | None = None
        self._word = secrets.token_hex(_WORD // 2)
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._attend, name="peers", daemon=True)

    async def make(self, factory: str, arguments: Mapping[str, Any], *, learning: bool) -> None:
        """As `groupwise.ranks.tree.Ranks.make`; where they are `learning`, they meet before they make anything."""
        self._begin(factory, arguments, learning)
        try:
            await wrap_future(self._ready)
        except BaseException:
            self.close()
            raise

    def make_now(self, factory: str, arguments: Mapping[str, Any], *, learning: bool) -> None:
        """As `make`, for code that is not async."""
        self._begin(factory, arguments, learning)
        try:
            self._ready.result()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """See `Calls.close`. What torchrun has started ends by itself, and well."""
        if self._fail_all(RunError("The model workers are closed.")):
            for line in self._by_rank.values():
                with suppress(OSError):
                    line.send(Leave())
            with suppress(OSError):  # they have ended by themselves
                self._wake.sendall(b".")
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._wake.close()

    def _begin(self, factory: str, arguments: Mapping[str, Any], learning: bool) -> None:
        setup = Setup(
            factory,
            json.loads(json.dumps(dict(arguments))),
            tuple(str(folder) for folder in sys.path),
            logging.getLogger("groupwise").getEffectiveLevel(),
        )
        self._setup = setup, learning
        self._thread.start()

    def _begin_call(self) -> None:
        for output in self._outputs:
            output.begin_call()

    def _ask(self, rank: int, name: str, arguments: tuple[Any, ...]) -> tuple[int, Future[Any]]:
        if name in _LOADS and self._place is not None and self._place.elsewhere(rank):
            (given,) = arguments
            name, arguments = "load_sent", (name, given, _read(Path(getattr(given, "path", given))))
        return super()._ask(rank, name, arguments)

    # --- what runs in the thread -----------------------------------------------------------------

    def _attend(self) -> None:
        try:
            reason = self._lived()
        except RunError as error:
            reason = error
        except BaseException as error:  # noqa: BLE001 — whoever waits for a call would wait for ever
            reason = RunError(
                f"What the model workers say cannot be taken:\n{explain(error)}\n{RESUME}"
            )
            reason.__cause__ = error
        finally:
            self._end_all()
        self._fail_all(reason)

    def _lived(self) -> RunError:
        """Start them and listen until one has ended, or all are to end."""
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._meeting = socket.create_server((self._host, 0))
        if self._place is not None:
            self._door = socket.create_server((self._host, 0))
            self._selector.register(self._door, selectors.EVENT_READ)
        for rank in range(1 if self._place else self.count):
            self._start(rank)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._woken:
                    return RunError("The model workers are closed.")
                if key.fileobj is self._door:
                    self._let_in()
                    continue
                rank: int = key.data
                try:
                    messages = self._by_rank[rank].arrived()
                except EOFError:
                    return self._lost(rank)
                for message in messages:
                    self._take(rank, message)

    @property
    def _host(self) -> str:
        """At which interface this machine listens: at all of them where ranks call from others."""
        return "" if self._place and self._place.machines > 1 else _HERE

    def _start(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._started[rank] = self._popen(rank, theirs.fileno())
        self._outputs.append(Output(self._started[rank], f"learner {rank + 1}"))
        self._know(rank, Line(ours))

    def _popen(self, rank: int, descriptor: int) -> Popen[bytes]:
        assert self._setup is not None
        on_cpu = self._setup[0].arguments["layout"]["device"] == "cpu"
        seen = NO_GPU if on_cpu else gpu_of(rank)
        near = self._place is None or self._place.machines == 1
        own = {"GLOO_SOCKET_IFNAME": "lo"} if near and sys.platform.startswith("linux") else {}
        words = (str(os.getpid()), str(descriptor))
        try:
            return Popen(
                [sys.executable, "-P", "-m", "groupwise.ranks.peer", *words],
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=STDOUT,
                pass_fds=[descriptor],
                start_new_session=True,
                env={**own, **os.environ, **ENVIRONMENT, **seen},
            )
        except OSError as error:
            raise RunError(f"The model workers cannot be started: {error}") from error

    def _let_in(self) -> None:
        """Take a rank that calls; whoever does not know the word is not heard."""
        assert self._door is not None
        connection, _ = self._door.accept()
        connection.settimeout(GREETING)
        try:
            word, _, rank = _exactly(connection, _WORD + 9).decode().partition(" ")
            if not secrets.compare_digest(word.encode(), self._word.encode()):
                raise ValueError(word)
            number = int(rank)
        except (OSError, ValueError):
            connection.close()
            return
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _watch_for_silence(connection)
        self._know(number, Line(connection))

    def _know(self, rank: int, line: Line) -> None:
        """Tell a rank what it is to be."""
        assert self._setup is not None
        assert self._meeting is not None
        setup, learning = self._setup
        port = self._meeting.getsockname()[1]
        host = self._place.host if self._place and self._place.machines > 1 else _HERE
        calls = None
        if rank == 0 and self._door is not None:
            calls = f"{host} {self._door.getsockname()[1]} {self._word}"
        meeting = (host, port) if learning else None
        self._by_rank[rank] = line
        self._selector.register(line, selectors.EVENT_READ, rank)
        handed = [self._meeting] if rank == 0 and learning else []
        with suppress(OSError):  # it has ended, which its line tells
            line.send(PeerSetup(rank, self.count, setup, meeting, calls), handed)

    def _take(self, rank: int, message: Ready | Answered | Failed | Told) -> None:
        match message:
            case Told(record):
                log_here(record)
            case Answered(number, value):
                settle(self._awaited(number), value)
            case Failed(0, error):
                settle(self._ready, error=error)
            case Failed(number, error):
                settle(self._awaited(number), error=error)
            case Ready((process,)):
                self._pids[rank] = process
                if len(self._pids) == self.count:
                    self.processes = tuple(self._pids[each] for each in range(self.count))
                    self._lines = [self._by_rank[each] for each in range(self.count)]
                    settle(self._ready)
            case _:
                raise AssertionError(message)

    def _lost(self, rank: int) -> WorkerLostError:
        """Why a rank's line has ended."""
        who = f"Learner {rank + 1} of {self.count} (scale.learners) ended"
        process = self._started.get(rank)
        if process is None:
            return WorkerLostError(f"{who}, or its machine, which torchrun's log tells. {RESUME}")
        with suppress(TimeoutExpired):
            process.wait(1.0)
        words = self._outputs[rank].last_words()
        return WorkerLostError(f"{who}: {how(process.returncode)} {RESUME}{words}")

    def _end_all(self) -> None:
        """End what was started here, and hang up on the others."""
        for process in self._started.values():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        for line in self._by_rank.values():
            line.end()
        for process in self._started.values():
            with suppress(TimeoutExpired):
                process.wait(_END_LIMIT)
        for output in self._outputs:
            output.join()
        for each in (*self._by_rank.values(), self._meeting, self._door, self._woken):
            if each is not None:
                each.close()
        self._selector.close()


def _watch_for_silence(connection: socket.socket) -> None:
    """A machine that lost its power sends no end; the system's own patience is two hours."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform.startswith("linux"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _QUIET)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _QUIET // 3)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 2000 * _QUIET)


def _read(folder: Path) -> dict[str, bytes]:
    """The files of weights and optimiser."""
    found = [file for file in folder.iterdir() if file.suffix in _READ and file.is_file()]
    return {file.name: file.read_bytes() for file in found}


def _exactly(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        piece = connection.recv(count - len(found))
        if not piece:
            raise ConnectionError("it hung up")
        found += piece
    return found
