"""The launch backends that their contract is tested with, each with what it needs: a folder, an sshd, a cluster."""

import re
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import pytest

from groupwise.jobs.clouds.aws import AwsBackend
from groupwise.jobs.clouds.aws_checks import Access
from groupwise.jobs.clouds.aws_state import JobRecords
from groupwise.jobs.clouds.backend import Backend, Handle, Order, Outcome, Plan, Status
from groupwise.jobs.clouds.folder import INCOMING
from groupwise.jobs.clouds.gang import NODES, GangBackend
from groupwise.jobs.clouds.machine import ROOT, MachineBackend
from groupwise.jobs.clouds.modal.api import ModalApi
from groupwise.jobs.clouds.modal.backend import ModalBackend
from groupwise.jobs.clouds.modal.runner import ModalRunner
from groupwise.jobs.clouds.schedulers import SchedulerBackend, ray_options, sbatch_options
from groupwise.jobs.hosts.driver import Runner
from groupwise.jobs.hosts.files import BlobStore
from groupwise.jobs.hosts.local import LocalHost
from groupwise.jobs.hosts.ray import RayRunner
from groupwise.jobs.hosts.slurm import SlurmRunner
from groupwise.jobs.hosts.spec import JobSpec
from groupwise.jobs.hosts.ssh import Address, SshHost
from tests import fake_aws, ray_cluster, ssh_hosts
from tests import slurm as real_slurm
from tests.fake_modal import FakeModal

TIMEOUT_S = 20.0
"""Timeout of one call of a backend."""
SAVES = """\
import hashlib, json, os, pathlib, signal, sys, time
def save(step, data):
    folder = pathlib.Path(f"outputs/checkpoints/step-{step}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "w").write_bytes(data)
    entry = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps({"step": step, "files": {"w": entry}}))
begun = os.environ.get("RESUME_FROM")
begun = pathlib.Path(begun, "w").read_text() if begun else ""
"""
"""The beginning of a script that makes checkpoints: `begun` is the step of the checkpoint that it resumes from."""
WAITS = "import time\nprint('on', flush=True)\ntime.sleep(1000)\n"


@dataclass(frozen=True)
class BackendSpec:
    """How to make one backend. Plain data, so that another process can make it too."""

    kind: str
    home: str
    """The backend keeps everything below this folder."""
    login: dict[str, Any] | None = None
    slurm: str | None = None
    """The path of slurm.conf, if this is a Slurm cluster."""
    ray: tuple[str, str] | None = None
    """The address of the head and its token, if this is a Ray cluster."""
    access: dict[str, Any] | None = None
    """Fields of `Access`, if machines are rented. AWS's address is in this process's environment."""
    nodes: int = 1
    """Machines that every job runs on, each with its own folder in `home`."""

    def reach(self) -> Backend:
        """A new backend object, as another machine would make one."""
        if self.nodes > 1:
            homes = [Path(self.home, f"{n}") for n in range(self.nodes)]
            runners = [Runner(_local(f"{each}"), root=ROOT) for each in homes]
            machines = [(each, f"machine {n} of {self.kind}") for n, each in enumerate(runners)]
            return _OnAll(self.kind, machines, "127.0.0.1")
        if self.kind == "modal":
            return modal_backend(FakeModal(Path(self.home)))
        if self.access is not None:
            kept = JobRecords(Path(tempfile.mkdtemp(dir=Path(self.home).parent)))
            ec2, access = fake_aws.ec2_client(), Access(**self.access)
            return AwsBackend(self.kind, ec2, access, kept, timeouts=fake_aws.QUICK)
        if self.login is not None:
            host = SshHost(Address(**self.login))
        else:
            of_slurm = {"SLURM_CONF": self.slurm} if self.slurm else {}
            of_ray = {"RAY_AUTH_TOKEN": self.ray[1]} if self.ray else {}
            host = _local(self.home, **of_slurm, **of_ray)
        if self.slurm is not None:
            slurm = SlurmRunner(host, root=ROOT)
            return SchedulerBackend(self.kind, slurm, f"the place {self.kind}", sbatch_options)
        if self.ray is not None:
            runner = RayRunner(host, root=ROOT, address=self.ray[0])
            return SchedulerBackend(self.kind, runner, f"the place {self.kind}", ray_options)
        return MachineBackend(self.kind, Runner(host, root=ROOT), f"the place {self.kind}")


def _local(home: str, **more: str) -> LocalHost:
    path = f"{Path(home, 'bin')}:{Path(sys.executable).parent}:/usr/bin:/bin"
    return LocalHost(environment={"HOME": home, "PATH": path, **more})


class _OnAll(GangBackend):
    """Runs every job on all machines, although it asks for one."""

    async def plan(self, order: Order) -> Plan:
        return await super().plan(replace(order, nodes=self._count))

    async def submit(self, order: Order, store: BlobStore) -> Handle:
        return await super().submit(replace(order, nodes=self._count), store)


async def until(backend: Backend, handle: Handle, what: Callable[[Status], Any]) -> Status:
    """Wait for the first status that fulfils `what`."""
    status = await backend.status(handle)
    while not what(status):
        status = await backend.wait(handle, status, TIMEOUT_S)
    return status


async def ending(backend: Backend, handle: Handle) -> Any:
    """Wait for the job's end."""
    return (await until(backend, handle, lambda status: status.ending)).ending


OF_ORDERS = ("gpus", "nodes", "meets_at", "place_options")


