"""Ports of services that are begun here."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A loopback port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]
