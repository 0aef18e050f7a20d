"""The machines of the tests themselves: what a test does to them happens, and nothing of them outlives the test."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from groupwise.hosts.driver import Launch, Runner
from groupwise.hosts.spec import JobSpec
from groupwise.hosts.ssh import Address, SshHost
from tests import ssh_hosts

pytestmark = pytest.mark.fleet
USER = """
import asyncio, contextlib, sys
from groupwise.hosts.driver import Launch, Runner
from groupwise.hosts.spec import JobSpec
from groupwise.hosts.ssh import Address, SshHost
from tests import ssh_hosts

def address(host):
    row = host.vm_row()
    return Address(row["ip_address"], row["user"], row["port"], row["ssh_key_path"], row["host_key"])

async def start(host):
    runner = Runner(SshHost(address(host)))
    await runner.launch(Launch("job-1", 1, JobSpec(("sleep", sys.argv[2])), slot=0))
    await runner.host.close()

with contextlib.ExitStack() as stack:
    if sys.argv[1] == "plain":
        hosts = stack.enter_context(ssh_hosts.loopback_hosts(2))
    else:
        stack.enter_context(ssh_hosts.own_network())
        hosts = stack.enter_context(ssh_hosts.full_hosts(2))
    for host in hosts:
        asyncio.run(start(host))
    print(hosts[0].folder.parent, flush=True)
    sys.stdin.read()
"""


def living(mark: str, among: Iterable[int] | None = None) -> list[str]:
    """Command lines of processes that are alive and say `mark`."""
    found: list[str] = []
    for each in Path("/proc").iterdir() if among is None else [Path(f"/proc/{n}") for n in among]:
        with contextlib.suppress(OSError):
            line = (each / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if each.name.isdigit() and mark in line and int(each.name) != os.getpid():
                found.append(line)
    return found


@pytest.mark.parametrize("form", ["plain", "full"])
def test_nothing_is_left_of_a_test_that_is_killed(form: str) -> None:
    ssh_hosts.needed("sshd", *(("unshare", "ip", "nft") if form == "full" else ()))
    if form == "full" and os.geteuid() != 0:
        pytest.skip("machines in namespaces need root")
    length = f"{100_000 + os.getpid()}"
    test = subprocess.Popen(
        [sys.executable, "-c", USER, form, length],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        folder = Path(test.stdout.readline().strip())
        assert folder.name.startswith("groupwise-hosts-")
        assert len([line for line in living(f"sleep {length}") if line.startswith("sleep")]) == 2
    finally:
        test.send_signal(signal.SIGKILL)
        test.communicate()
    deadline = time.monotonic() + 20
    while living(f"sleep {length}") or living(str(folder)):
        assert time.monotonic() < deadline, living(f"sleep {length}") + living(str(folder))
        time.sleep(0.02)
    shutil.rmtree(folder)


def address(host: ssh_hosts.Host) -> Address:
    row = host.vm_row()
    return Address(
        row["ip_address"], row["user"], row["port"], row["ssh_key_path"], row["host_key"]
    )


async def test_a_plain_machine_has_gpus_of_its_own_and_ends_whole() -> None:
    with ssh_hosts.loopback_hosts(2) as [one, other]:
        uuids = one.gpus(2)
        runner, beside = Runner(SshHost(address(one))), Runner(SshHost(address(other)))
        seen = await runner.observe()
        assert [gpu.uuid for gpu in seen.gpus] == uuids
        assert (await beside.observe()).gpus == ()
        one.gpus(2, mode="hang")
        assert (await runner.observe(probe_timeout=0.5)).probe.status == "hung"
        state = await beside.launch(Launch("job-1", 1, JobSpec(("sleep", "1000")), slot=0))
        other.power_loss()
        assert not os.path.exists(f"/proc/{state.pid}")  # noqa: ASYNC240  # nothing else runs
        assert (other.workdir / "attempts/job-1.1/state.json").exists()
        await runner.host.close()
        await beside.host.close()


async def test_a_full_machine_has_processes_and_a_boot_of_its_own(
    full_machines: list[ssh_hosts.FullHost],
) -> None:
    [host, _] = full_machines
    uuids = host.gpus(1)
    runner = Runner(SshHost(address(host)))
    seen = await runner.observe()
    assert [gpu.uuid for gpu in seen.gpus] == uuids
    assert seen.boot_id == (host.folder / "boot_id").read_text().strip()
    length = f"{200_000 + os.getpid()}"
    await runner.launch(
        Launch("job-1", 1, JobSpec(("sleep", length)), gpus=uuids, environment={"ATTEMPT": "0"})
    )
    [command] = living(f"sleep {length}", host.processes())
    assert command.startswith("sleep")
    host.power_loss()
    assert not living(f"sleep {length}")
    assert not host.is_on()
    await runner.host.close()
