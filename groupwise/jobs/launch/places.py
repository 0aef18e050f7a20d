"""Where jobs are launched: places, as plain data that can be written down, and the backend that reaches one.

A place is called by a word, on the command line and in lists: `local`, `ssh:gpu@box:22`, `slurm`, `slurm:me@login:22/scratch/me`,
`ssh:gpu@box:22,gpu@bix:22` of several that a job runs on at once, `ray:me@head:22/scratch/me,http://10.0.0.2:8265`, `aws:us-east-1`,
`modal`.
"""

from __future__ import annotations

import getpass
import os
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from groupwise.core.errors import UsageError
from groupwise.jobs.clouds.backend import Backend
from groupwise.jobs.clouds.gang import GangBackend
from groupwise.jobs.clouds.machine import ROOT, MachineBackend
from groupwise.jobs.clouds.modal.backend import ModalBackend
from groupwise.jobs.clouds.modal.live import LiveModal
from groupwise.jobs.clouds.modal.runner import ModalRunner
from groupwise.jobs.clouds.ray import RayBackend
from groupwise.jobs.clouds.slurm import SlurmBackend
from groupwise.jobs.hosts.driver import Runner
from groupwise.jobs.hosts.local import LocalHost
from groupwise.jobs.hosts.port import Host
from groupwise.jobs.hosts.ray import ADDRESS, TOKENS, RayRunner
from groupwise.jobs.hosts.slurm import SlurmRunner
from groupwise.jobs.launch.state import state_folder

if TYPE_CHECKING:
    from groupwise.jobs.clouds.ec2 import Ec2

AGENT = "SSH_AUTH_SOCK"
"""The variable by which an agent is found, which is another one with each login."""
LOCAL, SSH, SLURM, RAY, AWS, MODAL = "local", "ssh", "slurm", "ray", "aws", "modal"
OF_HERE = frozenset({LOCAL, SLURM, RAY})
"""Kinds of places that this machine may have, or be given jobs for by itself."""
RENTING = frozenset({AWS})
"""Kinds of places whose backends rent what jobs run on (`groupwise.jobs.clouds.backend.Renting`), so that it may be left over.

Containers of Modal are paid, too, but end with their calls."""


@dataclass(frozen=True, slots=True)
class JobBackend:
    """One of them."""

    kind: str
    detail: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """How it is reached; no secrets, but paths of keys."""

    def __str__(self) -> str:
        detail = self.detail
        if "region" in detail:
            return f"{self.kind}:{detail['region']}"
        machines = [detail, *self.others] if "host" in detail else []
        there = ",".join("{user}@{host}:{port}".format(**each) for each in machines)
        address = f",{detail['address']}" if detail.get("address") else ""
        word = f"{there}{detail.get('shared') or ''}{detail.get('profile') or ''}{address}"
        return f"{self.kind}:{word}" if word else self.kind

    def is_same(self, other: JobBackend) -> bool:
        """True if jobs of one name would be the same job here and there, however it is reached."""
        return self._identity == other._identity

    @property
    def _identity(self) -> tuple[Any, ...]:
        """Behind one address there may be several machines, by tunnels: a machine is known by its key."""
        keys = [each.get("host_key") for each in (self.detail, *self.others)]
        return str(self), self.detail.get("profile"), tuple(keys)

    @property
    def is_here(self) -> bool:
        """It is spoken to as a process of this machine, whose disks it has."""
        return self.kind in OF_HERE and "host" not in self.detail

    @property
    def root(self) -> str:
        """The runner's folder there."""
        shared = self.detail.get("shared")
        return f"{shared}/{ROOT}" if shared else ROOT

    @property
    def python(self) -> str | None:
        """The interpreter there that jobs are begun with, where that is known here."""
        return self.detail.get("python") or (sys.executable if self.is_here else None)

    @property
    def meets_at(self) -> str | None:
        """The address of the first machine for the others, if there are others."""
        return (self.detail.get("meets_at") or self.detail["host"]) if self.others else None

    @property
    def others(self) -> Sequence[Mapping[str, Any]]:
        """The machines beside the first one."""
        return self.detail.get("others", ())

    def document(self) -> dict[str, Any]:
        """The place as plain data, to be stored."""
        return {"kind": self.kind, "detail": dict(self.detail)}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> JobBackend:
        """The place that `document` describes. Raises UsageError for a kind of another release."""
        if document["kind"] not in WAYS:
            raise UsageError(
                f"{document['kind']} is no place that this release of groupwise knows: it knows {', '.join(WAYS)}."
            )
        return cls(document["kind"], document["detail"])


