"""Where the machines of a gang meet: what each is told in its environment, for torchrun. And by which secret they know each other."""

from __future__ import annotations

import hashlib
import secrets

KEY_FILE = "GROUPWISE_KEY_FILE"
"""The variable that names the file with the secret of this attempt, the same on all its machines and known to nobody else."""
KEY = ".groupwise-key"
"""That file, in working folders that we make."""
FIRST_PORT, PORTS = 20_000, 12_000
"""Below those that systems give to connections by themselves."""


def meeting_of(rank: int, count: int, host: str, attempt: str) -> dict[str, str]:
    """For the machine `rank` of `count`. `host`: where the others reach the first one; `attempt`: as in `port_of`."""
    return {
        "NODE_RANK": str(rank),
        "NNODES": str(count),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port_of(attempt)),
        "GROUPWISE_RENDEZVOUS": attempt,
    }


def new_secret() -> str:
    """For one attempt."""
    return secrets.token_hex(32)


def port_of(attempt: str) -> int:
    """Of `JOB.EPOCH`: the same for all its machines, and another one for the next epoch, so that what is left of one is never met."""
    job, _, epoch = attempt.rpartition(".")
    begins = int(hashlib.sha256(job.encode()).hexdigest(), 16)
    return FIRST_PORT + (begins + int(epoch)) % PORTS
