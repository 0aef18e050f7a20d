"""A fingerprint is the hash of its pieces' hashes, by however many threads; every byte of a tensor with several pieces counts."""

from __future__ import annotations

import hashlib

import pytest

from groupwise.engine.models import fingerprint
from groupwise.engine.models.fingerprint import tree_hash

SMALL, LARGE = bytes(range(5)), bytes(range(200))


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "PIECE", 8)
    monkeypatch.setattr(fingerprint, "AHEAD", 4)


def root(large: bytes, threads: int) -> str:
    contents = {"a|u8|(5,)|": SMALL, "b|u8|(200,)|": large, "c|u8|(0,)|": b""}
    return tree_hash(((name, memoryview(each)) for name, each in contents.items()), threads)


def test_the_fingerprint_covers_names_and_pieces_in_order():
    pieces = [LARGE[start : start + 8] for start in range(0, 200, 8)]
    hashes = b"".join(hashlib.sha256(piece).digest() for piece in pieces)
    wanted = b"a|u8|(5,)|" + hashlib.sha256(SMALL).digest() + b"b|u8|(200,)|" + hashes
    wanted = hashlib.sha256(wanted + b"c|u8|(0,)|").hexdigest()[:16]
    assert [root(LARGE, threads) for threads in (1, 2, 7)] == [wanted] * 3


def test_every_byte_of_every_piece_counts():
    changed = (LARGE[:n] + b"\xff" + LARGE[n + 1 :] for n in range(200))
    assert len({root(large, 2) for large in (LARGE, *changed)}) == 201
