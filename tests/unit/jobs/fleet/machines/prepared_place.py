"""A machine that tests prepare by its real runner, with a program in place of Python and pip."""

from pathlib import Path
from typing import Any

from groupwise.jobs.fleet.attempts.records import Machine
from groupwise.jobs.fleet.machines.locks import Lock
from groupwise.jobs.fleet.machines.packing import Packed
from groupwise.jobs.fleet.machines.plans import Plan
from groupwise.jobs.fleet.machines.prepare import Prepared, prepare
from groupwise.jobs.hosts.files import BlobStore
from groupwise.jobs.hosts.host import Host
from groupwise.jobs.hosts.local import LocalHost
from tests.unit.jobs.fleet.machines.build_folder import BuildFolder

PLAN = Plan(Packed("1.0", b"a wheel"), Lock(("six==1.17.0",)), time_seconds=60.0)


class Place:
    """A machine that is this one, with its folder, its Python, and what was told of it."""

    def __init__(self, folder: Path, host: Host | None = None, **columns: Any) -> None:
        """`host`: how the machine is reached, and `columns` its row, where it is not this one."""
        self.builds = BuildFolder(folder)
        self.vm = folder / "vm"
        self.store = BlobStore(folder / "blobs")
        self.host = host or LocalHost()
        self.told: list[str] = []
        self.machine = machine_row(**({"workdir": str(self.vm)} | columns))

    def plan(self, **more: Any) -> Plan:
        about: dict[str, Any] = {"lock": PLAN.lock, "time_seconds": 60.0, **more}
        return Plan(PLAN.packed, pythons=(str(self.builds.python),), **about)

    async def prepare(self, plan: Plan | None = None, host: Host | None = None) -> Prepared:
        plan = plan or self.plan()
        return await prepare(self.machine, plan, self.store, self.told.append, host or self.host)

    def environment(self, plan: Plan | None = None) -> Path:
        return self.vm / "environments" / (plan or self.plan()).name


def machine_row(**more: Any) -> Machine:
    about: dict[str, Any] = {
        "vm_id": "vm-1", "transport": "local", "ip_address": "127.0.0.1", "port": 22, "user": None,
        "ssh_key_path": None, "jump": None, "host_key": None, "workdir": "w", "python": "python3",
        "deadman": None, "probe": None, "idle_memory_mb": 500, "lost": False, "takes_new": True,
    }  # fmt: skip
    return Machine(**(about | more))
