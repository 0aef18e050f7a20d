import pytest

from groupwise.wire.idempotency import body_hash, idempotency_key, new_idempotency_key
from groupwise.wire.problems import Refusal


def test_either_header_holds_the_key() -> None:
    assert idempotency_key({"idempotency-key": "a"}) == "a"
    assert idempotency_key({"X-Idempotency-Key": "a", "Idempotency-Key": "a"}) == "a"
    assert idempotency_key({}) is None
    assert idempotency_key({"Idempotency-Key": new_idempotency_key()})


@pytest.mark.parametrize("key", ["", "x" * 256, "ü", "a\tb"])
def test_what_is_no_key_is_refused(key: str) -> None:
    with pytest.raises(Refusal, match="Idempotency-Key"):
        idempotency_key({"Idempotency-Key": key})


def test_two_keys_are_refused() -> None:
    with pytest.raises(Refusal, match="differs"):
        idempotency_key({"Idempotency-Key": "a", "X-Idempotency-Key": "b"})


def test_bodies_that_ask_the_same_have_one_hash() -> None:
    assert body_hash(b'{"a":1,"b":[2.0]}') == body_hash(b'{ "b": [2], "a": 1.0 }')
    assert body_hash(b"[1]") != body_hash(b"[2]") != body_hash(b"[2.5]")
    assert body_hash(b"[1]") != body_hash(b"[true]")
    assert body_hash(b"") != body_hash(b"{")


def test_a_body_that_is_nested_too_deep_has_one_too() -> None:
    assert body_hash(b"[" * 100_000) == body_hash(b"[" * 100_000)
