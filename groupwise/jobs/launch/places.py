"""Places at which jobs can be launched, as plain data that can be stored, and the backend for each.

A place has a name on the command line and in lists: `local`, `ssh:gpu@box:22`, `slurm`, `slurm:me@login:22/scratch/me`,
`ssh:gpu@box:22,gpu@bix:22` (several machines that a job runs on at once), `ray:me@head:22/scratch/me,http://10.0.0.2:8265`,
`aws:us-east-1`, `modal`.
"""

from __future__ import annotations

import getpass
import os
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from groupwise.jobs.clouds.backend import Backend
from groupwise.jobs.clouds.gang import GangBackend
from groupwise.jobs.clouds.machine import ROOT, MachineBackend
from groupwise.jobs.clouds.modal.backend import ModalBackend
from groupwise.jobs.clouds.modal.live import LiveModal
from groupwise.jobs.clouds.modal.runner import ModalRunner
from groupwise.jobs.clouds.schedulers import SchedulerBackend, ray_options, sbatch_options
from groupwise.jobs.hosts.driver import Runner
from groupwise.jobs.hosts.host import Host
from groupwise.jobs.hosts.local import LocalHost
from groupwise.jobs.hosts.ray import ADDRESS, TOKEN_VARIABLES, RayRunner
from groupwise.jobs.hosts.slurm import SlurmRunner

if TYPE_CHECKING:
    from groupwise.jobs.clouds.ec2 import Ec2

LOCAL, SSH, SLURM, RAY, AWS, MODAL = "local", "ssh", "slurm", "ray", "aws", "modal"
LOCAL_KINDS = frozenset({LOCAL, SLURM, RAY})
"""Kinds of places that can be this machine itself."""
WITHOUT_GPU_MODELS = frozenset({LOCAL, SSH, AWS})
"""Kinds of places where a job cannot choose the model of its GPUs: they are those of the machine, or of the instance type."""
RENTING_KINDS = frozenset({AWS})
"""Kinds of places whose backends rent machines (`groupwise.jobs.clouds.backend.Renting`), which can be left running by mistake.

Modal's containers cost money too, but end with their calls."""


@dataclass(frozen=True, slots=True)
class JobBackend:
    """A place at which jobs can be launched."""

    kind: str
    detail: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """How to reach it; may contain paths of keys, but no secrets."""

    def __str__(self) -> str:
        detail = self.detail
        if "region" in detail:
            return f"{self.kind}:{detail['region']}"
        machines = [detail, *self.others] if "host" in detail else []
        addresses = ",".join("{user}@{host}:{port}".format(**machine) for machine in machines)
        address = f",{detail['address']}" if detail.get("address") else ""
        suffix = f"{addresses}{detail.get('shared') or ''}{detail.get('profile') or ''}{address}"
        return f"{self.kind}:{suffix}" if suffix else self.kind

    def is_same(self, other: JobBackend) -> bool:
        """True if both are the same place, i.e. jobs of one name are the same job, regardless of the access options. A machine is
        identified by its key, because one address may lead through tunnels to several machines."""

        def identity(place: JobBackend) -> tuple[Any, ...]:
            keys = [machine.get("host_key") for machine in (place.detail, *place.others)]
            return str(place), place.detail.get("profile"), keys

        return identity(self) == identity(other)

    @property
    def is_here(self) -> bool:
        """True if its runner is a process of this machine, with the same disks."""
        return self.kind in LOCAL_KINDS and "host" not in self.detail

    @property
    def root(self) -> str:
        """The runner's folder there."""
        shared = self.detail.get("shared")
        return f"{shared}/{ROOT}" if shared else ROOT

    @property
    def python(self) -> str | None:
        """The interpreter at the place that starts jobs; None if it is not known here."""
        return self.detail.get("python") or (sys.executable if self.is_here else None)

    @property
    def meets_at(self) -> str | None:
        """The address at which the other machines reach the first one; None if there is only one."""
        return (self.detail.get("meets_at") or self.detail["host"]) if self.others else None

    @property
    def others(self) -> Sequence[Mapping[str, Any]]:
        """The machines after the first one."""
        return self.detail.get("others", ())


