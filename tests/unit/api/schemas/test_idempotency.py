import pytest

from groupwise.api.schemas.idempotency import body_hash, idempotency_key, new_idempotency_key
from groupwise.api.schemas.problems import Refusal


def test_either_header_holds_the_key() -> None:
    assert idempotency_key({"idempotency-key": "a"}) == "a"
    assert idempotency_key({"X-Idempotency-Key": "a", "Idempotency-Key": "a"}) == "a"
    assert idempotency_key({}) is None
    assert idempotency_key({"Idempotency-Key": new_idempotency_key()})


def test_bodies_that_ask_the_same_have_one_hash() -> None:
    assert body_hash(b'{"a":1,"b":[2.0]}') == body_hash(b'{ "b": [2], "a": 1.0 }')
    assert body_hash(b"[1]") != body_hash(b"[2]") != body_hash(b"[2.5]")
    assert body_hash(b"[1]") != body_hash(b"[true]")
    assert body_hash(b"") != body_hash(b"{")


def test_invalid_idempotency_keys_are_refused() -> None:
    for key in ("", "x" * 256, "ü", "a\tb"):
        with pytest.raises(Refusal):
            idempotency_key({"Idempotency-Key": key})
    with pytest.raises(Refusal):
        idempotency_key({"Idempotency-Key": "a", "X-Idempotency-Key": "b"})
    assert body_hash(b"[" * 100_000), "too deep to be read"
