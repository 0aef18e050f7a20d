"""Places of jobs, as the words of the command line name them. A machine's host key is checked before anything else is sent to it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from groupwise.cli.environment import RemoteEnvironmentOptions
from groupwise.cli.options import option
from groupwise.core.errors import UsageError
from groupwise.core.extras import require_packages

if TYPE_CHECKING:
    from groupwise.jobs.fleet.machines.plans import Plan as EnvironmentPlan
    from groupwise.jobs.launch.local_registry import Note
    from groupwise.jobs.launch.places import JobBackend


@dataclass(frozen=True, slots=True, kw_only=True)
class LoginOptions:
    """How to log in to a machine."""

    user: Annotated[str | None, option("U", "User to log in as.")] = None
    port: Annotated[int | None, option("N", "Port of SSH.", min=1, max=65535)] = None
    key: Annotated[str | None, option("FILE", "The private key, on this machine.")] = None
    trust: Annotated[
        str | None,
        option(
            "FINGERPRINT",
            "Fingerprint of its host key, SHA256:…; default: the one in known_hosts, else you are asked.",
        ),
    ] = None
    trust_jump: Annotated[
        str | None, option("FINGERPRINT", "Host key of the jump host, as SHA256:….")
    ] = None

    def machine(self, host: str, python: str | None) -> JobBackend:
        """The machine that `ssh HOST` connects to, with its host key pinned: by a fingerprint or, in a terminal, by the user's answer."""
        require_packages("A job on another machine", "launch", "asyncssh")
        from groupwise.cli.fleet.machine_address import SshOptions, Trust, ask_user, host_key_of
        from groupwise.jobs.hosts.ssh import AGENT
        from groupwise.jobs.launch.places import SSH, JobBackend

        trust = Trust(self.trust, self.trust_jump, ask=ask_user())
        ssh = SshOptions(host=host, port=self.port, user=self.user, key=self.key)
        address = ssh.of_new(trust)
        host_key = host_key_of(address, trust).pinned
        if host_key is None:
            raise UsageError(
                f"{address.host} is not in your known_hosts, so it is not contacted any further. Compare the fingerprint above with the "
                "machine's own (`ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` there), and give it: --trust SHA256:…"
            )
        detail: dict[str, Any] = {
            "host": address.host,
            "user": address.user,
            "port": address.port,
            "key": address.key,
            "host_key": host_key,
            "agent": AGENT in os.environ,
            "python": python,
        }
        if (jump := address.jump) is not None:
            detail["jump"] = {
                "host": jump["host"],
                "user": jump["user"],
                "port": jump["port"],
                "key": jump["ssh_key_path"],
                "host_key": jump["host_key"],
            }
        return JobBackend(SSH, detail)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions(LoginOptions):
    """The machine from which jobs are submitted to a cluster."""

    host: Annotated[
        str | None,
        option(
            "H",
            "The machine to submit from, as for `ssh H`: a name of the ssh config, or an address. Default: this machine.",
        ),
    ] = None
    shared: Annotated[
        str | None,
        option("DIR", "Folder that the machine and all nodes share; default: the home folder."),
    ] = None

    def plan(self, packages: RemoteEnvironmentOptions) -> EnvironmentPlan | None:
        """The environment to build on the machine; None: it has one, as this machine does. Raises UsageError."""
        is_local = self.host is None and not packages.is_given
        return None if is_local else packages.plan_unless_there()

    def login(self, python: str | None) -> JobBackend:
        """The login machine itself. Raises UsageError."""
        from groupwise.jobs.launch.places import LOCAL, JobBackend

        if self.host is not None:
            return self.machine(self.host, python)
        if self.user or self.port or self.key or self.trust or self.trust_jump:
            raise UsageError(
                "--user, --port, --key, --trust and --trust-jump are for the machine that jobs are submitted from: --host names it. "
                "Without it they are submitted from here."
            )
        return JobBackend(LOCAL, {"python": python} if python else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedJob:
    """A job that was launched, from here or from another machine."""

    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the job.")]
    at: Annotated[
        str | None,
        option(
            "PLACE",
            "Place of a job that was launched from another machine: local, ssh:USER@HOST:PORT, slurm:USER@HOST:PORT, "
            "ray:USER@HOST:PORT, aws:REGION or modal.",
        ),
    ] = None
    key: Annotated[str | None, option("FILE", "With --at: the private key, on this machine.")] = (
        None
    )
    trust: Annotated[str | None, option("FINGERPRINT", "With --at: the host key, as SHA256:….")] = (
        None
    )
    profile: Annotated[
        str | None, option("P", "With --at aws:REGION or modal: the profile of the credentials.")
    ] = None

    def note(self) -> Note:
        """The job's note: from --at if given, otherwise from the local registry. Raises UsageError."""
        from groupwise.jobs.launch import local_registry

        check_name(self.name)
        if self.at is not None:
            return local_registry.Note(self.name, self._parse_place(self.at), Path.cwd())
        if self.key is not None or self.trust is not None or self.profile is not None:
            raise UsageError(
                "--key, --trust and --profile are for --at: for a job that was launched here they are known."
            )
        return local_registry.find(self.name)

    def _parse_place(self, at: str) -> JobBackend:
        """The place that --at names. Raises UsageError."""
        from groupwise.jobs.launch.places import AWS, LOCAL, MODAL, RAY, SLURM, SSH, JobBackend

        login, profile = LoginOptions(key=self.key, trust=self.trust), self.profile
        kind, _, location = at.partition(":")
        if profile is not None and kind not in (AWS, MODAL):
            raise UsageError(
                f"--profile {profile}: it is for --at aws:REGION and --at modal, whose credentials have profiles, and --at is {at}."
            )
        if kind == LOCAL and not location:
            return JobBackend(LOCAL)
        if kind == SSH and location:
            return machines_together(
                [login.machine(host, None) for host in location.split(",")], None
            )
        if kind in (SLURM, RAY):
            machine_address, _, api = location.partition(",")
            address, slash, folder = machine_address.partition("/")
            machine = login.machine(address, None) if address else JobBackend(LOCAL)
            shared = f"{slash}{folder}" or None
            if kind == RAY:
                return ray_cluster(machine, shared, api or None)
            if not api:
                return slurm_cluster(machine, shared)
        if kind == AWS and location and self.trust is None:
            return JobBackend(AWS, {"region": location, "profile": profile, "key_path": self.key})
        if kind == MODAL:
            if location and profile is not None:
                raise UsageError(
                    f"--profile {profile}: --at modal:{location} names a profile already; leave one of the two out."
                )
            return JobBackend(MODAL, {"profile": location or profile})
        raise UsageError(
            f"--at {at}: a place is expected, local, ssh:USER@HOST:PORT, aws:REGION with --key and without --trust, "
            "slurm:USER@HOST:PORT/SHARED, ray:USER@HOST:PORT/SHARED,ADDRESS or modal:PROFILE; the last three may be only their first word."
        )


def machines_together(machines: Sequence[JobBackend], meets_at: str | None) -> JobBackend:
    """One place consisting of several machines. Raises UsageError for a machine that is named twice.

    `meets_at`: the address at which the other machines reach the first one.
    """
    from groupwise.jobs.launch.places import SSH, JobBackend

    names = [str(machine) for machine in machines]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"--host: {twice[0]} is named twice, and a job runs once on each machine.")
    first, *other_machines = machines
    if not other_machines:
        return first
    extra = {"others": [dict(other.detail) for other in other_machines], "meets_at": meets_at}
    return JobBackend(SSH, {**first.detail, **extra})


