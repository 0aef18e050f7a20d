"""Where a server listens."""

import socket

from groupwise.http.listening import bound


def test_small_answers_are_not_held_back_on_their_connections() -> None:
    with bound("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
