import hmac

import pytest

from groupwise.api.schemas.keys import (
    LOCAL,
    Caller,
    Keyring,
    Role,
    caller_of,
    new_key,
    presented_key,
    read_key_file,
)
from groupwise.api.schemas.problems import Refusal
from groupwise.core.errors import ConfigError, UsageError

NEW_KEY = new_key(Role.TRAIN)
STORED = read_key_file(f"# who trains\n\n{NEW_KEY.line}  # Ann\n", "keys")
RING = Keyring(STORED)
NAME = STORED[0].id


@pytest.mark.parametrize(
    "key", [NEW_KEY.key, f"gw-{NAME}-wrong", "gw-unknown-wrong", "nonsense"], ids=str.__len__
)
def test_an_unknown_id_takes_the_same_path(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    original = hmac.compare_digest

    def watched(a: bytes, b: bytes) -> bool:
        compared.append(len(a) + len(b))
        return original(a, b)

    monkeypatch.setattr(hmac, "compare_digest", watched)
    RING.caller(key)
    assert compared == [64, 64]


def test_no_key_shows() -> None:
    secret = NEW_KEY.key.rpartition("-")[2]
    for thing in (NEW_KEY, RING, STORED, Keyring(STORED, "0123456789abcdef")):
        assert secret not in repr(thing)
        assert STORED[0].digest.hex() not in repr(thing)
        assert "0123456789abcdef" not in repr(thing)


def test_a_wrong_key_file_is_refused_line_by_line_without_showing_it() -> None:
    text = (
        f"{NEW_KEY.key}\nab admin {'0' * 63}\nab boss {'0' * 64}\n{NEW_KEY.line}\n{NEW_KEY.line}\n"
    )
    with pytest.raises(ConfigError) as caught:
        read_key_file(text, "keys")
    lines = str(caught.value).splitlines()
    assert [line.split(": ")[0] for line in lines] == ["keys:1", "keys:2", "keys:3", "keys:5"]
    assert NEW_KEY.key not in str(caught.value)
    assert read_key_file(f"# a comment\u2028evil admin {'0' * 64}\x0c\r\n", "keys") == ()
    for name in ("local", "environment"):
        with pytest.raises(ConfigError, match="of others"):
            read_key_file(f"{name} read {'0' * 64}", "keys")


def test_a_key_is_recognised_by_its_line_and_forged_keys_are_refused() -> None:
    secret = NEW_KEY.key.rpartition("-")[2]
    for key in (
        NEW_KEY.key,
        "tml" + NEW_KEY.key.removeprefix("gw"),
    ):  # as the Tinker client sends it
        assert RING.caller(key) == Caller(NAME, Role.TRAIN)
    forged = (
        *(
            NEW_KEY.key[:-1],
            NEW_KEY.key + "0",
            NEW_KEY.key.upper(),
            "xx" + NEW_KEY.key.removeprefix("gw"),
        ),
        *(f"gw-{NAME}-" + "0" * 64, f"gw-{'0' * 10}-{secret}", STORED[0].digest.hex()),
        *("", "gw--", "ü" * 20, "x" * 100_000),
    )
    assert {RING.caller(key) for key in forged} == {None}


def test_a_plain_key_is_an_admin_and_bad_ones_are_refused_without_being_shown() -> None:
    ring = Keyring(plain="0123456789abcdef")
    assert ring.caller("0123456789abcdef") == Caller("environment", Role.ADMIN)
    assert ring.caller("0123456789abcdeF") is None
    for plain in ("short", "", "has a blank in the midst", "ü" * 20):
        with pytest.raises(UsageError) as caught:
            Keyring(plain=plain)
        assert not plain or plain not in str(caught.value)


def test_keys_stand_in_three_places_and_roles_include_those_below() -> None:
    for headers in ({"api-key": "k"}, {"X-API-Key": "k"}, {"Authorization": "bearer  k "}):
        assert presented_key(headers) == "k"
    for headers in ({}, {"Authorization": "Basic abc"}, {"api-key": "gw-a-b"}):
        with pytest.raises(Refusal) as caught:
            caller_of(RING, headers)
        assert caught.value.status == 401
    assert caller_of(None, {}) == LOCAL
    Caller("a", Role.ADMIN).require(Role.TRAIN)
    Caller("a", Role.TRAIN).require(Role.TRAIN)
    with pytest.raises(Refusal) as caught:
        Caller("a", Role.READ).require(Role.TRAIN)
    assert (caught.value.code, caught.value.status) == ("forbidden", 403)
