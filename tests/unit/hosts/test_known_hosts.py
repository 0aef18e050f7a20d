"""The keys that the user's OpenSSH trusts machines with."""

import base64
import hashlib
import hmac
from pathlib import Path

import asyncssh
import pytest

from groupwise.hosts.keys import known


def made(kind: str = "ssh-ed25519") -> str:
    words = asyncssh.generate_private_key(kind).export_public_key().decode().split()
    return " ".join(words[:2])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "known_hosts"


def looked_up(file: Path, host: str, port: int = 22) -> str | None:
    found = known(host, port, [str(file)])
    return None if found is None else str(found)


def hashed(host: str) -> str:
    salt = b"twenty bytes of salt"
    digest = hmac.new(salt, host.encode(), hashlib.sha1).digest()
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"


def test_a_key_by_name_by_port_and_hashed(file: Path) -> None:
    one, two, three = made(), made(), made()
    file.write_text(f"box {one}\n[box]:2222 {two}\n{hashed('secret')} {three} a comment\n")
    assert looked_up(file, "box") == one
    assert looked_up(file, "box", 2222) == two
    assert looked_up(file, "secret") == three
    assert looked_up(file, "other") is None


def test_the_best_type_is_taken(file: Path) -> None:
    ecdsa, ed25519 = made("ecdsa-sha2-nistp256"), made()
    file.write_text(f"box {ecdsa}\nbox {ed25519}\n")
    assert looked_up(file, "box") == ed25519


def test_a_revoked_key_is_none(file: Path) -> None:
    key = made()
    file.write_text(f"box {key}\n@revoked box {key}\n")
    assert looked_up(file, "box") is None


def test_a_file_that_says_nothing_of_it_or_is_not_there(file: Path) -> None:
    assert looked_up(file, "box") is None
    for text in ("", "no such line\n", "box ssh-ed25519 !!!\n"):
        file.write_text(text)
        assert looked_up(file, "box") is None
