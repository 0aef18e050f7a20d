"""Which addresses lead to this machine and nowhere else."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether a name or address is always this machine."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
