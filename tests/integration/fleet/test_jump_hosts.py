"""Machines as `vm add` takes them in, also behind a jump host: nothing is sent before somebody has looked at a key, and a machine is added
only if its login works, or says what is wrong with it when its key is trusted later."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from groupwise.cli.main import main
from groupwise.jobs.hosts import keys
from groupwise.jobs.hosts.keys import Alias
from groupwise.jobs.hosts.ssh import AGENT
from tests import ssh_hosts
from tests.ssh_hosts import LoopbackHost

Command = Callable[..., tuple[int, Any, str]]


def alias(host: ssh_hosts.Host, jump: Alias | None = None) -> Alias:
    row = host.vm_row()
    return Alias(row["ip_address"], row["port"], row["user"], row["ssh_key_path"], jump)


def fingerprint(host: ssh_hosts.Host) -> str:
    return keys.parse_host_key(host.host_key).fingerprint


@pytest.fixture
def gate(plain_machines: list[LoopbackHost]) -> LoopbackHost:
    return plain_machines[0]


@pytest.fixture
def inner(
    plain_machines: list[LoopbackHost], gate: LoopbackHost, monkeypatch: pytest.MonkeyPatch
) -> LoopbackHost:
    found = plain_machines[1]
    known = {"inner": alias(found, alias(gate)), "direct": alias(found)}
    monkeypatch.setattr(keys, "resolve_alias", known.__getitem__)
    monkeypatch.delenv(AGENT, raising=False)
    return found


@pytest.fixture
def fleet(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Command:
    """`groupwise fleet …`: exit code, its JSON, what was said."""

    def call(*words: str) -> tuple[int, Any, str]:
        capfd.readouterr()
        code = main(["fleet", *words, "--json", "--fleet", str(tmp_path / "fleet")])
        out, err = capfd.readouterr()
        return code, json.loads(out) if out else None, err

    return call


def test_neither_host_is_used_before_its_key_is_trusted(
    fleet: Command, gate: LoopbackHost, inner: LoopbackHost
) -> None:
    alias = ("--from-ssh-config", "inner")
    way = (*alias, "--trust-jump", fingerprint(gate))
    for words, said in (
        (alias, f"--trust-jump {fingerprint(gate)}"),
        ((*alias, "--trust-jump", fingerprint(inner)), f"shows the host key {fingerprint(gate)}"),
        ((*way, "--trust", fingerprint(gate)), f"shows the host key {fingerprint(inner)}"),
    ):
        code, _, told = fleet("vm", "add", "inner", *words)
        assert (code, said in told) == (2, True), told
        assert fleet("vm", "list")[1] == []
    assert fleet("vm", "add", "seen", *way)[0] == 0
    _, found, _ = fleet("vm", "show", "seen")
    assert (found["fingerprint"], found["seen_fingerprint"]) == (None, fingerprint(inner))
    code, _, said = fleet("vm", "add", "inner", *way, "--trust", fingerprint(inner))
    assert (code, "seen" in said) == (2, True), "each row ends what it finds and does not know"
    assert fleet("vm", "remove", "seen")[0] == 0
    assert fleet("vm", "add", "inner", *way, "--trust", fingerprint(inner))[0] == 0
    _, found, _ = fleet("vm", "show", "inner")
    assert found["fingerprint"] == fingerprint(inner)
    assert keys.parse_host_key(found["jump"]["host_key"]).fingerprint == fingerprint(gate)


def test_adding_a_machine_logs_in_and_polls_it(
    fleet: Command, inner: LoopbackHost, tmp_path: Path
) -> None:
    inner.gpus(2)
    other_key = tmp_path / "other"
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(other_key)], check=True
    )
    way = ("vm", "add", "new", "--trust", fingerprint(inner))
    for words, said in (
        (("--host", "stranger@direct"), "does not accept the key"),
        (("--host", "direct", "--key", str(other_key)), "does not accept the key"),
        (("--host", "direct", "--workdir", "/proc/no"), "new cannot be used"),
    ):
        code, _, told = fleet(*way, *words)
        assert (code, said in told, "Nothing was changed" in told) == (2, True, True), told
        assert fleet("vm", "list")[1] == []
    assert fleet("vm", "add", "later", "--host", "stranger@direct")[0] == 0
    code, found, told = fleet("vm", "trust", "later", fingerprint(inner))
    assert (code, found["fingerprint"]) == (0, fingerprint(inner))
    assert "does not accept the key" in told
    assert fleet("vm", "remove", "later")[0] == 0
    code, found, told = fleet(*way, "--host", "direct", "--python", "/no/such/python")
    assert (code, found["contact"], len(found["gpus"])) == (0, "ok", 2)
    assert "2 x NVIDIA H100 80GB HBM3" in told
    assert "/no/such/python does not run there" in told
