"""Whether processes have ended. One that is dead and not yet reaped has ended: whoever has to reap it may be slow."""

import time
from collections.abc import Iterable
from pathlib import Path

PATIENCE = 20.0


def is_gone(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"


def all_gone(pids: Iterable[int]) -> bool:
    """Wait until they have ended; False after `PATIENCE` seconds."""
    pids, deadline = list(pids), time.monotonic() + PATIENCE
    while not all(map(is_gone, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