def state_folder(kind: str) -> Path:
    """The folder for this machine's records of launched jobs: `$XDG_STATE_HOME/groupwise/<kind>`, by default below `~/.local/state` (XDG
    Base Directory Specification)."""
    root = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(root) / "groupwise" / kind


def reach(place: JobBackend) -> Backend:
    """Create a backend for this place."""
    return BACKENDS[place.kind](place)


def _machine_backend(place: JobBackend) -> Backend:
    host, where, python = _called_host(place)
    runner = Runner(host, root=place.root, python=python)
    if place.meets_at is None:
        return MachineBackend(place.kind, runner, where)
    machines = [(runner, where)]
    for detail in place.others:
        other_host, its_name = _ssh_host(detail)
        python = detail.get("python") or "python3"
        machines.append((Runner(other_host, root=place.root, python=python), its_name))
    return GangBackend(place.kind, machines, place.meets_at)


def _slurm_backend(place: JobBackend) -> Backend:
    host, where, python = _called_host(place)
    runner = SlurmRunner(host, root=place.root, python=python)
    return SchedulerBackend(place.kind, runner, f"Slurm, by {where}", sbatch_options)


def _ray_backend(place: JobBackend) -> Backend:
    host, where, python = _called_host(place, variables=TOKEN_VARIABLES)
    address = place.detail.get("address") or ADDRESS
    runner = RayRunner(host, root=place.root, python=python, address=address)
    return SchedulerBackend(place.kind, runner, f"Ray, by {where}", ray_options)


def _aws_backend(place: JobBackend) -> Backend:
    from groupwise.jobs.clouds.aws import AwsBackend
    from groupwise.jobs.clouds.aws_checks import Access
    from groupwise.jobs.clouds.aws_state import JobRecords

    detail = {name: value for name, value in place.detail.items() if value is not None}
    region, profile = detail.pop("region"), detail.pop("profile", None)
    records = JobRecords(state_folder("aws") / f"{region}-{profile or 'default'}")
    owner = f"{getpass.getuser()}@{socket.gethostname()}"
    return AwsBackend(place.kind, ec2(region, profile), Access(**detail), records, owner=owner)


@cache
def ec2(region: str, profile: str | None) -> Ec2:
    """The client for a region, cached for the whole command: loading the descriptions of AWS's services takes longer than a call."""
    from groupwise.jobs.clouds.ec2 import Ec2

    return Ec2(region, profile)


def _modal_backend(place: JobBackend) -> Backend:
    profile = cast("str | None", place.detail.get("profile"))
    where = f"Modal (profile {profile})" if profile else "Modal"
    return ModalBackend(place.kind, ModalRunner(LiveModal(profile)), where)


def _called_host(place: JobBackend, variables: Iterable[str] = ()) -> tuple[Host, str, str]:
    """The machine as a host, its name in messages, and its interpreter. `variables`: variables to pass on to a runner on this machine."""
    host, where = (
        (LocalHost(extra_variables=variables), "this machine")
        if place.is_here
        else _ssh_host(place.detail)
    )
    return host, where, place.python or "python3"


def _ssh_host(detail: Mapping[str, Any]) -> tuple[Host, str]:
    """A machine over SSH, and its name in messages."""
    from groupwise.jobs.hosts.ssh import AGENT, Address, SshHost

    def address(machine: Mapping[str, Any]) -> Address:
        return Address(
            machine["host"], machine["user"], machine["port"], machine["key"], machine["host_key"]
        )

    jump = cast("Mapping[str, Any] | None", detail.get("jump"))
    agent, socket_path = cast("bool | str | None", detail.get("agent")), None
    if agent:  # notes of earlier releases contain the socket's path of that day instead of True
        socket_path = os.environ.get(AGENT) or (agent if isinstance(agent, str) else None)
    host = SshHost(
        address(detail),
        jump=None if jump is None else address(jump),
        agent_path=socket_path,
    )
    return host, str(address(detail))


BACKENDS: dict[str, Callable[[JobBackend], Backend]] = {
    LOCAL: _machine_backend,
    SSH: _machine_backend,
    SLURM: _slurm_backend,
    RAY: _ray_backend,
    AWS: _aws_backend,
    MODAL: _modal_backend,
}
"""The function that creates the backend, by kind of place."""
