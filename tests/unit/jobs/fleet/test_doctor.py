"""What the doctor says of a machine's environment, and of the processes of the control plane."""

import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from groupwise.core.findings import Finding
from groupwise.jobs.fleet import doctor, up
from groupwise.jobs.fleet.machines import packing
from groupwise.jobs.fleet.processes import identity
from groupwise.jobs.fleet.settings import FleetPlace, FleetSettings
from groupwise.jobs.fleet.store.database import Database
from groupwise.jobs.fleet.store.tables import ControlProcess
from groupwise.jobs.hosts import answers
from groupwise.jobs.hosts.answers import MemberState

HERE = packing.version()
PYTHON = "/env/bin/python"


def member(**more: Any) -> MemberState:
    ended = {"code": 0, "signal": None, "reason": "exited", "message": ""}
    about: dict[str, Any] = {"job": "doctor-1", "epoch": 1, "state": "exited", "exit": ended}
    return answers.parse_member_state(about | more)


def judged(said: dict[str, Any], gpus: int = 0, **state: Any) -> dict[str, Finding]:
    text = f"a start-up file said this\n{json.dumps({'python': '3.12.1', **said})}"
    found = doctor._tiny_command_findings("gpu-1", PYTHON, member(**state), text, 1.0, gpus)
    return {seen.name.removeprefix("gpu-1 "): seen for seen in found}


def test_each_problem_of_a_machine_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_packed_here", lambda: "abc")
    torch, env = {"groupwise": HERE, "torch": "2"}, "environment"
    wrong: tuple[tuple[dict[str, Any], int, str, str, str], ...] = (
        ({}, 0, env, "warning", "has no groupwise"),
        ({"groupwise": "0.0.9"}, 0, env, "warning", f"0.0.9; here it is {HERE}"),
        ({"groupwise": HERE, "wheel": "old"}, 0, env, "warning", "from other code"),
        ({"why": "ImportError: x"}, 0, env, "problem", "ImportError: x"),
        ({"groupwise": HERE}, 0, "torch", "warning", "there is none"),
        ({**torch, "build": None, "gpus": 0}, 2, "torch", "problem", "for processors alone"),
        ({**torch, "build": "12.8", "gpus": 0}, 2, "torch", "problem", "sees 0 of 2 GPUs"),
        ({**torch, "torch_why": "libcudart"}, 1, "torch", "problem", "libcudart"),
    )
    for said, gpus, name, level, measured in wrong:
        seen = judged(said, gpus)[name]
        assert (seen.level, measured in seen.measured) == (level, True), seen
        assert "fleet vm prepare gpu-1" in seen.remedy
        assert seen.meaning
    well = {"groupwise": HERE, "wheel": "abc", "torch": "2.13.0", "build": "12.8", "gpus": 2}
    assert {seen.level for seen in judged(well, gpus=2).values()} == {"ok"}


# --- roles ----------------------------------------------------------------------------------------


def silent(role: str, owner: str, *, gone: bool) -> ControlProcess:
    """A row of this process, which has not been renewed for an hour; `gone`: it was another one's."""
    known = identity(os.getpid())
    assert known is not None
    about = {"host": "vm", "pid": os.getpid(), "started_at": 0.0, "seen_at": time.time() - 3600}
    there = known | {"ticks": 1} if gone else known
    return ControlProcess(owner=owner, role=role, facts={"process": there}, **about)


def seen_of_roles(database: Database, *rows: ControlProcess) -> dict[str, list[Finding]]:
    database.run(lambda s: s.add_all(rows))
    told: dict[str, list[Finding]] = {}
    doctor._check_roles(database, lambda seen: told.setdefault(seen.name, []).append(seen))
    return told


def test_a_killed_process_is_not_reported_if_another_has_its_role(
    database: Database,
) -> None:
    """One that hangs does."""
    alive = silent("dispatcher", "new", gone=False)
    alive.seen_at = time.time()
    found = seen_of_roles(
        database, alive, silent("dispatcher", "old", gone=True), silent("poller", "p", gone=True)
    )
    assert [each.level for each in found["dispatcher"]] == ["ok"]
    [poller] = found["poller"]
    assert (poller.level, "has ended without a word" in poller.measured) == ("problem", True)
    found = seen_of_roles(database, silent("dispatcher", "hangs", gone=False))
    assert [each.level for each in found["dispatcher"]] == ["ok", "warning"]
    assert "it hangs" in found["dispatcher"][1].meaning


# --- NATS -----------------------------------------------------------------------------------------


def seen_of_nats(
    tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch, settings: str | None
) -> dict[str, str]:
    """What is measured → level, of a server that answers everybody, and by which address it was asked."""

    async def version(url: str) -> str:
        return f"2.14.0 at {url}"

    monkeypatch.setattr(doctor, "_nats_version", version)
    found: list[Finding] = []
    place = FleetPlace(tmp_path, FleetSettings(nats_url=settings))
    doctor._check_nats(place, database, found.append)
    return {seen.measured: seen.level for seen in found}


def runs(tmp_path: Path, database: Database, url: str | None, role: str = "dispatcher") -> None:
    """A process that was begun with this address."""
    place = FleetPlace(tmp_path, FleetSettings(nats_url=url))
    control = up._ControlPlane(place, database, (role,), lambda text: None)
    database.run(control._write_heartbeat)


def test_the_nats_of_what_runs_is_looked_at_whatever_the_settings_say(
    tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs(tmp_path, database, None, role="poller")
    look = partial(seen_of_nats, tmp_path, database, monkeypatch)
    set_url = "nats://set:4222"
    assert "none is used" in next(iter(look(None)))
    assert look(set_url) == {f"{set_url}, version 2.14.0 at {set_url}": "ok"}
    runs(tmp_path, database, "nats://told:4222")
    assert look(None) == {"nats://told:4222, version 2.14.0 at nats://told:4222": "ok"}
    assert look(set_url) == look(None)


def test_the_password_in_an_address_is_written_nowhere(
    tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "nats://ada:canary@told:4222"
    runs(tmp_path, database, secret)
    facts = database.read(lambda s: s.scalars(select(ControlProcess)).one().facts)
    assert "canary" not in json.dumps(facts)
    [(measured, level)] = seen_of_nats(tmp_path, database, monkeypatch, None).items()
    assert (level, "nats://told:4222 is used" in measured) == ("skipped", True)
    whole = seen_of_nats(tmp_path, database, monkeypatch, secret)
    assert whole == {f"nats://told:4222, version 2.14.0 at {secret}": "ok"}
