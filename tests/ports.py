"""Free ports for servers that need a port number before they bind it."""

from __future__ import annotations

import random
import socket

NOT_EPHEMERAL = range(20_000, 32_000)
"""Ports that Linux gives no connection and no one who asks for any port, so that none of them is taken between the question and its use."""
_random = random.SystemRandom()


def free_port(address: str = "127.0.0.1") -> int:
    """A port that is not bound on this address."""
    while True:
        port = _random.choice(NOT_EPHEMERAL)
        with socket.socket() as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue
            return port
