"""Lets two processes on a network verify each other. Before that, each reads only a fixed number of bytes from the other.

Both know a secret of the run's attempt: the one that the launcher put into a file on each machine (`groupwise.core.rendezvous`), or else
a token that the first process publishes in torchrun's store, which is then as secret as that store. Each side sends a challenge, and
answers the other's with a code that requires the secret; the secret itself is not sent. Two keys are derived from both challenges, one
for each direction. They seal every message together with its number: a message that a third party sends, changes, repeats or drops is
detected and ends the connection. Nothing is encrypted: anyone who can listen can read the messages.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.core.errors import UsageError
from groupwise.core.rendezvous import KEY_FILE

HANDSHAKE_TIMEOUT = 10.0
"""Time limit of the handshake in seconds."""
_CHALLENGE = 32
_CODE = 32
_RANK = 8
"""Lengths in bytes of a challenge, a code, and a rank in decimals."""


class UnknownCallerError(ConnectionError):
    """The process at the other end does not know the secret."""


class TamperedMessageError(EOFError):
    """A frame was not sent by the other end in this form and order. The connection can no longer be used."""


@dataclass(slots=True)
class Seal:
    """Keys and message counts of one end of a connection."""

    ours: bytes
    """Key for messages that this end sends."""
    theirs: bytes
    sent: int = 0
    """Number of messages sent."""
    opened: int = 0

    def code(self, message: bytes) -> bytes:
        """Authentication code of the next message to send. Counts it as sent."""
        self.sent += 1
        return _seal_code(self.ours, self.sent, message)

    def open(self, frame: bytes) -> memoryview:
        """Verify the next frame and return its message. Raises TamperedMessageError."""
        self.opened += 1
        view = memoryview(frame)
        if not hmac.compare_digest(
            view[:_CODE], _seal_code(self.theirs, self.opened, view[_CODE:])
        ):
            raise TamperedMessageError("what came is not what the other end has sent")
        return view[_CODE:]


def read_attempt_secret(environment: Mapping[str, str] = os.environ) -> bytes | None:
    """The secret in the file that `KEY_FILE` names, or None if it names none. Raises UsageError if the file is unreadable or empty."""
    path = environment.get(KEY_FILE)
    if path is None:
        return None
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise UsageError(f"{KEY_FILE} is {path}, which cannot be read: {error.strerror}.") from None
    if not secret:
        raise UsageError(
            f"{KEY_FILE} is {path}, which is empty: the secret of the job's machines is expected there."
        )
    return secret


def server_handshake(connection: socket.socket, secret: bytes) -> tuple[int, Seal]:
    """The first process's side: returns the caller's rank, and the seal for all further messages. Raises UnknownCallerError, OSError."""
    deadline = _start_clock(connection)
    ours = secrets.token_bytes(_CHALLENGE)
    connection.sendall(ours)
    answer = _receive_exactly(connection, _RANK + _CHALLENGE + _CODE, deadline)
    nonce, code = answer[:-_CODE], answer[-_CODE:]
    challenge = ours + nonce
    if not hmac.compare_digest(code, _handshake_code(secret, b"rank", challenge)):
        raise UnknownCallerError("it does not know the secret")
    connection.sendall(_handshake_code(secret, b"first", challenge))
    connection.settimeout(None)
    return int(nonce[:_RANK]), Seal(
        _handshake_code(secret, b"to rank", challenge),
        _handshake_code(secret, b"to first", challenge),
    )


def client_handshake(connection: socket.socket, secret: bytes, rank: int) -> Seal:
    """The caller's side: sends its rank and verifies the first process. Raises UnknownCallerError, OSError."""
    deadline = _start_clock(connection)
    theirs = _receive_exactly(connection, _CHALLENGE, deadline)
    nonce = b"%08d" % rank + secrets.token_bytes(_CHALLENGE)
    challenge = theirs + nonce
    connection.sendall(nonce + _handshake_code(secret, b"rank", challenge))
    if not hmac.compare_digest(
        _receive_exactly(connection, _CODE, deadline), _handshake_code(secret, b"first", challenge)
    ):
        raise UnknownCallerError(
            "what was called is not the first process of this job: it does not know the secret"
        )
    connection.settimeout(None)
    return Seal(
        _handshake_code(secret, b"to first", challenge),
        _handshake_code(secret, b"to rank", challenge),
    )


def _handshake_code(secret: bytes, use: bytes, challenge: bytes) -> bytes:
    return hmac.digest(secret, use + b"\0" + challenge, "sha256")


def _seal_code(key: bytes, number: int, message: Any) -> bytes:
    code = hmac.new(key, number.to_bytes(8, "big"), "sha256")
    code.update(message)
    return code.digest()


def _start_clock(connection: socket.socket) -> float:
    """Start the handshake's time limit; returns when it ends, in `time.monotonic` seconds."""
    connection.settimeout(HANDSHAKE_TIMEOUT)
    return time.monotonic() + HANDSHAKE_TIMEOUT


def _receive_exactly(connection: socket.socket, count: int, deadline: float) -> bytes:
    received = b""
    while len(received) < count:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("it took too long")
        connection.settimeout(remaining)
        piece = connection.recv(count - len(received))
        if not piece:
            raise ConnectionError("it hung up")
        received += piece
    return received
