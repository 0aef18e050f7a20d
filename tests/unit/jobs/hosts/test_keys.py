import base64
import hashlib
import hmac
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import asyncssh
import pytest

from groupwise.core.errors import UsageError
from groupwise.jobs.hosts import keys
from groupwise.jobs.hosts.keys import (
    Alias,
    key_of,
    known_host_key,
    parse_host_key,
    resolve_alias,
    signature_algorithms,
    trust_only,
)

ED25519 = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGPKSUTyz1HwHReFVvD5obVsALAgJRNarH4TRpNePnAS"
with_ssh = pytest.mark.skipif(shutil.which("ssh") is None, reason="there is no ssh on PATH")
with_keygen = pytest.mark.skipif(
    shutil.which("ssh-keygen") is None, reason="there is no ssh-keygen"
)


def test_a_key_is_read_and_written_as_it_stands_in_files() -> None:
    key = parse_host_key(f"  {ED25519} root@machine\n")
    assert str(key) == ED25519
    assert parse_host_key(f"[10.0.0.1]:2222 {ED25519}") == key == key_of(key.public())
    assert trust_only(key)[0][0].get_algorithm() == "ssh-ed25519"
    for line in (
        *("", "ssh-ed25519", "ssh-ed25519 not-base64!", "ssh-ed25519 AAAA"),
        *("ssh-dss AAAAB3NzaC1kc3M=", ED25519.replace("ssh-ed25519", "ssh-rsa"), ED25519[:-12]),
        "-----BEGIN OPENSSH PRIVATE KEY-----",
    ):
        with pytest.raises(UsageError, match="host key"):
            parse_host_key(line)


@with_keygen
@pytest.mark.parametrize("kind", ["ed25519", "ecdsa", "rsa"])
def test_fingerprints_are_those_of_ssh_keygen(kind: str, tmp_path: Path) -> None:
    made = asyncssh.generate_private_key(
        {"ed25519": "ssh-ed25519", "ecdsa": "ecdsa-sha2-nistp256", "rsa": "ssh-rsa"}[kind]
    )
    public = tmp_path / "key.pub"
    made.write_public_key(public)
    shown = subprocess.run(
        ["ssh-keygen", "-l", "-f", public], capture_output=True, text=True, check=True
    ).stdout
    assert shown.split()[1] == parse_host_key(public.read_text()).fingerprint


def test_the_pinned_kind_is_asked_for_first_and_nothing_weak_at_all() -> None:
    rsa = signature_algorithms(None)
    assert rsa[0] == "ssh-ed25519"
    assert "ssh-rsa" not in rsa
    ecdsa = asyncssh.generate_private_key("ecdsa-sha2-nistp256").convert_to_public()
    wanted = signature_algorithms(key_of(ecdsa))
    assert wanted[0] == "ecdsa-sha2-nistp256"
    assert sorted(wanted) == sorted(rsa)


def config(folder: Path, text: str) -> Path:
    path = folder / "config"
    path.write_text(text)
    return path


@with_ssh
def test_a_name_of_the_ssh_config_is_resolved(tmp_path: Path) -> None:
    key = tmp_path / "id"
    key.touch()
    text = f"""
Host gate
  HostName gate.example.org
  User watch
  Port 2200
Host gpu*
  HostName %h.example.org
  User trainer
  IdentityFile {tmp_path}/not-there
  IdentityFile {key}
  ProxyJump gate
"""
    found = resolve_alias("gpu7", config=config(tmp_path, text))
    assert replace(found, jump=None) == Alias("gpu7.example.org", 22, "trainer", str(key))
    assert jump_of(found) == ("gate.example.org", 2200, "watch")
    for jump, meant in {
        "me@gate:2222": ("gate", 2222, "me"),
        "me@[fe80::1]:2222": ("fe80::1", 2222, "me"),
        "ssh://me@gate": ("gate", 22, "me"),
    }.items():
        text = f"Host x\n ProxyJump {jump}\n"
        assert jump_of(resolve_alias("x", config=config(tmp_path, text))) == meant


def jump_of(found: Alias) -> tuple[str, int, str | None]:
    assert found.jump is not None
    return found.jump.host, found.jump.port, found.jump.user


@with_ssh
@pytest.mark.parametrize(("text", "why"), [
    ("Host x\n ProxyCommand nc %h %p\n", "ProxyCommand"), ("Host x\n ProxyJump a,b\n", "several jump hosts"),
    ("Host x\n ProxyJump a\nHost a\n ProxyJump b\n", "several jump hosts"), ("Host x\n Port many\n", "ssh cannot say"),
])  # fmt: skip
def test_unsupported_options_of_an_ssh_config_are_refused(
    text: str, why: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=why):
        resolve_alias("x", config=config(tmp_path, text))


@with_ssh
def test_a_config_that_waits_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "CONFIG_TIMEOUT", 0.05)
    with pytest.raises(UsageError, match="Match exec"):
        resolve_alias("x", config=config(tmp_path, 'Match exec "sleep 1"\n Port 23\n'))


@pytest.mark.parametrize("name", ["", "-oProxyCommand=true", "a b", "a\0b"])
def test_an_invalid_host_name_never_reaches_ssh(name: str) -> None:
    with pytest.raises(UsageError, match="not a name of a host"):
        resolve_alias(name)


# --- keys that the user's OpenSSH trusts machines with -------------------------------------------


def made(kind: str = "ssh-ed25519") -> str:
    words = asyncssh.generate_private_key(kind).export_public_key().decode().split()
    return " ".join(words[:2])


def hashed(host: str) -> str:
    salt = b"twenty bytes of salt"
    digest = hmac.new(salt, host.encode(), hashlib.sha1).digest()
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"


def test_the_best_key_that_was_not_revoked_is_known_by_name_by_port_and_hashed(
    tmp_path: Path,
) -> None:
    file = tmp_path / "known_hosts"

    def looked_up(host: str, port: int = 22) -> str | None:
        found = known_host_key(host, port, [str(file)])
        return None if found is None else str(found)

    assert looked_up("box") is None, "there is no file"
    for text in ("", "no such line\n", "box ssh-ed25519 !!!\n"):
        file.write_text(text)
        assert looked_up("box") is None
    ecdsa, one, two, three = made("ecdsa-sha2-nistp256"), made(), made(), made()
    text = f"box {ecdsa}\nbox {one}\n[box]:2222 {two}\n{hashed('secret')} {three} a comment\n"
    file.write_text(text)
    found = [looked_up("box"), looked_up("box", 2222), looked_up("secret"), looked_up("other")]
    assert found == [one, two, three, None]
    file.write_text(f"{text}@revoked box {one}\n@revoked box {ecdsa}\n")
    assert looked_up("box") is None
