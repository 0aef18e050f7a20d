"""The address and the secret by which the machines of a gang meet: variables in the environment of each, for torchrun."""

from __future__ import annotations

import hashlib
import secrets

KEY_FILE = "GROUPWISE_KEY_FILE"
"""The variable that names the file with the secret of this attempt, which only its machines know."""
KEY = ".groupwise-key"
"""The secret's file in working folders that we make."""
FIRST_PORT, PORTS = 20_000, 12_000
"""Below those that systems give to connections by themselves."""


def meeting_of(rank: int, count: int, host: str, attempt: str) -> dict[str, str]:
    """The variables for the machine `rank` of `count`. `host`: address of the first machine; `attempt`: as in `port_of`."""
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
    """A port for `JOB.EPOCH`: the same on all its machines, and another one for the next epoch, which then meets no leftovers."""
    job, _, epoch = attempt.rpartition(".")
    begins = int(hashlib.sha256(job.encode()).hexdigest(), 16)
    return FIRST_PORT + (begins + int(epoch)) % PORTS