def slurm_cluster(login: JobBackend, shared: str | None) -> JobBackend:
    """The Slurm cluster of a login machine. Raises UsageError."""
    from groupwise.jobs.launch.places import SLURM, JobBackend

    return JobBackend(SLURM, {**login.detail, **_shared_folder(shared)})


def ray_cluster(login: JobBackend, shared: str | None, address: str | None) -> JobBackend:
    """The Ray cluster whose head the login machine reaches at that address. Raises UsageError."""
    from groupwise.jobs.clouds.schedulers import checked_address
    from groupwise.jobs.hosts.ray import ADDRESS
    from groupwise.jobs.launch.places import RAY, JobBackend

    url = checked_address(address or ADDRESS)
    detail = {**login.detail, **_shared_folder(shared)}
    return JobBackend(RAY, detail if url == ADDRESS else {**detail, "address": url})


def _shared_folder(folder: str | None) -> dict[str, str]:
    if folder is None:
        return {}
    if not folder.startswith("/"):
        raise UsageError(
            f"--shared {folder}: an absolute path is expected, of a folder that all nodes share with the machine that submits jobs."
        )
    return {"shared": folder.rstrip("/")}


def check_name(name: str) -> None:
    """Raise UsageError for an invalid name of a job."""
    from groupwise.jobs.hosts.spec import JOB_ID

    if not JOB_ID.fullmatch(name):
        raise UsageError(
            f"{name[:80]!r} is not a name of a job: letters, digits, - and _ are expected, 80 at most, a letter or a digit first."
        )
