"""`vm prepare` over real SSH: what happens when either side is killed. A program plays Python and pip on the machine; with the real ones
`tests/integration/launch/test_ssh.py` prepares one."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from groupwise.jobs.fleet.machines.prepare import PrepareError, builds_of
from groupwise.jobs.hosts.ssh import SshHost
from tests.processes import wait_until_async
from tests.ssh_hosts import LoopbackHost, loopback_hosts
from tests.unit.jobs.fleet.machines.prepared_place import Place


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


async def test_a_build_that_was_killed_or_took_too_long_there_is_started_again(
    place: Place,
) -> None:
    mark = place.builds.folder / "installing"
    place.builds.behaves(f'case "$*" in *"-r lock.txt"*) touch {mark}; sleep 300;; esac')
    first = asyncio.create_task(place.prepare())
    await wait_until_async(mark.exists)
    runner = builds_of(place.machine, place.host)
    [state] = (await runner.observe(probe=("true",))).attempts
    assert state.pid is not None
    os.kill(state.pid, signal.SIGKILL)
    with pytest.raises(PrepareError, match="it was killed"):
        await first
    with pytest.raises(PrepareError, match="--time-limit"):
        await place.prepare(place.plan(time_seconds=1.0))
    place.builds.behaves("")
    assert (await place.prepare()).made


async def test_secrets_reach_pip_and_nothing_else(place: Place) -> None:
    url = "https://me:canary-of-prepare@index/simple"
    made = place.plan(secrets={"PIP_INDEX_URL": url})
    place.builds.behaves('[ -z "$PIP_INDEX_URL" ] || echo "$PIP_INDEX_URL" > ' + f"{place.vm}/seen")
    await place.prepare(made)
    assert (place.vm / "seen").read_text().strip() == url
    (place.vm / "seen").unlink()
    left = [path for path in place.builds.folder.rglob("*") if path.is_file()]
    assert [path for path in left if b"canary-of-prepare" in path.read_bytes()] == []
    assert "canary" not in "".join(place.told)


# With a real pip
