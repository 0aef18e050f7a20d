"""Address and secret with which the machines of a multi-node job find each other: environment variables of torchrun."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping

KEY_FILE = "GROUPWISE_KEY_FILE"
"""The variable with the path of the file that holds this attempt's secret, which only its machines have."""
KEY = ".groupwise-key"
"""Name of the secret's file in working folders that we create."""
FIRST_PORT, PORTS = 20_000, 12_000
"""A range below the ephemeral ports that systems assign to outgoing connections."""
SET_BY_TORCHRUN = frozenset(
    "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_NAME ROLE_WORLD_SIZE MASTER_ADDR "
    "MASTER_PORT".split()
)
"""What torchrun tells each of its processes, besides `TORCHELASTIC_…`."""


def without_rank(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a program that a rank starts but that is not a rank: one that also uses torch would wait for the others."""
    return {
        name: value
        for name, value in environment.items()
        if name not in SET_BY_TORCHRUN and not name.startswith("TORCHELASTIC_")
    }


def rendezvous_variables(rank: int, count: int, host: str, attempt: str) -> dict[str, str]:
    """The variables for machine number `rank` of `count`. `host`: address of the first machine; `attempt`: as in `port_of`."""
    return {
        "NODE_RANK": str(rank),
        "NNODES": str(count),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port_of(attempt)),
        "GROUPWISE_RENDEZVOUS": attempt,
    }


def new_secret() -> str:
    """A new secret for one attempt."""
    return secrets.token_hex(32)


def port_of(attempt: str) -> int:
    """A port for the attempt `JOB.EPOCH`: the same on all its machines; the next epoch has another one and so meets no leftovers."""
    job, _, epoch = attempt.rpartition(".")
    offset = int(hashlib.sha256(job.encode()).hexdigest(), 16)
    return FIRST_PORT + (offset + int(epoch)) % PORTS