def reach(place: JobBackend) -> Backend:
    """A new way to it."""
    return WAYS[place.kind](place)


def _machine(place: JobBackend) -> Backend:
    host, where, python = _spoken_to(place)
    runner = Runner(host, root=place.root, python=python)
    if place.meets_at is None:
        return MachineBackend(place.kind, runner, where)
    machines = [(runner, where), *(_other(place, each) for each in place.others)]
    return GangBackend(place.kind, machines, place.meets_at)


def _other(place: JobBackend, detail: Mapping[str, Any]) -> tuple[Runner, str]:
    host, where = _ssh(detail)
    return Runner(host, root=place.root, python=detail.get("python") or "python3"), where


def _slurm(place: JobBackend) -> Backend:
    host, where, python = _spoken_to(place)
    runner = SlurmRunner(host, root=place.root, python=python)
    return SlurmBackend(place.kind, runner, f"Slurm, by {where}")


def _ray(place: JobBackend) -> Backend:
    host, where, python = _spoken_to(place, also=TOKENS)
    address = place.detail.get("address") or ADDRESS
    runner = RayRunner(host, root=place.root, python=python, address=address)
    return RayBackend(place.kind, runner, f"Ray, by {where}")


def _aws(place: JobBackend) -> Backend:
    from groupwise.jobs.clouds.aws import AwsBackend
    from groupwise.jobs.clouds.aws_checks import Access
    from groupwise.jobs.clouds.aws_state import Kept

    detail = {name: value for name, value in place.detail.items() if value is not None}
    region, profile = detail.pop("region"), detail.pop("profile", None)
    kept = Kept(state_folder("aws") / f"{region}-{profile or 'default'}")
    owner = f"{getpass.getuser()}@{socket.gethostname()}"
    return AwsBackend(place.kind, _ec2(region, profile), Access(**detail), kept, owner=owner)


@cache
def _ec2(region: str, profile: str | None) -> Ec2:
    """Cached for the whole command: reading the descriptions of AWS's services takes longer than asking."""
    from groupwise.jobs.clouds.ec2 import BotoEc2

    return BotoEc2(region, profile)


def _modal(place: JobBackend) -> Backend:
    profile = cast("str | None", place.detail.get("profile"))
    where = f"Modal (profile {profile})" if profile else "Modal"
    return ModalBackend(place.kind, ModalRunner(LiveModal(profile)), where)


def _spoken_to(place: JobBackend, also: Iterable[str] = ()) -> tuple[Host, str, str]:
    """A way to the machine, its name for people, and its interpreter. `also`: variables that one of here is asked with."""
    host, where = (LocalHost(also=also), "this machine") if place.is_here else _ssh(place.detail)
    return host, where, place.python or "python3"


def _ssh(detail: Mapping[str, Any]) -> tuple[Host, str]:
    """A way to the machine, and its name for people."""
    from groupwise.jobs.hosts.ssh import Address, SshHost

    def address(of: Mapping[str, Any]) -> Address:
        return Address(of["host"], of["user"], of["port"], of["key"], of["host_key"])

    jump = cast("Mapping[str, Any] | None", detail.get("jump"))
    host = SshHost(
        address(detail),
        jump=None if jump is None else address(jump),
        agent_path=_agent(detail.get("agent")),
    )
    return host, str(address(detail))


def _agent(used: bool | str | None) -> str | None:
    """Its socket, where one is used; notes of earlier releases have the one of that day."""
    if not used:
        return None
    return os.environ.get(AGENT) or (used if isinstance(used, str) else None)


WAYS: dict[str, Callable[[JobBackend], Backend]] = {
    LOCAL: _machine,
    SSH: _machine,
    SLURM: _slurm,
    RAY: _ray,
    AWS: _aws,
    MODAL: _modal,
}
"""To the places of each kind."""
