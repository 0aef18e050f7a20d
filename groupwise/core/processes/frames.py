"""Messages on a stream socket: eight bytes with the length, then that many bytes."""

from __future__ import annotations

import socket
import struct

_LENGTH = struct.Struct(">Q")
MAX_BYTES = 1 << 38
"""A greater length can only be garbage; even model weights with optimiser moments, sent to another machine, are shorter."""


def send_frame(connection: socket.socket, payload: bytes) -> None:
    """Send one message; blocks as long as the socket's timeout allows."""
    connection.sendall(add_frame(payload))


def add_frame(payload: bytes) -> bytes:
    """One message with its length in front."""
    return _LENGTH.pack(len(payload)) + payload


class FrameBuffer:
    """Assembles messages from the pieces in which they arrive."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, piece: bytes) -> None:
        """Add bytes that have arrived."""
        self._bytes += piece

    def take(self) -> bytes | None:
        """The next complete message; None if it is incomplete. Raises ValueError for an impossible length."""
        if len(self._bytes) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._bytes)
        if length > MAX_BYTES:
            raise ValueError(f"a message of {length} bytes was announced")
        end = _LENGTH.size + length
        if len(self._bytes) < end:
            return None
        frame = bytes(self._bytes[_LENGTH.size : end])
        del self._bytes[:end]
        return frame
