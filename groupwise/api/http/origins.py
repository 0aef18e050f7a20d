"""Finds out where a request comes from: this machine, and which page made a browser send it, as far as the browser says so.

A browser sends the cookies that it has of a site, and reaches this machine by loopback, whatever page asks it to. Only what it says of
that page tells ours from another: `Sec-Fetch-Site`, or in an older browser `Origin` and `Referer`. No page can change these.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

from groupwise.api.schemas.problems import Refusal

_OF_A_PROXY = ("x-forwarded-for", "x-real-ip", "forwarded")


def is_loopback(host: str) -> bool:
    """True if a name or address always leads to this machine."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_from_our_page(headers: Mapping[str, str]) -> bool | None:
    """True if a page of this host sent it; None: no page, but a program or a typed address.

    On a secure connection the browser says so outright, whatever a proxy makes of the host's name; else the page's host is
    compared with the requested one.
    """
    if site := headers.get("sec-fetch-site"):
        return None if site == "none" else site == "same-origin"
    page = headers.get("origin") or headers.get("referer")
    if page is None:
        return None
    try:
        return urlsplit(page).netloc.lower() == headers.get("host", "").lower()
    except ValueError:
        return False


def check_local(headers: Mapping[str, str]) -> None:
    """Refuse requests that a page of another site has a browser of this machine send: without a key nothing else tells them apart.

    A link to a page of ours may stand anywhere. If the name of another site was made to lead to this machine, it stands as the Host.
    What a proxy passes on comes from anywhere, and its Host may be ours.
    """
    if any(name in headers for name in _OF_A_PROXY):
        raise Refusal(
            "forbidden",
            "The server had no key when it began, so that it answers nothing that a proxy passes on. Make a key, and restart it.",
        )
    host = urlsplit(f"//{headers.get('host', '')}").hostname or ""
    if not is_loopback(host):
        raise Refusal(
            "forbidden",
            "The server has no key, so that it answers only requests to this machine by name: localhost or 127.0.0.1. "
            "Give it a key to reach it under other names.",
        )
    # A link may lead to a page of its own here; a form would name its Origin.
    follows_link = (
        headers.get("sec-fetch-mode") == "navigate"
        and headers.get("sec-fetch-dest") == "document"
        and "origin" not in headers
    )
    if is_from_our_page(headers) is False and not follows_link:
        raise Refusal(
            "forbidden",
            "The server has no key, so that it answers no pages of other sites or ports.",
        )
