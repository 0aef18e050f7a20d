"""Recognises addresses that always lead to this machine."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """True if a name or address is always this machine."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
