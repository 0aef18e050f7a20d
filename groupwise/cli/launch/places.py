"""Places of jobs, as the words of the command line name them. A machine's host key is checked before anything else is sent to it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from groupwise.core.errors import UsageError

if TYPE_CHECKING:
    from groupwise.cli.fleet.reach import Trust, Where
    from groupwise.jobs.launch.local_registry import Note
    from groupwise.jobs.launch.places import JobBackend


def note_of(
    name: str, at: str | None, key: str | None, trust: str | None, profile: str | None = None
) -> Note:
    """The job's note: from --at if it is given, else from the local registry. Raises UsageError."""
    check_name(name)
    from groupwise.jobs.launch import local_registry

    if at is not None:
        return local_registry.Note(name, _place_at(at, key, trust, profile), Path.cwd())
    if key is not None or trust is not None or profile is not None:
        raise UsageError(
            "--key, --trust and --profile are for --at: of a job that was launched here they are known."
        )
    return local_registry.find(name)


def _place_at(at: str, key: str | None, trust: str | None, profile: str | None) -> JobBackend:
    """The place that --at names. Raises UsageError."""
    from groupwise.jobs.launch.places import AWS, LOCAL, MODAL, RAY, SLURM, SSH, JobBackend

    kind, _, rest = at.partition(":")
    if profile is not None and kind not in (AWS, MODAL):
        raise UsageError(
            f"--profile {profile}: it is for --at aws:REGION and --at modal, whose credentials have profiles, and --at is {at}."
        )
    if kind == LOCAL and not rest:
        return JobBackend(LOCAL)
    if kind == SSH and rest:
        return machines_together([_machine_at(each, key, trust) for each in rest.split(",")], None)
    if kind in (SLURM, RAY):
        way, _, api = rest.partition(",")
        address, slash, folder = way.partition("/")
        login, shared = _machine_at(address, key, trust), f"{slash}{folder}" or None
        if kind == RAY:
            return ray_cluster(login, shared, api or None)
        if not api:
            return slurm_cluster(login, shared)
    if kind == AWS and rest and trust is None:
        return JobBackend(AWS, {"region": rest, "profile": profile, "key_path": key})
    if kind == MODAL:
        if rest and profile is not None:
            raise UsageError(
                f"--profile {profile}: --at modal:{rest} names a profile already; leave one of the two out."
            )
        return JobBackend(MODAL, {"profile": rest or profile})
    raise UsageError(
        f"--at {at}: a place is wanted, local, ssh:USER@HOST:PORT, aws:REGION with --key and without --trust, slurm:USER@HOST:PORT/SHARED, "
        "ray:USER@HOST:PORT/SHARED,ADDRESS or modal:PROFILE; of the last three all behind the first word may be left out."
    )


def _machine_at(word: str, key: str | None, trust: str | None) -> JobBackend:
    """The machine at USER@HOST:PORT; an empty word means this one."""
    from groupwise.jobs.launch.places import LOCAL, JobBackend

    if not word:
        return JobBackend(LOCAL)
    return machine(word, None, None, key, trust_of(trust, None), None)


def machines_together(machines: Sequence[JobBackend], meets_at: str | None) -> JobBackend:
    """One place made of several machines; `meets_at`: the address at which the others reach the first one. Raises UsageError for a machine
    that is named twice."""
    from groupwise.jobs.launch.places import SSH, JobBackend

    words = [str(each) for each in machines]
    if twice := sorted({each for each in words if words.count(each) > 1}):
        raise UsageError(f"--host: {twice[0]} is named twice, and a job runs once on each machine.")
    first, *others = machines
    if not others:
        return first
    more = {"others": [dict(each.detail) for each in others], "meets_at": meets_at}
    return JobBackend(SSH, {**first.detail, **more})


def login_machine(
    host: str | None,
    user: str | None,
    port: int | None,
    key: str | None,
    trust: str | None,
    trust_jump: str | None,
    python: str | None,
) -> JobBackend:
    """The machine from which a cluster is given its jobs: the named one, else this one. Raises UsageError."""
    from groupwise.jobs.launch.places import LOCAL, JobBackend

    if host is not None:
        return machine(host, user, port, key, trust_of(trust, trust_jump), python)
    if user or port or key or trust or trust_jump:
        raise UsageError(
            "--user, --port, --key, --trust and --trust-jump are of the machine that jobs are given to the cluster from: --host names it. "
            "Without it the cluster is asked here."
        )
    return JobBackend(LOCAL, {"python": python} if python else {})


