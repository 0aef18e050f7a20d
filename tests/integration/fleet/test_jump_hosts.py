"""Machines behind a jump host, as the command line takes them in: neither of the two is trusted before somebody has looked at its key."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from groupwise.cli.main import main
from groupwise.hosts import keys
from groupwise.hosts.keys import Alias
from tests import ssh_hosts
from tests.ssh_hosts import LoopbackHost

pytestmark = pytest.mark.fleet

Command = Callable[..., tuple[int, Any, str]]


def alias(host: ssh_hosts.Host, jump: Alias | None = None) -> Alias:
    row = host.vm_row()
    return Alias(row["ip_address"], row["port"], row["user"], row["ssh_key_path"], jump)


def fingerprint(host: ssh_hosts.Host) -> str:
    return keys.parse(host.host_key).fingerprint


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


def test_a_jump_host_that_nobody_has_looked_at_is_not_used(
    fleet: Command, gate: LoopbackHost, inner: LoopbackHost
) -> None:
    code, _, said = fleet("vm", "add", "inner", "--from-ssh-config", "inner")
    assert code == 2
    assert f"--trust-jump {fingerprint(gate)}" in said
    wrong = ("--trust-jump", fingerprint(inner))
    code, _, said = fleet("vm", "add", "inner", "--from-ssh-config", "inner", *wrong)
    assert code == 2
    assert f"shows the host key {fingerprint(gate)}, not {fingerprint(inner)}" in said
    assert fleet("vm", "list")[1] == []


def test_the_machine_behind_it_is_looked_at_through_it(
    fleet: Command, gate: LoopbackHost, inner: LoopbackHost
) -> None:
    way = ("--from-ssh-config", "inner", "--trust-jump", fingerprint(gate))
    code, _, said = fleet("vm", "add", "inner", *way, "--trust", fingerprint(gate))
    assert code == 2
    assert f"shows the host key {fingerprint(inner)}, not {fingerprint(gate)}" in said
    assert fleet("vm", "list")[1] == []
    assert fleet("vm", "add", "seen", *way)[0] == 0
    _, found, _ = fleet("vm", "show", "seen")
    assert (found["fingerprint"], found["seen_fingerprint"]) == (None, fingerprint(inner))
    code, _, said = fleet("vm", "add", "inner", *way, "--trust", fingerprint(inner))
    assert code == 2
    assert "seen" in said, "each row ends what it finds in its folder and does not know"
    assert fleet("vm", "remove", "seen")[0] == 0
    assert fleet("vm", "add", "inner", *way, "--trust", fingerprint(inner))[0] == 0
    _, found, _ = fleet("vm", "show", "inner")
    assert found["fingerprint"] == fingerprint(inner)
    assert keys.parse(found["jump"]["host_key"]).fingerprint == fingerprint(gate)
    assert fleet("vm", "remove", "inner")[0] == 0
    assert fleet("vm", "add", "both", "--from-ssh-config", "inner", "--yes")[0] == 0
    _, found, _ = fleet("vm", "show", "both")
    assert found["fingerprint"] == fingerprint(inner)


def test_a_jump_host_that_was_set_up_anew_can_be_trusted_again(
    fleet: Command, gate: LoopbackHost, inner: LoopbackHost
) -> None:
    assert fleet("vm", "add", "inner", "--from-ssh-config", "inner", "--yes")[0] == 0
    assert fleet("vm", "set", "inner", "--trust-jump", fingerprint(gate))[0] == 2
    code, _, said = fleet("vm", "set", "inner", "--from-ssh-config", "inner")
    assert code == 2
    assert "--trust-jump" in said
    assert fleet("vm", "set", "inner", "--from-ssh-config", "direct")[0] == 0
    assert fleet("vm", "show", "inner")[1]["jump"] is None
    way = ("--from-ssh-config", "inner", "--trust-jump", fingerprint(gate))
    assert fleet("vm", "set", "inner", *way)[0] == 0
    _, found, _ = fleet("vm", "show", "inner")
    assert keys.parse(found["jump"]["host_key"]).fingerprint == fingerprint(gate)
    assert found["fingerprint"] == fingerprint(inner), "its own key is still the pinned one"
