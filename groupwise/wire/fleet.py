"""Bodies that the API of a fleet takes, beside the request for a job: shared by the server, its client and the document.

What it answers are the documents of `groupwise.fleet.verbs.documents`: JSON objects whose keys are the columns of the tables.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"


class FleetBody(BaseModel):
    """What a client sends; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class MachineBody(FleetBody):
    """A machine that is to be taken into the fleet. The path of its key is one on the control machine."""

    vm_id: str = Field(pattern=NAME)
    ip_address: str = Field(min_length=1, max_length=255, description="Address or name.")
    user: str = Field(min_length=1, max_length=255, description="As whom to log in there.")
    ssh_key_path: str = Field(
        min_length=1, max_length=4096, description="Of the private key, on the control machine."
    )
    port: int = Field(default=22, ge=1, le=65535)
    host_key: str | None = Field(
        default=None,
        max_length=4096,
        description="`ssh-ed25519 AAAA…`; without it the machine is polled for its key, which is then to be trusted.",
    )
    jump: dict[str, Any] | None = Field(
        default=None, description="A host to go through: host, port, user, ssh_key_path, host_key."
    )
    workdir: str | None = Field(
        default=None, max_length=4096, description="Where its runner keeps everything."
    )
    python: str | None = Field(
        default=None, max_length=4096, description="The interpreter that jobs find first."
    )
    labels: dict[str, str] = Field(default={})
    cpu_slots: int | None = Field(
        default=None,
        ge=0,
        le=1024,
        description="Jobs without GPUs at once; null: 1 where it has none.",
    )
    deadman: float | None = Field(
        default=None,
        ge=30,
        description="Seconds without the control plane after which its runner ends a job; null: never.",
    )
    probe: list[str] | None = Field(
        default=None, min_length=1, description="Asked for the GPUs in place of nvidia-smi."
    )


class ReasonBody(FleetBody):
    """Why a machine is cordoned."""

    reason: str = Field(min_length=1, max_length=1000)


class TrustBody(FleetBody):
    """Which host key is the right one."""

    fingerprint: str = Field(
        pattern=r"^SHA256:[A-Za-z0-9+/]{43}$",
        description="As the machine itself tells it: `ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub`.",
    )


class ProjectBody(FleetBody):
    """What is to change; fields that are left out stay as they are, null takes a quota away."""

    weight: float | None = Field(default=None, gt=0, description="Its share of a busy fleet.")
    max_gpus: int | None = Field(default=None, ge=0, description="Of its running jobs together.")
    max_waiting: int | None = Field(default=None, ge=0, description="Jobs that have not begun.")


class KeyBody(FleetBody):
    """A key that is to be made."""

    role: str = Field(pattern="^(read|act|admin)$")
    projects: list[str] | None = Field(
        default=None, min_length=1, description="For whose jobs it is; null: for everybody's."
    )
    seconds: float | None = Field(
        default=None, gt=0, description="For how long; null: until it is revoked."
    )
    note: str | None = Field(default=None, max_length=200)
