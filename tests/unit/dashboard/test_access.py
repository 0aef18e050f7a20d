"""Who is admitted: with a key, then by its cookie; without keys, everyone on the machine."""

from __future__ import annotations

from typing import Any

import pytest

from groupwise.api.schemas.keys import Keyring, Role, new_key, read_key_file
from groupwise.api.schemas.problems import Refusal
from groupwise.dashboard.access import COOKIE_LIFETIME, AccessControl

HERE = {"host": "127.0.0.1:8080"}


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def key() -> Any:
    return new_key(Role.READ)


def ring(*keys: Any, plain: str | None = None) -> Keyring:
    return Keyring(read_key_file("\n".join(each.line for each in keys), "keys"), plain)


def test_a_key_becomes_a_cookie_that_outlives_the_process_and_not_its_time(key: Any) -> None:
    clock = Clock()
    cookie = AccessControl(ring(key), clock).admit(f" {key.key}\n", "a")
    assert cookie is not None
    assert key.key.rpartition("-")[2] not in cookie
    later = AccessControl(ring(key), clock)
    visitor = later.visitor({}, cookie)
    assert visitor is not None
    assert (visitor.caller.key_id, visitor.by_cookie) == (key.id, True)
    clock.now += COOKIE_LIFETIME + 1
    assert later.visitor({}, cookie) is None


def test_a_cookie_ends_with_its_key_and_cannot_be_made_up(key: Any) -> None:
    other = new_key(Role.ADMIN)
    cookie = AccessControl(ring(key)).admit(key.key, "a")
    assert cookie is not None
    assert AccessControl(ring(other)).visitor({}, cookie) is None
    door = AccessControl(ring(key, other))
    assert door.visitor({}, cookie) is not None
    name, until, nonce, seal = cookie.split(".")
    for forged in (
        f"{other.id}.{until}.{nonce}.{seal}",
        f"{name}.{int(until) + 1}.{nonce}.{seal}",
        f"{name}.{until}.x{nonce}.{seal}",
        f"{name}.{until}.{nonce}.{'0' * 64}",
        "",
        "...",
        "é.é.é.é",
        name,
    ):
        assert door.visitor({}, forged) is None, forged


def test_a_plain_key_opens_too_and_a_program_shows_its_key_with_each_request(key: Any) -> None:
    door = AccessControl(ring(plain="a-plain-key-of-16"))
    cookie = door.admit("a-plain-key-of-16", "a")
    visitor = door.visitor({}, cookie)
    assert visitor is not None
    assert (visitor.caller.key_id, visitor.by_cookie) == ("environment", True)
    assert AccessControl(ring(plain="another-key-of-16")).visitor({}, cookie) is None
    door = AccessControl(ring(key))
    visitor = door.visitor({"authorization": f"Bearer {key.key}"}, None)
    assert visitor is not None
    assert not visitor.by_cookie
    with pytest.raises(Refusal):
        door.visitor({"authorization": "Bearer gw-a-b"}, None)
    assert door.visitor({}, None) is None


def test_wrong_keys_may_not_be_tried_for_ever(key: Any) -> None:
    door = AccessControl(ring(key))
    for _ in range(10):
        assert door.admit("gw-wrong-key", "one") is None
    with pytest.raises(Refusal) as refused:
        door.admit("gw-wrong-key", "one")
    assert refused.value.code == "rate_limited"
    assert door.admit(key.key, "another") is not None


def test_without_keys_only_this_machine_is_answered() -> None:
    door = AccessControl(None)
    assert door.is_open
    assert door.visitor(HERE, None) is not None
    for other in (
        {"host": "evil.example"},
        {"origin": "https://evil.example"},
        {"x-forwarded-for": "10.0.0.1"},
    ):
        with pytest.raises(Refusal):
            door.visitor({**HERE, **other}, None)
    assert door.admit("anything", "a") is None


def test_a_form_is_of_a_page_of_this_host_also_behind_a_proxy_that_renames_it() -> None:
    key = new_key(Role.ACT)
    door = AccessControl(ring(key), allow_actions=True)
    visitor = door.visitor(HERE, door.admit(key.key, "a"))
    assert visitor is not None
    here, elsewhere = {"origin": "http://127.0.0.1:8080"}, {"origin": "https://gw.example.org"}
    for headers in (
        here,
        {"referer": "http://127.0.0.1:8080/fleet"},
        {"sec-fetch-site": "same-origin", **elsewhere},
    ):
        door.expect_actor(visitor, {**HERE, **headers}, visitor.token)
    for headers in (
        {"sec-fetch-site": "cross-site", **here},
        {"sec-fetch-site": "same-site", **here},
        {"sec-fetch-site": "none"},
        elsewhere,
        {"origin": "http://[odd"},
        {},
    ):
        with pytest.raises(Refusal, match="proxy_set_header Host"):
            door.expect_actor(visitor, {**HERE, **headers}, visitor.token)
