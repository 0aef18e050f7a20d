"""Connections to machines: from a machine's row to a `Host`, and to the host key that it shows.

Used by the dispatcher and the poller. A `Host` connects on its first call; that of a machine without a pinned key refuses every call, and
can only read the key.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from groupwise.jobs.clouds.schedulers import (
    SCHEDULERS,
    SchedulerAddress,
    SchedulerClient,
    SchedulerKind,
)
from groupwise.jobs.fleet.attempts.records import Machine
from groupwise.jobs.hosts.driver import Runner
from groupwise.jobs.hosts.host import Host, HostUnreachable
from groupwise.jobs.hosts.keys import HostKey
from groupwise.jobs.hosts.local import LocalHost
from groupwise.jobs.hosts.ssh import AGENT, Address, SshHost, SshTimeouts, read_host_key

LOCAL = "local"
"""The transport of the machine that the control plane itself runs on."""


def host_of(machine: Machine, timeouts: SshTimeouts | None = None) -> Host:
    """The connection to a machine; its caller closes it."""
    if machine.transport == LOCAL:
        kind = _engine_kind(machine)
        return LocalHost(extra_variables=() if kind is None else kind.credential_variables)
    agent_path = os.environ.get(AGENT)
    jump = jump_address(machine.jump)
    return SshHost(_address(machine), jump=jump, agent_path=agent_path, timeouts=timeouts)


def runner_of(machine: Machine, host: Host) -> Runner:
    """The runner there, reached through the machine's engine if it has one. Lost jobs of an engine are known only by their files."""
    scheduler = scheduler_of(machine, host)
    return (
        Runner(host, root=machine.workdir, python=machine.python)
        if scheduler is None
        else scheduler.runner
    )


def scheduler_of(machine: Machine, host: Host) -> SchedulerClient | None:
    """The client of the machine's engine; None: it has none, or one that this fleet does not know."""
    kind = _engine_kind(machine)
    if kind is None or machine.engine is None:
        return None
    settings = machine.engine.body
    return kind.connect(SchedulerAddress(host, machine.workdir, machine.python, settings.address))


def _engine_kind(machine: Machine) -> SchedulerKind | None:
    return None if machine.engine is None else SCHEDULERS.get(machine.engine.body.name)


async def shown_key(machine: Machine) -> HostKey:
    """The host key that a machine shows. Raises HostUnreachable, or HostKeyError if the key of its jump host is wrong."""
    return await read_host_key(
        machine.ip_address,
        machine.port,
        jump=jump_address(machine.jump),
        agent_path=os.environ.get(AGENT),
    )


def same_route(one: Machine, other: Machine) -> bool:
    """True if a connection made for one of them can be used for the other."""
    routes = [
        (machine.transport, _address(machine), machine.jump, _engine_kind(machine))
        for machine in (one, other)
    ]
    return routes[0] == routes[1]


def _address(machine: Machine) -> Address:
    return Address(
        machine.ip_address,
        machine.user or "",
        machine.port,
        machine.ssh_key_path,
        machine.host_key,
    )


def jump_address(row: Mapping[str, Any] | None) -> Address | None:
    """The jump host of a machine. The row may be written by hand: missing fields get the defaults of SSH."""
    if not row:
        return None
    try:
        port = int(row.get("port") or 22)
    except (AttributeError, TypeError, ValueError):
        raise HostUnreachable(
            f"jump is {ascii(row)[:200]}: an object is wanted, with host, port (a number), user, ssh_key_path and host_key"
        ) from None
    key_path, host_key = row.get("ssh_key_path"), row.get("host_key")
    return Address(
        str(row.get("host", "")),
        str(row.get("user", "")),
        port,
        None if key_path is None else str(key_path),
        None if host_key is None else str(host_key),
    )
