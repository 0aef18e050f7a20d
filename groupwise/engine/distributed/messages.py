"""Messages between the main process, the zygote and its ranks. They are pickled, because all of these processes trust each other. Messages
over a network are verified by their seal (`groupwise.engine.distributed.handshake`).

The main process may send `Call`s to the zygote, each answered by `CallResult` or `CallFailure` with its number. It then sends `Setup`,
with a socket for each rank. The zygote sends `Ready` or `CallFailure`, `LogRecordMessage`, and `RankEnded` when a rank has ended. To a
rank the main process sends `Call` and `Cancel`; the rank sends `CallResult` or `CallFailure`, and `LogRecordMessage`.

A rank with its own model first receives `RankSetup`, which it answers with `Ready` or `CallFailure`, and finally `Shutdown`. It sends
`Heartbeat` at regular intervals if `RankSetup.heartbeat_interval` is set.
"""

from __future__ import annotations

import logging
import pickle
import socket
import struct
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from groupwise.core.errors import GroupwiseError, RunError
from groupwise.core.plugins import explain
from groupwise.core.processes.frames import FrameBuffer, add_frame
from groupwise.engine.distributed.handshake import Seal

_PIECE = 1 << 20
"""Bytes to read at once."""
_MAX_SOCKETS = 253
"""Most sockets that one `sendmsg` can pass to another process (a limit of Linux)."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Describes the object that the zygote must make. As many ranks host it as sockets come with the message."""

    factory: str
    """`package.module:function`; its result is hosted, see `groupwise.engine.distributed.rank`."""
    arguments: dict[str, Any]
    """Keyword arguments for `factory`; expressible as JSON."""
    sys_path: tuple[str, ...]
    log_level: int
    """Log records of the package below this level are not sent."""


@dataclass(frozen=True, slots=True)
class RankSetup:
    """Setup of one rank that has its own model."""

    rank: int
    count: int
    setup: Setup
    rendezvous: tuple[str, int] | None
    """Host and port at which the ranks form their process group; the first rank's listening socket comes with the message."""
    announced_address: str | None = None
    """The address that the first rank under torchrun announces to the others: host, port, and a generated token if they have no configured
    secret, separated by spaces."""
    sends_log: bool = False
    """True if the rank sends its log records. Only the first one does; the others would log the same."""
    heartbeat_interval: float | None = None
    """Seconds between two `Heartbeat` messages; None: the rank sends none."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """The work is done; the rank should end normally."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The ranks have been started."""

    processes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankEnded:
    """A rank has ended, which is always an error."""

    rank: int
    code: int
    """Exit code, as in `subprocess.Popen.returncode`."""


@dataclass(frozen=True, slots=True)
class LogRecordMessage:
    """A record of the package's log."""

    record: logging.LogRecord


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Heartbeat: the rank's event loop is not blocked."""


@dataclass(frozen=True, slots=True)
class Call:
    """Asks a rank to call a method of its hosted object or return an attribute of it, or the zygote to call a function."""

    number: int
    name: str
    """For a rank a path of attributes, such as `learner.update`; a callable is called, and awaited if necessary. For the zygote
    `package.module:function`."""
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    """The caller no longer waits for the call with this number."""

    number: int


@dataclass(frozen=True, slots=True)
class CallResult:
    """The result of a call."""

    number: int
    value: Any


@dataclass(frozen=True, slots=True)
class CallFailure:
    """The error that a call raised; `number` is 0 if the hosted object could not be made."""

    number: int
    error: BaseException


class MessageChannel:
    """One end of a connection: whole messages, in the order in which they were sent."""

    def __init__(self, connection: socket.socket, seal: Seal | None = None) -> None:
        """`seal` is given for a connection over a network."""
        self._connection = connection
        self._seal = seal
        self._buffer = FrameBuffer()
        self._taken_over: list[socket.socket] = []
        self._sending = threading.Lock()

    def set_send_timeout(self, seconds: float) -> None:
        """Set a send timeout: if the other end receives nothing for this many seconds, the connection ends and `send` raises OSError."""
        whole_seconds, microseconds = int(seconds), int(seconds % 1 * 1e6)
        limit = struct.pack("@ll", whole_seconds, microseconds)
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def fileno(self) -> int:
        """File descriptor for selectors."""
        return self._connection.fileno()

    def send(self, message: object, sockets: Sequence[socket.socket] = ()) -> None:
        """Send a message, and pass `sockets` to the other process. Safe from any thread. Raises OSError if the other end is gone."""
        pickled = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with self._sending:
            frame = add_frame(pickled if self._seal is None else self._seal.code(pickled) + pickled)
            for start in range(0, len(sockets), _MAX_SOCKETS):
                descriptors = [sock.fileno() for sock in sockets[start : start + _MAX_SOCKETS]]
                frame = frame[socket.send_fds(self._connection, [frame[:1]], descriptors) :]
            try:
                self._connection.sendall(frame)
            except BlockingIOError:
                self.end()  # part of a frame may have been sent, so a later frame could not be told apart from its rest
                raise

    def taken_over(self) -> list[socket.socket]:
        """Sockets received with messages since the last call."""
        sockets, self._taken_over = self._taken_over, []
        return sockets

    def receive(self) -> Any:
        """Wait for the next message and return it. Raises EOFError if the other end is gone."""
        while (frame := self._buffer.take()) is None:
            self._receive_piece()
        return self._unpickle(frame)

    def receive_available(self) -> list[Any]:
        """All messages that are complete after one more read; data must be available. Raises EOFError like `receive`."""
        self._receive_piece()
        messages: list[Any] = []
        while (frame := self._buffer.take()) is not None:
            messages.append(self._unpickle(frame))
        return messages

    def end(self) -> None:
        """End the connection for both sides, from any thread."""
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # the other side has closed it already
            return

    def close(self) -> None:
        """Close this process's copy of this end."""
        self._connection.close()

    def _unpickle(self, frame: bytes) -> Any:
        return pickle.loads(frame if self._seal is None else self._seal.open(frame))

    def _receive_piece(self) -> None:
        try:
            piece, descriptors, _, _ = socket.recv_fds(self._connection, _PIECE, _MAX_SOCKETS)
        except ConnectionError as error:
            raise EOFError from error
        if not piece:
            raise EOFError
        self._buffer.add(piece)
        self._taken_over += [socket.socket(fileno=descriptor) for descriptor in descriptors]


def picklable_error(error: BaseException) -> BaseException:
    """The error in a form that can be pickled; one that is not a GroupwiseError carries its traceback as a note."""
    if not isinstance(error, GroupwiseError):
        error.add_note("In a model worker:\n" + "".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 — errors of libraries may fail to pickle in any way
        return RunError(f"A model worker failed:\n{explain(error)}")
    return error