def slurm_cluster(login: JobBackend, shared: str | None) -> JobBackend:
    """The Slurm cluster of a login machine. Raises UsageError."""
    from groupwise.jobs.launch.places import SLURM, JobBackend

    return JobBackend(SLURM, {**login.detail, **_shared(shared)})


def ray_cluster(login: JobBackend, shared: str | None, address: str | None) -> JobBackend:
    """The Ray cluster whose head the login machine reaches at that address. Raises UsageError."""
    from groupwise.jobs.clouds.ray import checked_address
    from groupwise.jobs.hosts.ray import ADDRESS
    from groupwise.jobs.launch.places import RAY, JobBackend

    found = checked_address(address or ADDRESS)
    detail = {**login.detail, **_shared(shared)}
    return JobBackend(RAY, detail if found == ADDRESS else {**detail, "address": found})


def _shared(folder: str | None) -> dict[str, str]:
    if folder is None:
        return {}
    if not folder.startswith("/"):
        raise UsageError(
            f"--shared {folder}: an absolute path is expected, of a folder that the machine which jobs are given from and all nodes have."
        )
    return {"shared": folder.rstrip("/")}


def check_name(name: str) -> None:
    """Raises UsageError for a name that no job can have."""
    from groupwise.jobs.hosts.spec import JOB_ID

    if not JOB_ID.fullmatch(name):
        raise UsageError(
            f"{name[:80]!r} is no name of a job: letters, digits, - and _ are expected, 80 at most, a letter or a digit first."
        )


def trust_of(fingerprint: str | None, of_jump: str | None) -> Trust:
    """How to trust host keys that stand in no known_hosts: by these fingerprints, or by the user's answer if there is a terminal."""
    from groupwise.cli.fleet.reach import Trust

    asks = sys.stdin.isatty() and sys.stderr.isatty()
    return Trust(
        fingerprint,
        of_jump,
        ask=(lambda question: typer.confirm(question, default=False, err=True)) if asks else None,
    )


def machine(
    host: str,
    user: str | None,
    port: int | None,
    key: str | None,
    trust: Trust,
    python: str | None,
) -> JobBackend:
    """The machine that `ssh HOST` leads to, with its host key pinned."""
    if find_spec("asyncssh") is None:
        raise UsageError("Other machines are reached by asyncssh: pip install 'groupwise[launch]'.")
    from groupwise.cli.fleet.reach import Way
    from groupwise.jobs.launch.places import AGENT, SSH, JobBackend

    before, _, name = host.rpartition("@")
    alone, colon, number = name.rpartition(":")
    if colon and number.isdecimal() and ":" not in alone:  # an IPv6 address has several colons
        name, port = alone, int(number)
    where = Way(None, port, user or before or None, key, name).of_new(trust)
    agent = where.key is None and AGENT in os.environ
    jump = where.jump
    detail: dict[str, Any] = {
        "host": where.host,
        "user": where.user,
        "port": where.port,
        "key": where.key,
        "host_key": _host_key(name, where, trust),
        "agent": agent,
        "python": python,
    }
    if jump is not None:
        detail["jump"] = {
            "host": jump["host"],
            "user": jump["user"],
            "port": jump["port"],
            "key": jump["ssh_key_path"],
            "host_key": jump["host_key"],
        }
    return JobBackend(SSH, detail)


def _host_key(name: str, where: Where, trust: Trust) -> str:
    """The host key that known_hosts has, else the one that the user trusts now. Raises UsageError."""
    from groupwise.cli.fleet.reach import host_key_of
    from groupwise.jobs.hosts.keys import known

    if trust.fingerprint is None:
        found = known(where.host, where.port) or known(name, where.port)
        if found is not None:
            return str(found)
    seen = host_key_of(where, trust)
    if seen.pinned is None:
        raise UsageError(
            f"{where.host} is not in your known_hosts, so that nothing more is said to it. Compare the fingerprint above with what the "
            "machine says of itself (`ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` there), and say it: --trust SHA256:…"
        )
    return seen.pinned
