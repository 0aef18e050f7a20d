"""Reads this process's rank and the number of ranks from the environment, as torchrun or a similar launcher sets it."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from groupwise.core.errors import UsageError

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
KEEPALIVE_SECONDS = 30
"""Seconds without traffic after which a connection is probed. After twice as long without an answer it is considered lost."""


@dataclass(frozen=True, slots=True)
class TorchrunRank:
    """One of several processes that were started together."""

    rank: int
    count: int
    local_rank: int
    """Rank among the processes of its machine."""
    local_count: int
    host: str
    """Host of rank 0."""

    @property
    def machines(self) -> int:
        """Number of machines; each runs equally many processes."""
        return max(1, self.count // self.local_count)

    def elsewhere(self, rank: int) -> bool:
        """True if that rank is on another machine than rank 0: ranks are numbered machine by machine."""
        return rank >= self.local_count


def read_torchrun_rank(environment: Mapping[str, str] = os.environ) -> TorchrunRank | None:
    """This process's rank among those started together; None if it was started alone. Raises UsageError for invalid values."""
    if not all(environment.get(variable) for variable in VARIABLES):
        return None
    try:
        rank, count = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        local_rank = int(environment.get("LOCAL_RANK", rank))
        local_count = int(environment.get("LOCAL_WORLD_SIZE", count))
    except ValueError:
        values = ", ".join(f"{name}={environment[name]}" for name in VARIABLES)
        raise UsageError(
            f"The environment has {values}, as torchrun sets them, but RANK and WORLD_SIZE are to be whole numbers. Start the command with "
            "torchrun, or unset them."
        ) from None
    if count == 1:
        return None
    return TorchrunRank(rank, count, local_rank, local_count, environment["MASTER_ADDR"])


def check_world_size(launch: TorchrunRank | None, learners: int) -> None:
    """Raise UsageError if the config asks for another number of learners than there are processes."""
    if launch is None or launch.count == learners:
        return
    raise UsageError(
        f"{launch.count} processes of this run were started (WORLD_SIZE), but distributed.learners is {learners}. Set "
        f"distributed.learners={launch.count}, have torchrun start {learners}, or start the command without "
        "torchrun, which begins its own processes on this machine."
    )


def visible_gpu(local_rank: int) -> dict[str, str]:
    """Environment variables that make only this rank's own GPU visible to it; empty if none of those that are visible is left for it.

    torch takes the GPU number `LOCAL_RANK` when it divides weights, and among one GPU that is 0. A machine without GPUs, or with GPUs
    that show no device file, needs no distinction: a number that no GPU has makes none visible.
    """
    setting = os.environ.get(VISIBLE_DEVICES)
    if setting is None:
        return {VISIBLE_DEVICES: str(local_rank), "LOCAL_RANK": "0"}
    own = [device for device in setting.split(",") if device][local_rank : local_rank + 1]
    return {VISIBLE_DEVICES: own[0], "LOCAL_RANK": "0"} if own else {}


def enable_keepalive(connection: socket.socket) -> None:
    """Detect a machine that lost power, which closes no connection; the operating system's own limit is two hours."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform.startswith("linux"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_SECONDS // 3)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 2000 * KEEPALIVE_SECONDS)
