"""`groupwise fleet vm prepare` as a command: what it prints, what it refuses, and what it does for several machines.

The building itself is that of `tests/unit/jobs/fleet/machines` and `tests/integration/fleet/test_prepare.py`; here it is played.
"""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from groupwise.jobs.fleet.attempts.records import Machine
from groupwise.jobs.fleet.machines import prepare as preparing
from groupwise.jobs.fleet.machines.plans import Plan
from groupwise.jobs.fleet.machines.prepare import Prepared, PrepareError, Pruned
from groupwise.jobs.hosts.files import BlobStore
from tests.unit.cli.conftest import Command


@pytest.fixture
def trusted(seen: Command, tmp_path: Path) -> Command:
    """Two machines that may be asked; nobody asks them."""
    import sqlite3

    with sqlite3.connect(tmp_path / "fleet" / "fleet.db") as rows:
        rows.execute("UPDATE vms SET host_key = 'ssh-ed25519 AAAA'")
        rows.execute("INSERT INTO vms (vm_id, host_key) VALUES ('vm-2', 'ssh-ed25519 AAAA')")
    rows.close()
    return seen


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Machines that were prepared; vm-2 has a full disk."""
    done: list[str] = []

    async def prepare(
        machine: Machine, plan: Plan, store: BlobStore, tell: Callable[[str], None]
    ) -> Prepared:
        tell("a line of its log")
        if machine.vm_id == "vm-2":
            raise PrepareError("vm-2 is not prepared: the disk there is full")
        done.append(machine.vm_id)
        return Prepared(f"/home/u/environments/{plan.name}/bin/python", "3.12.1", "0.1.0", True)

    monkeypatch.setattr(preparing, "prepare", prepare)
    return done


def test_the_row_names_the_new_interpreter(trusted: Command, builds: list[str]) -> None:
    code, out, err = trusted("vm", "prepare", "vm-1", "--json")
    assert code == 0, err
    [made] = json.loads(out)
    assert "\na line of its log" in f"\n{err}"
    shown = json.loads(trusted("vm", "show", "vm-1", "--json")[1])
    assert shown["python"] == made["python"]
    [event] = [each for each in shown["events"] if each["kind"] == "vm.changed"]
    assert (event["actor"], event["before"]) == ("user:ada", {"python": "python3"})


def test_a_failed_preparation_does_not_affect_other_machines(
    trusted: Command, builds: list[str]
) -> None:
    code, out, err = trusted("vm", "prepare", "vm-2", "vm-1", "--json")
    assert code == 1
    assert builds == ["vm-1"]
    assert "disk there is full" in err
    assert "vm-1: a line of" in err
    found = json.loads(out)
    assert [each["vm_id"] for each in found] == ["vm-2", "vm-1"]
    assert (found[0]["code"], "problem" in found[1]) == ("vm_not_prepared", False)
    assert json.loads(trusted("vm", "show", "vm-2", "--json")[1])["python"] == "python3"


def test_nothing_is_removed_while_jobs_begin(
    trusted: Command, builds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparing, "starting_attempts", lambda *_: [7])
    code, out, err = trusted("vm", "prepare", "vm-1", "--prune", "--json")
    assert code == 0
    assert [json.loads(out)[0][each] for each in ("removed", "used", "recent")] == [[], [], []]
    assert "just beginning" in err


def test_prune_keeps_environments_that_any_machine_uses(
    trusted: Command, builds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[set[str]] = []
    other = "0123456789abcdef0123"

    async def prune(
        machine: Machine, keep: Callable[[], Awaitable[list[str]]], store: BlobStore
    ) -> Pruned:
        kept.append(set(await keep()))
        return Pruned(["a"], ["b", "c"], ["d"])

    monkeypatch.setattr(preparing, "prune", prune)
    trusted("vm", "set", "vm-2", "--python", f"/w/environments/{other}/bin/python")
    code, out, err = trusted("vm", "prepare", "vm-1", "--prune", "--json")
    [made] = json.loads(out)
    assert (code, made["removed"], made["used"]) == (0, ["a"], ["b", "c"])
    assert kept == [{made["environment"], other}]
    assert "1 removed, 2 still used, 1 kept" in err


def test_a_dry_run_prints_a_lock_and_does_nothing(trusted: Command, builds: list[str]) -> None:
    code, out, err = trusted("vm", "prepare", "vm-1", "--extra", "fleet", "--dry-run")
    assert code == 0
    assert "packed here, and" in err
    assert any(line.startswith("sqlalchemy==") for line in out.splitlines())
    assert all("==" in line for line in out.splitlines())
    assert builds == []


def test_refused_prepare_options_show_no_secret(trusted: Command, builds: list[str]) -> None:
    for words, why in (
        (["--index-url", "https://me:hush@x/simple"], "--secret PIP_INDEX_URL=env:NAME"),
        (["--secret", "PIP_INDEX_URL=https://me:hush@x"], "a secret is named"),
        (["--env", "PATH=/x"], "PATH"),
    ):
        code, _, err = trusted("vm", "prepare", "vm-1", *words)
        assert (code != 0, why in err, "hush" in err) == (True, True, False), err
    assert builds == []


def test_an_untrusted_machine_is_not_contacted(seen: Command, builds: list[Any]) -> None:
    code, _, err = seen("vm", "prepare", "vm-1")
    assert code == 2
    assert "fleet vm trust vm-1" in err
    assert builds == []
