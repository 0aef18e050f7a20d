"""The main process's side of learners that each have their own model: one on each GPU, or on several machines.

On one machine this module starts them. Under torchrun, the process of rank 0 runs the whole program and starts a worker for that rank on
the same machine; torchrun has started the others already. These read from torchrun's store which address to call, and are accepted once
each side has verified the other (`groupwise.engine.distributed.handshake`). After that the two cases do not differ: calls are sent over
connections, and the ranks add up their gradients among themselves (`groupwise.engine.learner.collective`).

If one of them ends, all others are ended, and every call then fails with the reason. Other machines have other disks, so files to load
are sent with the call.
"""

from __future__ import annotations

import logging
import secrets
import selectors
import socket
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from groupwise.core.errors import WorkerLostError
from groupwise.engine.distributed.handshake import Stranger, admit, secret_of_attempt
from groupwise.engine.distributed.messages import MessageChannel, PeerSetup
from groupwise.engine.distributed.rpc import RESUME, how
from groupwise.engine.distributed.spawned_workers import HERE, Started
from groupwise.engine.distributed.torchrun import Launched, watch_for_silence

logger = logging.getLogger(__name__)

_LOADS = frozenset({"learner.load", "sampler.load"})
"""Calls that read a folder."""
_READ = (".safetensors", ".json")
_WORD = 32
"""Hexadecimal digits of the token that replaces a secret if the ranks have none."""


class Peers(Started):
    """`count` worker processes; with `place`, all but the first were started by torchrun. If they are `learning` and several, they join one
    process group before they make the hosted object."""

    def __init__(self, count: int, place: Launched | None, *, learning: bool) -> None:
        super().__init__(count, "learner")
        self._place = place
        self._learning = learning and count > 1
        self._meeting: socket.socket | None = None
        self._door: socket.socket | None = None
        self._given = None if place is None else secret_of_attempt()
        self._word = "" if self._given else secrets.token_hex(_WORD // 2)

    def _ask(self, rank: int, name: str, arguments: tuple[Any, ...]) -> tuple[int, Future[Any]]:
        if name in _LOADS and self._place is not None and self._place.elsewhere(rank):
            (given,) = arguments
            folder = Path(getattr(given, "path", given))
            files = [file for file in folder.iterdir() if file.suffix in _READ and file.is_file()]
            contents = {file.name: file.read_bytes() for file in files}
            name, arguments = "load_sent", (name, given, contents)
        return super()._ask(rank, name, arguments)

    # --- run by the thread -----------------------------------------------------------------------

    def _open(self) -> None:
        self._meeting = socket.create_server((self._host, 0))
        if self._place is not None:
            self._door = socket.create_server((self._host, 0))
            self._selector.register(self._door, selectors.EVENT_READ)
        for rank in range(1 if self._place else self.count):
            self._start(rank)

    @property
    def _host(self) -> str:
        """Address on which this machine listens: all interfaces if ranks call from other machines."""
        return "" if self._place and self._place.machines > 1 else HERE

    def _environment_defaults(self) -> dict[str, str]:
        near = self._place is None or self._place.machines == 1
        return {"GLOO_SOCKET_IFNAME": "lo"} if near and sys.platform.startswith("linux") else {}

    def _accept_caller(self) -> None:
        """Accept a rank that calls; reject a caller that does not know the secret. Stop listening once all ranks have called."""
        assert self._door is not None
        connection, caller = self._door.accept()
        try:
            rank, seal = admit(connection, self._given or self._word.encode())
            if rank not in range(1, self.count) or rank in self._by_rank:
                raise Stranger(f"rank {rank} is not waited for")
        except (OSError, ValueError) as error:
            connection.close()
            logger.warning(
                "Somebody at %s called as a learner of this run, and was not let in: %s",
                caller[0],
                error,
            )
            return
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        watch_for_silence(connection)
        self._send_setup(rank, MessageChannel(connection, seal))
        if len(self._by_rank) == self.count:
            self._selector.unregister(self._door)
            self._door.close()

    def _setup_of(self, rank: int) -> tuple[PeerSetup, list[socket.socket]]:
        assert self._made is not None
        assert self._meeting is not None
        port = self._meeting.getsockname()[1]
        host = self._place.host if self._place and self._place.machines > 1 else HERE
        calls = None
        if rank == 0 and self._door is not None:
            calls = f"{host} {self._door.getsockname()[1]} {self._word}".rstrip()
        meeting = (host, port) if self._learning else None
        handed = [self._meeting] if rank == 0 and self._learning else []
        return PeerSetup(rank, self.count, self._made, meeting, calls, tells=rank == 0), handed

    def _handle_end(self, rank: int) -> WorkerLostError:
        who = f"Learner {rank + 1} of {self.count} (distributed.learners) ended"
        if rank not in self._started:
            return WorkerLostError(f"{who}, or its machine, which torchrun's log tells. {RESUME}")
        code, words = self._reap(rank)
        return WorkerLostError(f"{who}: {how(code)} {RESUME}{words}")

    def _end_all(self) -> None:
        super()._end_all()
        for each in (self._meeting, self._door):
            if each is not None:
                each.close()
