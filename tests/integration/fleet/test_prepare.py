"""`vm prepare` over real SSH: what happens when either side is killed, and, with a real pip, an environment that jobs run in.

Where it is not said otherwise a program plays Python and pip on the machine. What is asked of the real ones is small: wheels that are made
here, of a line of code each, and no index.
"""

import asyncio
import functools
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import groupwise
from groupwise.cli.main import main
from groupwise.fleet import doctor
from groupwise.fleet.machines import packing
from groupwise.fleet.machines.prepare import PrepareError, builds_of
from groupwise.fleet.store.database import connect, migrate
from groupwise.fleet.store.tables import VM
from groupwise.hosts.ssh import SshHost
from tests.ssh_hosts import LoopbackHost, loopback_hosts
from tests.unit.fleet.machines.prepared_place import Place
from tests.wheels import fill_wheelhouse, lock_of


@pytest.fixture(scope="module")
def machine() -> Iterator[LoopbackHost]:
    with loopback_hosts(1) as [host]:
        yield host


@pytest.fixture
async def place(machine: LoopbackHost, tmp_path: Path) -> AsyncIterator[Place]:
    row = machine.vm_row()
    host = SshHost(machine.login)
    yield Place(tmp_path, host, transport="ssh", **row)
    await host.close()


async def test_a_build_that_was_killed_or_took_too_long_there_is_begun_anew(place: Place) -> None:
    mark = place.desk.folder / "installing"
    place.desk.behaves(f'case "$*" in *"-r lock.txt"*) touch {mark}; sleep 300;; esac')
    first = asyncio.create_task(place.prepare())
    await place.until(mark.exists)
    runner = builds_of(place.machine, place.host)
    [state] = (await runner.observe(probe=("true",))).attempts
    assert state.pid is not None
    os.kill(state.pid, signal.SIGKILL)
    with pytest.raises(PrepareError, match="it was killed"):
        await first
    with pytest.raises(PrepareError, match="--time-limit"):
        await place.prepare(place.plan(time_seconds=1.0))
    place.desk.behaves("")
    assert (await place.prepare()).made


async def test_secrets_reach_pip_and_nothing_else(place: Place) -> None:
    url = "https://me:canary-of-prepare@index/simple"
    made = place.plan(secrets={"PIP_INDEX_URL": url})
    place.desk.behaves('[ -z "$PIP_INDEX_URL" ] || echo "$PIP_INDEX_URL" > ' + f"{place.vm}/seen")
    await place.prepare(made)
    assert (place.vm / "seen").read_text().strip() == url
    (place.vm / "seen").unlink()
    left = [path for path in place.desk.folder.rglob("*") if path.is_file()]
    assert [path for path in left if b"canary-of-prepare" in path.read_bytes()] == []
    assert "canary" not in "".join(place.told)


# With a real pip


@pytest.fixture
def fleet(machine: LoopbackHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a fleet that has the machine and no roles. Our code is read once: somebody may be working on it."""
    monkeypatch.setattr(packing, "_code", functools.cache(packing._code))
    doctor._packed_here.cache_clear()
    folder = tmp_path / "fleet"
    folder.mkdir()
    database = connect(f"sqlite:///{folder / 'fleet.db'}")
    migrate(database)
    row = machine.vm_row() | {"workdir": f"workdir-{os.urandom(4).hex()}"}
    database.run(lambda session: session.add(VM(**row)))
    database.close()
    monkeypatch.setenv("GROUPWISE_FLEET", str(folder))
    return folder


@pytest.mark.soak(suite="fleet")  # a real pip, and a real environment
def test_from_a_wheelhouse_to_a_job(
    machine: LoopbackHost, fleet: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    vm, wheelhouse = machine.name, fill_wheelhouse(tmp_path / "wheelhouse")
    lock = lock_of(wheelhouse, hashes=True)

    def told(*words: str) -> Any:
        assert main(["fleet", *words, "--json"]) in ((0, 1) if "doctor" in words else (0,))
        return json.loads(capfd.readouterr().out)

    words = ["vm", "prepare", vm, "--lock", str(lock), "--wheelhouse", str(wheelhouse)]
    words += ["--python", os.path.realpath(sys.executable)]
    [made] = told(*words)
    assert made["made"]
    assert made["python"].startswith(str(machine.home))
    shown = told("vm", "show", vm)
    assert shown["python"] == made["python"]
    changed = [event for event in shown["events"] if event["kind"] == "vm.changed"]
    assert [event["after"] for event in changed] == [{"python": made["python"]}]
    findings = {each["name"]: each for each in told("doctor", "--vm", vm)["findings"]}
    assert findings[f"{vm} environment"]["level"] == "ok", findings
    assert groupwise.__version__ in findings[f"{vm} environment"]["measured"]
    assert findings[f"{vm} torch"]["level"] == "warning"
    assert f"vm prepare {vm}" in findings[f"{vm} torch"]["remedy"]
    [again] = told(*words, "--prune")
    assert (again["made"], again["python"], again["removed"]) == (False, made["python"], [])
