"""A real Slurm cluster on this machine, with two nodes of two fake GPUs each."""

import atexit
import functools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from getpass import getuser
from pathlib import Path

from tests.ports import free_port
from tests.processes import wait_until

NODES = ("n1", "n2")
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={controller}
AuthType=auth/none
CredType=cred/none
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0,bf_interval=1
SlurmdParameters=config_overrides
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
ReturnToService=2
SlurmctldTimeout=10
SlurmdTimeout=60
KillWait=5
MinJobAge=300
MessageTimeout=5
JobRequeue=1
{nodes}
PartitionName=gpu Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=5
PartitionName=urgent Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=9
"""
NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=4000 "
    "Gres=gpu:2 State=UNKNOWN"
)
GPUS = """\
AutoDetect=off
NodeName=n[1-2] Name=gpu File=/dev/null
NodeName=n[1-2] Name=gpu File=/dev/zero
"""


@dataclass
class Cluster:
    """A Slurm cluster, with its servers as children of this process."""

    folder: Path
    servers: dict[str, "subprocess.Popen[bytes]"] = field(
        default_factory=dict[str, "subprocess.Popen[bytes]"]
    )

    @property
    def configuration(self) -> Path:
        """The path that SLURM_CONF must have."""
        return self.folder / "slurm.conf"

    @property
    def environment(self) -> dict[str, str]:
        """The environment of Slurm's programs."""
        return {
            "SLURM_CONF": str(self.configuration),
            "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        }

    def start(self, *names: str) -> None:
        """Start the controller, or nodes."""
        for name in names:
            program = ["slurmctld", "-D"] if name == "controller" else ["slurmd", "-D", "-N", name]
            path = shutil.which(program[0], path=self.environment["PATH"])
            assert path, f"{program[0]} is not installed"
            with (self.folder / f"{name}.out").open("ab") as said:
                self.servers[name] = subprocess.Popen(
                    [path, *program[1:]],
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=said,
                    start_new_session=True,
                )

    def kill(self, name: str) -> None:
        """`kill -9` a server."""
        server = self.servers.pop(name)
        server.kill()
        server.wait()

    def run(self, *arguments: str) -> str:
        """Run a program of Slurm; returns its output."""
        done = subprocess.run(
            arguments, env=self.environment, capture_output=True, text=True, check=True, timeout=60
        )
        return done.stdout.strip()

    def until_ready(self) -> None:
        """Wait until all nodes accept jobs."""

        def all_take_jobs() -> bool:
            with suppress(subprocess.CalledProcessError):
                options = ("-h", "-N", "-p", "gpu", "-t", "idle,mix,alloc", "-o", "%N")
                return len(self.run("sinfo", *options).split()) == len(NODES)
            return False

        log = self.folder / "controller.out"
        wait_until(all_take_jobs, "all nodes", details=log.read_text)

    def until_saved(self, name: str) -> None:
        """The controller has written a job down whose name begins so. It does that some seconds after it has taken it; killed before, it
        forgets the job, and gives its number to the next one, which the node then takes for the first."""
        file = self.folder / "state" / "job_state"
        wait_until(lambda: name.encode() in read(file), f"{name} in {file}")

    def end(self) -> None:
        """End the whole cluster."""
        for server in self.servers.values():
            server.kill()
            server.wait()
        for pid in started_with(f"SLURM_CONF={self.configuration}"):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def started_with(variable: str) -> list[int]:
    """Other processes that were started with this variable in their environment."""
    found: list[int] = []
    for each in Path("/proc").iterdir():
        with suppress(OSError):
            if each.name.isdigit():
                words = (each / "environ").read_bytes().split(b"\0")
                found += [int(each.name)] * (variable.encode() in words)
    return [pid for pid in found if pid != os.getpid()]


def read(path: Path) -> bytes:
    """The file's bytes; empty if there is no such file."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return path.read_bytes()
    return b""


@contextmanager
def cluster() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="gw-slurm-", ignore_cleanup_errors=True) as path:
        found = Cluster(Path(path))
        for name in ("state", *(f"spool.{node}" for node in NODES)):
            (found.folder / name).mkdir()
        host = socket.gethostname().partition(".")[0]
        nodes = [NODE.format(name=name, host=host, port=free_port()) for name in NODES]
        found.configuration.write_text(
            CONFIGURATION.format(
                host=host,
                user=getuser(),
                controller=free_port(),
                folder=found.folder,
                nodes="\n".join(nodes),
            )
        )
        (found.folder / "gres.conf").write_text(GPUS)
        try:
            found.start("controller", *NODES)
            found.until_ready()
            yield found
        finally:
            found.end()


@functools.cache
def shared() -> Cluster:
    """A cluster shared by the tests of this process that leave it unchanged; it ends with the process."""
    until_the_end = ExitStack()
    atexit.register(until_the_end.close)
    return until_the_end.enter_context(cluster())
