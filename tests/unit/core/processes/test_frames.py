"""Messages survive any cutting into pieces."""

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.core.processes.frames import FrameBuffer, send_frame


@given(st.lists(st.binary(max_size=50), max_size=5), st.integers(1, 20))
def test_any_pieces_give_the_messages_back(payloads, size):
    sender, receiver = socket.socketpair()
    with sender, receiver:
        for payload in payloads:
            send_frame(sender, payload)
        sender.close()
        data = b"".join(iter(lambda: receiver.recv(4096), b""))
    buffer, found = FrameBuffer(), []
    for start in range(0, len(data), size):
        buffer.add(data[start : start + size])
        while (frame := buffer.take()) is not None:
            found.append(frame)
    assert found == payloads


def test_impossible_length_is_refused():
    buffer = FrameBuffer()
    buffer.add(b"\xff" * 8)
    with pytest.raises(ValueError, match="was announced"):
        buffer.take()
