"""Messages on a stream socket: eight bytes of length, then so many bytes."""

from __future__ import annotations

import socket
import struct

_LENGTH = struct.Struct(">Q")
MAX_BYTES = 1 << 38
"""A longer announced length can only be rubbish on the line; weights with moments that go to another machine are shorter."""


def send_frame(connection: socket.socket, payload: bytes) -> None:
    """Send one message; blocks as long as the socket's time-out allows."""
    connection.sendall(framed(payload))


def framed(payload: bytes) -> bytes:
    """One message as it is sent."""
    return _LENGTH.pack(len(payload)) + payload


class FrameBuffer:
    """Puts messages together from the pieces in which they arrive."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, piece: bytes) -> None:
        """Take what has arrived."""
        self._bytes += piece

    def take(self) -> bytes | None:
        """The next whole message, or None if it has not all arrived. Raises ValueError for an impossible length."""
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
