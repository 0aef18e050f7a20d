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

import pytest

import groupwise
from groupwise.cli.main import main
from groupwise.fleet import doctor
from groupwise.fleet.machines import packing
from groupwise.fleet.machines.builder import MARKER
from groupwise.fleet.machines.locks import Lock
from groupwise.fleet.machines.prepare import PrepareError, Pruned, builds_of, prune
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


async def test_only_what_is_missing_travels(place: Place, tmp_path: Path) -> None:
    big = tmp_path / "own-1-py3-none-any.whl"
    big.write_bytes(os.urandom(3_000_000))
    await place.prepare(place.plan(wheels=(big,)))
    assert any(line.startswith("sent 3.") for line in place.told)
    place.told.clear()
    await place.prepare(place.plan(wheels=(big,), lock=Lock(("other==1",))))
    assert any(line == "sent 0.0 MB" for line in place.told)


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
    holding = [
        path
        for path in place.desk.folder.rglob("*")
        if path.is_file() and b"canary-of-prepare" in path.read_bytes()
    ]
    assert holding == []
    assert "canary" not in "".join(place.told)


async def test_others_are_removed_when_nobody_uses_them(place: Place) -> None:
    old = place.plan(lock=Lock(("old==1",)))
    await place.prepare(old)
    await place.prepare()

    async def keep() -> list[str]:
        return [place.plan().name]

    async def pruned() -> Pruned:
        return await prune(place.machine, keep, place.store, place.host)

    assert await pruned() == Pruned([], [], [old.name])
    os.utime(place.environment(old) / MARKER, (0, 0))
    assert await pruned() == Pruned([old.name], [], [])
    assert not place.environment(old).exists()
    assert place.environment().exists()


async def test_whoever_asked_may_die_and_ask_again(place: Place) -> None:
    mark, go_on = place.desk.folder / "installing", place.desk.folder / "go-on"
    wait = f"touch {mark}; while [ ! -e {go_on} ]; do sleep 0.01; done"
    place.desk.behaves(f'case "$*" in *"-r lock.txt"*) {wait};; esac')
    first = asyncio.create_task(place.prepare())
    await place.until(mark.exists)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    second = asyncio.create_task(place.prepare())
    await place.until(lambda: any("being made already" in line for line in place.told))
    go_on.touch()
    assert (await second).made
    assert sum("-m venv" in call for call in place.desk.calls()) == 1


# With a real pip


@pytest.fixture
def wheelhouse(tmp_path: Path) -> Path:
    return fill_wheelhouse(tmp_path / "wheelhouse")


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
    machine: LoopbackHost, fleet: Path, wheelhouse: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    vm = machine.name
    lock = lock_of(wheelhouse, hashes=True)
    words = ["fleet", "vm", "prepare", vm, "--lock", str(lock), "--wheelhouse", str(wheelhouse)]
    words += ["--python", os.path.realpath(sys.executable), "--json"]
    assert main(words) == 0
    out, err = capfd.readouterr()
    [made] = json.loads(out)
    assert made["made"], err
    assert made["python"].startswith(str(machine.home))
    assert f"{vm} is prepared" in err

    assert main(["fleet", "vm", "show", vm, "--json"]) == 0
    shown = json.loads(capfd.readouterr().out)
    assert shown["python"] == made["python"]
    changed = [event for event in shown["events"] if event["kind"] == "vm.changed"]
    assert [event["after"] for event in changed] == [{"python": made["python"]}]

    assert main(["fleet", "doctor", "--vm", vm, "--json"]) in (0, 1)
    findings = {each["name"]: each for each in json.loads(capfd.readouterr().out)["findings"]}
    assert findings[f"{vm} environment"]["level"] == "ok", findings
    assert groupwise.__version__ in findings[f"{vm} environment"]["measured"]
    assert findings[f"{vm} torch"]["level"] == "warning"
    assert f"vm prepare {vm}" in findings[f"{vm} torch"]["remedy"]

    assert main([*words, "--prune"]) == 0
    [again] = json.loads(capfd.readouterr().out)
    assert (again["made"], again["python"], again["removed"]) == (False, made["python"], [])
