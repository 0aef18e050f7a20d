"""Controls access to the dashboard.

    a key, typed once      → a cookie that no script can read, signed with the stored hash of the key: it is valid for a week, survives a
                             restart, and ends with the key; here also when its browser signs out
    a key with each request→ for programs, as the other servers take it
    no keys at all         → everyone on this machine, but no request that a page of another site makes a browser send

Only our own forms can change anything: a form has a token that other sites cannot read, and must be sent by a page of this host. So
links and pages of other sites change nothing, even though a browser sends its cookies with them. And nothing can be changed at all
unless the settings allow it.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from groupwise.api.http.origins import check_local, is_from_our_page
from groupwise.api.http.shared_state import TokenBuckets
from groupwise.api.schemas.keys import LOCAL, Caller, Keyring, Role, caller_of, presented_key
from groupwise.api.schemas.problems import Refusal

COOKIE_LIFETIME = 7 * 86_400
"""Seconds for which a cookie is valid."""
TRIES_PER_SECOND, TRIES_AT_ONCE = 0.5, 10
"""Keys that one address may try: rate per second, and burst."""
MAX_SIGNED_OUT = 10_000
"""Most signed-out cookies that are remembered."""


@dataclass(frozen=True, slots=True)
class Visitor:
    """The sender of a request for a page."""

    caller: Caller
    token: str = field(default="", repr=False)
    """Token for the visitor's forms; empty for a program with a key, because another site cannot make a program send requests."""
    by_cookie: bool = False
    """True if there is a session to sign out of."""


class AccessControl:
    """Access control of one dashboard."""

    def __init__(
        self,
        keys: Keyring | None,
        clock: Callable[[], float] = time.time,
        *,
        allow_actions: bool = False,
        count: Callable[[str], None] = lambda key_id: None,
    ) -> None:
        """`allow_actions`: True if the dashboard may change anything. `count` counts a request of a key; raises `rate_limited`."""
        self._keys, self._clock, self._allow_actions = keys, clock, allow_actions
        self._count = count
        self._form_token = secrets.token_hex(32)
        self._attempts = TokenBuckets(TRIES_PER_SECOND, TRIES_AT_ONCE)
        self._signed_out: dict[str, None] = {}

    @property
    def is_open(self) -> bool:
        """True if no key is needed; then only requests from this machine are answered."""
        return self._keys is None

    def visitor(self, headers: Mapping[str, str], cookie: str | None) -> Visitor | None:
        """The sender of a request, which is counted; None if unknown.

        Raises `unauthorised` for a wrong key, `forbidden` for another site, `rate_limited`.
        """
        if self._keys is None:
            check_local(headers)
            visitor = Visitor(LOCAL, self._form_token)
        elif presented_key(headers) is not None:
            visitor = Visitor(caller_of(self._keys, headers))
        else:
            visitor = self._visitor_of_cookie(self._keys, cookie) if cookie else None
        if visitor is not None:
            self._count(visitor.caller.key_id)
        return visitor

    def admit(self, key: str, address: str) -> str | None:
        """A cookie for this key; None if the key is unknown. Raises `rate_limited`."""
        if seconds := self._attempts.take(address):
            raise Refusal("rate_limited", retry_after=seconds)
        caller = self._keys.caller(key.strip()) if self._keys is not None else None
        if caller is None or self._keys is None:
            return None
        content = f"{caller.key_id}.{int(self._clock()) + COOKIE_LIFETIME}.{secrets.token_hex(16)}"
        return f"{content}.{self._keys.seal(caller.key_id, f'cookie {content}')}"

    def leave(self, cookie: str | None) -> None:
        """Sign a cookie out: this dashboard process no longer accepts it."""
        if self._keys is None or not cookie or self._visitor_of_cookie(self._keys, cookie) is None:
            return
        self._signed_out[cookie] = None
        # Remove the oldest, not the expired ones: if the clock is set back, an expired cookie would become valid again.
        while len(self._signed_out) > MAX_SIGNED_OUT:
            del self._signed_out[next(iter(self._signed_out))]

    def may_act(self, visitor: Visitor, role: Role = Role.ACT) -> bool:
        """True if the visitor is shown controls that change something and need a key of this role."""
        return self._allow_actions and visitor.caller.role >= role

    def expect_actor(
        self, visitor: Visitor, headers: Mapping[str, str], token: str, role: Role = Role.ACT
    ) -> None:
        """Raise `forbidden` unless the visitor may change something, with one of our forms sent by one of our pages."""
        if visitor.token and not (
            hmac.compare_digest(visitor.token.encode(), token.encode())
            and is_from_our_page(headers)
        ):
            raise Refusal(
                "forbidden",
                "This was not sent by a page of this dashboard, or by one that is out of date. Load the page anew, and try again. Where "
                "that does not help, a proxy in front changes the host's name: it has to pass it on (nginx: proxy_set_header Host $host).",
            )
        if not self._allow_actions:
            raise Refusal(
                "forbidden",
                "This dashboard only shows. Its operator may start it with --allow-actions.",
            )
        if visitor.caller.role < role:
            required = "or ".join(f"{allowed.word} " for allowed in Role if allowed >= role).strip()
            raise Refusal(
                "forbidden",
                f"The key {visitor.caller.key_id} has the role {visitor.caller.role.word}; this needs {required}.",
            )

    def _visitor_of_cookie(self, keys: Keyring, cookie: str) -> Visitor | None:
        """The visitor of a cookie `KEY.EXPIRY.NONCE.SEAL`; None if it is forged, signed out or expired, or its key no longer exists."""
        content, _, seal = cookie.rpartition(".")
        name, _, expiry_and_nonce = content.partition(".")
        until, _, nonce = expiry_and_nonce.partition(".")
        expected = keys.seal(name, f"cookie {content}")
        caller = keys.caller_of(name)
        if (
            expected is None
            or caller is None
            or not hmac.compare_digest(expected.encode(), seal.encode())
        ):
            return None
        if cookie in self._signed_out or not until.isdecimal() or int(until) < self._clock():
            return None
        return Visitor(caller, keys.seal(name, f"form {nonce}") or "", by_cookie=True)


def cookie_name(headers: Mapping[str, str], path_prefix: str) -> str:
    """Cookie name of a dashboard, made of its port and path prefix: browsers send a cookie to all ports of its host, and to all
    paths below its own, so dashboards would overwrite each other's cookies.
    """
    _, _, port = headers.get("host", "").rpartition(":")
    parts = ["groupwise", port if port.isdecimal() else "", *path_prefix.split("/")]
    return "-".join(filter(None, parts))


def refuse_other_sites(headers: Mapping[str, str]) -> None:
    """Raise `forbidden` for a request that a page of another site made a browser send; programs do not send the headers that show this."""
    if is_from_our_page(headers) is False:
        raise Refusal("forbidden", "A page of another site has asked for this.")
