"""Recognizes addresses of this machine, and lets HTTP clients connect without a proxy where none may be used.

Many environments set HTTP_PROXY, HTTPS_PROXY and ALL_PROXY to reach the internet. httpx2 uses them for 127.0.0.1 as well, but a proxy fails
there, or reaches its own machine. The same is true of link-local addresses, among them the metadata service of clouds: it answers each
machine for itself. A client with a transport of its own ignores these variables, and still uses SSL_CERT_FILE.
"""

from __future__ import annotations

import ipaddress
import os
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import httpx2

METADATA_SERVICE = "http://169.254.169.254"
"""The address at which clouds tell a machine about itself: its credentials, and whether it will be taken back."""


def is_loopback(host: str) -> bool:
    """True if a name or address always refers to this machine."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_never_proxied(url: str) -> bool:
    """True if the URL's host is this machine, or a link-local address."""
    try:
        host = urlsplit(url).hostname or ""
        return is_loopback(host) or ipaddress.ip_address(host).is_link_local
    except ValueError:  # a name; and the client itself reports an invalid URL
        return False


def async_direct_transport(url: str, **options: Any) -> httpx2.AsyncHTTPTransport | None:
    """A transport without a proxy if none may be used for the URL; None otherwise: the client then uses the proxies of the environment."""
    import httpx2

    return httpx2.AsyncHTTPTransport(**options) if is_never_proxied(url) else None


def direct_transport(url: str, **options: Any) -> httpx2.HTTPTransport | None:
    """`async_direct_transport` for a synchronous client."""
    import httpx2

    return httpx2.HTTPTransport(**options) if is_never_proxied(url) else None


def no_proxy_variables(url: str) -> dict[str, str]:
    """Variables with which clients of other packages use no proxy for a URL that `is_never_proxied`; none for other URLs."""
    if not is_never_proxied(url):
        return {}
    hosts = [os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or "", urlsplit(url).hostname]
    return dict.fromkeys(("no_proxy", "NO_PROXY"), ",".join(filter(None, hosts)))
