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
from groupwise.engine.distributed.handshake import (
    UnknownCallerError,
    read_attempt_secret,
    server_handshake,
)
from groupwise.engine.distributed.messages import MessageChannel, RankSetup
from groupwise.engine.distributed.rpc import RESUME_HINT, explain_exit
from groupwise.engine.distributed.spawned_workers import LOCALHOST, SpawnedWorkers
from groupwise.engine.distributed.torchrun import TorchrunRank, enable_keepalive

logger = logging.getLogger(__name__)

_LOADS = frozenset({"learner.load", "sampler.load", "local_policy.read"})
"""Calls that read a folder."""
_SENT_SUFFIXES = (".safetensors", ".json")
_TOKEN_DIGITS = 32
"""Hexadecimal digits of the token that replaces a secret if the ranks have none."""


class LearnerWorkers(SpawnedWorkers):
    """`count` worker processes; with `launch`, all but the first were started by torchrun. If they are `learning` and several, they join
    one process group before they make the hosted object."""

    def __init__(self, count: int, launch: TorchrunRank | None, *, learning: bool) -> None:
        super().__init__(count, "learner")
        self._launch = launch
        self._learning = learning and count > 1
        self._rendezvous_socket: socket.socket | None = None
        self._call_socket: socket.socket | None = None
        self._secret = None if launch is None else read_attempt_secret()
        self._token = "" if self._secret else secrets.token_hex(_TOKEN_DIGITS // 2)

    def _start_call(
        self, rank: int, name: str, arguments: tuple[Any, ...]
    ) -> tuple[int, Future[Any]]:
        if name in _LOADS and self._launch is not None and self._launch.elsewhere(rank):
            (source,) = arguments
            folder = Path(getattr(source, "path", source))
            files = [
                file
                for file in folder.iterdir()
                if file.suffix in _SENT_SUFFIXES and file.is_file()
            ]
            contents = {file.name: file.read_bytes() for file in files}
            name, arguments = "load_sent", (name, source, contents)
        return super()._start_call(rank, name, arguments)

    # --- run by the thread -----------------------------------------------------------------------

    def _launch_workers(self) -> None:
        self._rendezvous_socket = socket.create_server((self._host, 0))
        if self._launch is not None:
            self._call_socket = socket.create_server((self._host, 0))
            self._selector.register(self._call_socket, selectors.EVENT_READ)
        for rank in range(1 if self._launch else self.count):
            self._start_rank(rank)

    @property
    def _host(self) -> str:
        """Address on which this machine listens: all interfaces if ranks call from other machines."""
        return "" if self._launch and self._launch.machines > 1 else LOCALHOST

    def _environment_defaults(self) -> dict[str, str]:
        near = self._launch is None or self._launch.machines == 1
        return {"GLOO_SOCKET_IFNAME": "lo"} if near and sys.platform.startswith("linux") else {}

    def _accept_caller(self) -> None:
        """Accept a rank that calls; reject a caller that does not know the secret. Stop listening once all ranks have called."""
        assert self._call_socket is not None
        connection, caller = self._call_socket.accept()
        try:
            rank, seal = server_handshake(connection, self._secret or self._token.encode())
            if rank not in range(1, self.count) or rank in self._by_rank:
                raise UnknownCallerError(f"rank {rank} is not waited for")
        except (OSError, ValueError) as error:
            connection.close()
            logger.warning(
                "Somebody at %s called as a learner of this run, and was not let in: %s",
                caller[0],
                error,
            )
            return
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        enable_keepalive(connection)
        self._send_setup(rank, MessageChannel(connection, seal))
        if len(self._by_rank) == self.count:
            self._selector.unregister(self._call_socket)
            self._call_socket.close()

    def _setup_of(self, rank: int) -> tuple[RankSetup, list[socket.socket]]:
        assert self._setup is not None
        assert self._rendezvous_socket is not None
        port = self._rendezvous_socket.getsockname()[1]
        host = self._launch.host if self._launch and self._launch.machines > 1 else LOCALHOST
        calls = None
        if rank == 0 and self._call_socket is not None:
            calls = f"{host} {self._call_socket.getsockname()[1]} {self._token}".rstrip()
        meeting = (host, port) if self._learning else None
        handed = [self._rendezvous_socket] if rank == 0 and self._learning else []
        return RankSetup(rank, self.count, self._setup, meeting, calls, sends_log=rank == 0), handed

    def _handle_disconnect(self, rank: int) -> WorkerLostError:
        worker = f"Learner {rank + 1} of {self.count} (distributed.learners) ended"
        if rank not in self._started:
            return WorkerLostError(
                f"{worker}, or its machine, which torchrun's log tells. {RESUME_HINT}"
            )
        code, words = self._reap(rank)
        return WorkerLostError(f"{worker}: {explain_exit(code)} {RESUME_HINT}{words}")

    def _end_all(self) -> None:
        super()._end_all()
        for listener in (self._rendezvous_socket, self._call_socket):
            if listener is not None:
                listener.close()