def order(name: str, script: str, *words: str, **fields: Any) -> Order:
    """An order that runs a Python script. `values`: secret values by name. Other keywords are fields of the order or of its spec."""
    own = {each: fields.pop(each) for each in OF_ORDERS if each in fields}
    values = fields.pop("values", {})
    spec = JobSpec(("python3", "-c", script, *words), **{"secrets": tuple(values), **fields})
    return Order(name, spec, secrets=values, **own)


def tree(folder: Path) -> dict[str, bytes]:
    """Files by their paths, without partial downloads and what other machines of a gang have written."""
    found = (each for each in folder.rglob("*") if each.parent.name not in (INCOMING, NODES))
    files = (each for each in found if each.is_file())
    return {each.relative_to(folder).as_posix(): each.read_bytes() for each in files}


B = TypeVar("B", bound=Backend)


@dataclass
class LaunchClient(Generic[B]):
    """A launching user: a backend, a local folder, and the name of one job."""

    backend: B
    folder: Path
    name: str
    ordered: Callable[..., Order] = order

    @property
    def store(self) -> BlobStore:
        return BlobStore(self.folder / "blobs")

    def order(self, script: str, *words: str, name: str = "", **fields: Any) -> Order:
        return self.ordered(name or self.name, script, *words, **fields)

    async def submit(self, asked: Order | str, *words: str, **fields: Any) -> Handle:
        """Submit an order or a script."""
        if isinstance(asked, str):
            asked = self.order(asked, *words, **fields)
        return await self.backend.submit(asked, self.store)

    async def resume(self, **secrets: str) -> Handle:
        return await self.backend.resume(self.name, secrets, self.store)

    async def until(self, handle: Handle, what: Callable[[Status], Any]) -> Status:
        return await until(self.backend, handle, what)

    async def running(self, handle: Handle) -> None:
        """Wait until the job's command has printed something."""
        await self.until(handle, lambda status: status.log_size)

    async def saved(self, handle: Handle, step: int) -> Status:
        """Wait until the job has a checkpoint of this step."""
        return await self.until(handle, lambda status: status.step == step)

    async def ending(self, handle: Handle) -> Any:
        return await ending(self.backend, handle)

    async def outcome(self, handle: Handle) -> Outcome:
        return (await self.ending(handle)).outcome

    async def said(self, handle: Handle) -> str:
        """The job's whole log so far."""
        part = await self.backend.log(handle, 0, 1 << 20)
        assert part.size == len(part.data)
        return part.data.decode()

    async def fetched(self, handle: Handle) -> dict[str, bytes]:
        """What it has made."""
        await self.backend.fetch(handle, self.folder / "results")
        return tree(self.folder / "results")


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """The name of a job, unique to this test."""
    words = re.findall(r"[a-zA-Z0-9]+", request.node.name.removeprefix("test_"))
    return "-".join(words)[-60:].lstrip("-")


@pytest.fixture
async def client(
    spec: BackendSpec, name: str, tmp_path: Path
) -> AsyncIterator[LaunchClient[Backend]]:
    """A user of the backend, for this test only."""
    found = LaunchClient(spec.reach(), tmp_path, name)
    yield found
    await found.backend.close()


def modal_backend(port: ModalApi, *, every: float = 0.1, spare: float = 10.0) -> ModalBackend:
    """Modal's backend with shorter polling intervals, which accepts shorter calls."""
    return ModalBackend(
        "modal", ModalRunner(port, every=every), "the place modal", spare=spare, every=every
    )


@contextmanager
def modal(home: Path) -> Iterator[BackendSpec]:
    """A fake Modal on this machine."""
    yield BackendSpec("modal", str(home))
    FakeModal(home).stop()


@contextmanager
def local(home: Path) -> Iterator[BackendSpec]:
    """This machine, with another home folder."""
    yield BackendSpec("local", str(home))


@contextmanager
def gang(home: Path) -> Iterator[BackendSpec]:
    """Two simulated machines on this one; every job runs on both."""
    for n in range(2):
        (home / f"{n}").mkdir()
    yield BackendSpec("gang", str(home), nodes=2)


@contextmanager
def slurm(home: Path) -> Iterator[BackendSpec]:
    """A real Slurm with two nodes, which share the home folder."""
    yield BackendSpec("slurm", str(home), slurm=str(real_slurm.shared().configuration))


@contextmanager
def ray(home: Path) -> Iterator[BackendSpec]:
    """A real Ray with two nodes, which share the home folder."""
    found = ray_cluster.shared()
    yield BackendSpec("ray", str(home), ray=(found.address, found.token))


@contextmanager
def ssh(_: Path) -> Iterator[BackendSpec]:
    """A real sshd, with a home of its own."""
    with ssh_hosts.loopback_hosts() as [host]:
        row = host.vm_row()
        login = {
            "host": row["ip_address"], "user": row["user"], "port": row["port"], "key_path": row["ssh_key_path"],
            "host_key": row["host_key"],
        }  # fmt: skip
        yield BackendSpec("ssh", str(host.home), login)


@contextmanager
def rented(_: Path) -> Iterator[BackendSpec]:
    """AWS, where a real sshd stands in for every machine."""
    with ssh_hosts.loopback_hosts() as [host], fake_aws.cloud(host) as cloud:
        yield BackendSpec("aws", str(host.home), access=asdict(cloud.access()))


BACKENDS: dict[str, Callable[[Path], AbstractContextManager[BackendSpec]]] = {
    "local": local, "gang": gang, "ssh": ssh, "slurm": slurm, "ray": ray, "aws": rented,
    "modal": modal,
}  # fmt: skip
"""The backends by name; each takes a folder for its home."""
