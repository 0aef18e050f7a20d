"""Where jobs are launched: places, as plain data that can be written down, and the backend that reaches one.

A place is called by a word, `local` or `ssh:gpu@box:22`, on the command line and in lists.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from groupwise.clouds.machine import ROOT, MachineBackend
from groupwise.clouds.port import Backend
from groupwise.errors import UsageError

LOCAL, SSH = "local", "ssh"
KINDS = (LOCAL, SSH)


@dataclass(frozen=True, slots=True)
class Place:
    """One of them."""

    kind: str
    detail: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """How it is reached; no secrets, but paths of keys."""

    def __str__(self) -> str:
        if self.kind == LOCAL:
            return LOCAL
        return f"{SSH}:{self.detail['user']}@{self.detail['host']}:{self.detail['port']}"

    def document(self) -> dict[str, Any]:
        """To be written down."""
        return {"kind": self.kind, "detail": dict(self.detail)}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Place:
        """What `document` described. Raises UsageError for a kind of another release."""
        if document["kind"] not in KINDS:
            raise UsageError(
                f"{document['kind']} is no place that this release of groupwise knows: it knows {', '.join(KINDS)}."
            )
        return cls(document["kind"], document["detail"])


def reach(place: Place) -> Backend:
    """A new way to it."""
    return _local() if place.kind == LOCAL else _ssh(place.detail)


def _local() -> Backend:
    from groupwise.hosts.driver import Runner
    from groupwise.hosts.local import LocalHost

    return MachineBackend(
        LOCAL, Runner(LocalHost(), root=ROOT, python=sys.executable), "this machine"
    )


def _ssh(detail: Mapping[str, Any]) -> Backend:
    from groupwise.hosts.driver import Runner
    from groupwise.hosts.ssh import Address, SshHost

    def address(of: Mapping[str, Any]) -> Address:
        return Address(of["host"], of["user"], of["port"], of["key"], of["host_key"])

    jump = cast("Mapping[str, Any] | None", detail.get("jump"))
    host = SshHost(
        address(detail),
        jump=None if jump is None else address(jump),
        agent_path=detail.get("agent"),
    )
    runner = Runner(host, root=ROOT, python=detail.get("python") or "python3")
    return MachineBackend(SSH, runner, str(address(detail)))
