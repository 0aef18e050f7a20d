"""Controls access to the dashboard.

    a key, typed once      → a cookie that no script can read, sealed with what is stored of the key: it is good for a week, outlives a
                             restart, and ends with the key; here also when its browser signs out
    a key with each request→ for programs, as the other servers take it
    no keys at all         → everyone at this machine, but no page of another site that has a browser ask for it

Only our own forms change anything: a form carries a token that other sites cannot read, and comes from a page of this host. So a link or
a page elsewhere changes nothing, whatever a browser sends along. And nothing can be changed at all unless the settings allow it.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from groupwise.api.http.origins import check_local, is_from_our_page
from groupwise.api.http.shared_state import Buckets
from groupwise.api.schemas.keys import LOCAL, Caller, Keyring, Role, caller_of, presented_key
from groupwise.api.schemas.problems import Refusal

LASTS = 7 * 86_400
"""Seconds for which a cookie is good."""
TRIES_PER_SECOND, TRIES_AT_ONCE = 0.5, 10
"""Keys that may be tried from one address."""
MOST_LEFT = 10_000
"""Signed-out cookies that are remembered."""


@dataclass(frozen=True, slots=True)
class Visitor:
    """The sender of a request for a page."""

    caller: Caller
    token: str = field(default="", repr=False)
    """Token for the visitor's forms; empty for a program with a key, which no other site can make ask."""
    by_cookie: bool = False
    """True if there is a session to sign out of."""


class Door:
    """Access control of one dashboard."""

    def __init__(
        self,
        keys: Keyring | None,
        clock: Callable[[], float] = time.time,
        *,
        acts: bool = False,
    ) -> None:
        """`acts`: whether anything may be changed here."""
        self._keys, self._clock, self._acts = keys, clock, acts
        self._own = secrets.token_hex(32)
        self._tries = Buckets(TRIES_PER_SECOND, TRIES_AT_ONCE)
        self._left: dict[str, None] = {}

    @property
    def is_open(self) -> bool:
        """True if no key is needed; then only this machine is answered."""
        return self._keys is None

    def visitor(self, headers: Mapping[str, str], cookie: str | None) -> Visitor | None:
        """The sender of a request; None if unknown. Raises `unauthorised` for a wrong key, `forbidden` for another site."""
        if self._keys is None:
            check_local(headers)
            return Visitor(LOCAL, self._own)
        if presented_key(headers) is not None:
            return Visitor(caller_of(self._keys, headers))
        return self._of_cookie(self._keys, cookie) if cookie else None

    def admit(self, key: str, address: str) -> str | None:
        """A cookie for this key; None if the key is unknown. Raises `rate_limited`."""
        if seconds := self._tries.take(address):
            raise Refusal("rate_limited", retry_after=seconds)
        caller = self._keys.caller(key.strip()) if self._keys is not None else None
        if caller is None or self._keys is None:
            return None
        content = f"{caller.key_id}.{int(self._clock()) + LASTS}.{secrets.token_hex(16)}"
        return f"{content}.{self._keys.sealed(caller.key_id, f'cookie {content}')}"

    def leave(self, cookie: str | None) -> None:
        """Sign a cookie out: it is no longer accepted, as long as this dashboard runs."""
        if self._keys is None or not cookie or self._of_cookie(self._keys, cookie) is None:
            return
        self._left[cookie] = None
        # The oldest go first, not those that have expired: a clock that is set back makes none good again.
        while len(self._left) > MOST_LEFT:
            del self._left[next(iter(self._left))]

    def may_act(self, visitor: Visitor, role: Role = Role.ACT) -> bool:
        """True if the visitor is shown controls that change something and need a key of this role."""
        return self._acts and visitor.caller.role >= role

    def expect_actor(
        self, visitor: Visitor, headers: Mapping[str, str], token: str, role: Role = Role.ACT
    ) -> None:
        """Raise `forbidden` unless they may change something, by a form of ours that a page of ours has sent."""
        if visitor.token and not (
            hmac.compare_digest(visitor.token.encode(), token.encode())
            and is_from_our_page(headers)
        ):
            raise Refusal(
                "forbidden",
                "This was not sent by a page of this dashboard, or by one that is out of date. Load the page anew, and try again. Where "
                "that does not help, a proxy in front changes the host's name: it has to pass it on (nginx: proxy_set_header Host $host).",
            )
        if not self._acts:
            raise Refusal(
                "forbidden",
                "This dashboard only shows. Its operator may start it with --allow-actions.",
            )
        if visitor.caller.role < role:
            enough = "or ".join(f"{each.word} " for each in Role if each >= role).strip()
            raise Refusal(
                "forbidden",
                f"The key {visitor.caller.key_id} has the role {visitor.caller.role.word}; this needs {enough}.",
            )

    def _of_cookie(self, keys: Keyring, cookie: str) -> Visitor | None:
        """The visitor of a cookie `KEY.EXPIRY.NONCE.SEAL`; None if it is forged, signed out or out of date, or its key is gone."""
        content, _, seal = cookie.rpartition(".")
        name, _, rest = content.partition(".")
        until, _, nonce = rest.partition(".")
        own = keys.sealed(name, f"cookie {content}")
        caller = keys.named(name)
        if own is None or caller is None or not hmac.compare_digest(own.encode(), seal.encode()):
            return None
        if cookie in self._left or not until.isdecimal() or int(until) < self._clock():
            return None
        return Visitor(caller, keys.sealed(name, f"form {nonce}") or "", by_cookie=True)


def cookie_name(headers: Mapping[str, str], above: str) -> str:
    """Cookie name of the dashboard below a path of a host: browsers send a cookie to all ports of its host, and to all paths below its
    own."""
    _, _, port = headers.get("host", "").rpartition(":")
    words = ["groupwise", port if port.isdecimal() else "", *above.split("/")]
    return "-".join(filter(None, words))


def refuse_other_sites(headers: Mapping[str, str]) -> None:
    """Raise `forbidden` for what a page of another site has a browser send; a program says of itself nothing of the kind."""
    if is_from_our_page(headers) is False:
        raise Refusal("forbidden", "A page of another site has asked for this.")
