"""Messages between the main process, the zygote and its ranks: pickled, because all of them are trusted alike. Messages over a
network are verified by their seal (`groupwise.engine.distributed.handshake`).

The main process may send `Call`s to the zygote, each answered by `Answered` or `Failed` with its number, and then sends `Setup`, with a
socket for each rank. The zygote sends `Ready` or `Failed`, `LogRecordMessage`, and `Ended` when a rank has. To a rank it sends `Call` and
`Cancel`; the rank sends `Answered` or `Failed`, and `LogRecordMessage`.

A rank with a model of its own is first sent `PeerSetup`, which it answers with `Ready` or `Failed`, and `Leave` at last. It sends
`Alive` now and then if that was asked for.
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
from groupwise.core.processes.frames import FrameBuffer, framed
from groupwise.engine.distributed.handshake import Seal

_PIECE = 1 << 20
"""Bytes that are read at once."""
_MOST_SOCKETS = 253
"""Sockets that the kernel hands over at once."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The object that the zygote makes, for as many ranks as sockets were handed over."""

    factory: str
    """`package.module:function`; its result is hosted, see `groupwise.engine.distributed.rank`."""
    arguments: dict[str, Any]
    """Its keywords; expressible as JSON."""
    sys_path: tuple[str, ...]
    log_level: int
    """Less important records of the package's log are not sent."""


@dataclass(frozen=True, slots=True)
class PeerSetup:
    """The part of one rank with a model of its own."""

    rank: int
    count: int
    setup: Setup
    meeting: tuple[str, int] | None
    """Host and port at which ranks that learn together meet; the first rank's listening socket comes with the message."""
    calls: str | None = None
    """The address that the first rank under torchrun announces to the others, host and port, and a word in place of a secret if they were
    given none."""
    tells: bool = False
    """True if it sends what the package logs; the others would say the same."""
    beat: float | None = None
    """Seconds between two signs of life; None: it gives none."""


@dataclass(frozen=True, slots=True)
class Leave:
    """The work is done; the rank should end normally."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The ranks have been started."""

    processes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """A rank has ended, which it never does without cause."""

    rank: int
    code: int
    """Exit code, as in `subprocess.Popen.returncode`."""


@dataclass(frozen=True, slots=True)
class LogRecordMessage:
    """A record of the package's log."""

    record: logging.LogRecord


@dataclass(frozen=True, slots=True)
class Alive:
    """A sign of life: the rank's event loop still gets its turn."""


@dataclass(frozen=True, slots=True)
class Call:
    """Asks a rank to call its hosted object or give an attribute of it, or the zygote to call a function."""

    number: int
    name: str
    """A path of attributes for a rank, `learner.update`; a callable there is called, and awaited if need be. For the zygote
    `package.module:function`."""
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    """The caller no longer waits for the call of that number."""

    number: int


@dataclass(frozen=True, slots=True)
class Answered:
    """The result of a call."""

    number: int
    value: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """The error that a call raised; `number` is 0 if the zygote could not make its object."""

    number: int
    error: BaseException


class MessageChannel:
    """One end of a connection: whole messages, in the order in which they were sent."""

    def __init__(self, connection: socket.socket, seal: Seal | None = None) -> None:
        """`seal`: of a connection that goes over a network."""
        self._connection = connection
        self._seal = seal
        self._buffer = FrameBuffer()
        self._taken_over: list[socket.socket] = []
        self._sending = threading.Lock()

    def give_up_after(self, seconds: float) -> None:
        """End the connection if the other end takes nothing for so many seconds; `send` then raises OSError."""
        whole, part = int(seconds), int(seconds % 1 * 1e6)
        limit = struct.pack("@ll", whole, part)
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def fileno(self) -> int:
        """File descriptor for selectors."""
        return self._connection.fileno()

    def send(self, message: object, sockets: Sequence[socket.socket] = ()) -> None:
        """May be called from any thread. The other end is given the sockets, too. OSError if it is gone."""
        pickled = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with self._sending:
            frame = framed(pickled if self._seal is None else self._seal.code(pickled) + pickled)
            for start in range(0, len(sockets), _MOST_SOCKETS):
                handed = [each.fileno() for each in sockets[start : start + _MOST_SOCKETS]]
                frame = frame[socket.send_fds(self._connection, [frame[:1]], handed) :]
            try:
                self._connection.sendall(frame)
            except BlockingIOError:
                self.end()  # half a message may have gone, and what comes after it would be none
                raise

    def taken_over(self) -> list[socket.socket]:
        """The sockets that came with the messages so far."""
        sockets, self._taken_over = self._taken_over, []
        return sockets

    def receive(self) -> Any:
        """The next message, when it comes. Raises EOFError if the other end is gone."""
        while (frame := self._buffer.take()) is None:
            self._receive_piece()
        return self._unpickle(frame)

    def receive_available(self) -> list[Any]:
        """All messages that are complete after one more read; data must be there. EOFError as `receive`."""
        self._receive_piece()
        messages: list[Any] = []
        while (frame := self._buffer.take()) is not None:
            messages.append(self._unpickle(frame))
        return messages

    def end(self) -> None:
        """End the connection for both sides, from any thread."""
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # the other side was faster
            return

    def close(self) -> None:
        """Close this process's copy of this end."""
        self._connection.close()

    def _unpickle(self, frame: bytes) -> Any:
        return pickle.loads(frame if self._seal is None else self._seal.open(frame))

    def _receive_piece(self) -> None:
        try:
            piece, descriptors, _, _ = socket.recv_fds(self._connection, _PIECE, _MOST_SOCKETS)
        except ConnectionError as error:
            raise EOFError from error
        if not piece:
            raise EOFError
        self._buffer.add(piece)
        self._taken_over += [socket.socket(fileno=descriptor) for descriptor in descriptors]


def portable(error: BaseException) -> BaseException:
    """The error as it can be sent; one that is not a GroupwiseError carries its traceback."""
    if not isinstance(error, GroupwiseError):
        error.add_note("In a model worker:\n" + "".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 — errors of libraries may refuse in any way
        return RunError(f"A model worker failed:\n{explain(error)}")
    return error
