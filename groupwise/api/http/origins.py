"""Finds out where a request comes from: whether from this machine, and which web page made the browser send it.

A browser sends a site's cookies, and reaches this machine by loopback, for any page that asks it to (cross-site request forgery). Only
headers tell our pages from others: `Sec-Fetch-Site`, or in older browsers `Origin` and `Referer`. No page can change these.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from groupwise.api.schemas.problems import Refusal
from groupwise.core.loopback import is_loopback

_OF_A_PROXY = ("x-forwarded-for", "x-real-ip", "forwarded")


def is_from_our_page(headers: Mapping[str, str]) -> bool | None:
    """True if a page of this host sent it, False if another site's page did; None: no page, but a program or a typed address.

    On a secure connection the browser states this in `Sec-Fetch-Site`, which holds even if a proxy changes the host's name. Otherwise
    the page's host is compared with the requested one.
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
    """Refuse requests that another site's page makes a local browser send: on a server without a key, nothing else distinguishes them.

    A link to one of our pages is allowed from anywhere. If a foreign name was made to resolve to this machine (DNS rebinding), that name
    is in the Host header. Requests through a proxy may come from anywhere although their Host is ours, so they are refused.
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
    # A link may lead to one of our pages; a form would send its Origin.
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
