"""Waiting in tests: until a condition holds, and until processes have ended."""

import asyncio
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

TIMEOUT_S = 90.0


def wait_until(
    condition: Callable[[], Any],
    what: str = "a condition",
    timeout_s: float = TIMEOUT_S,
    details: Callable[[], object] = str,
) -> Any:
    """The condition's first true value. `details` are added to the message of a timeout."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        late = f"timed out after {timeout_s:g} s waiting for {what}"
        assert time.monotonic() < deadline, f"{late}\n{details()}"
        time.sleep(0.01)
    return found


async def wait_until_async(condition: Callable[[], Any]) -> None:
    """Like `wait_until`, without blocking the event loop."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"timed out after {TIMEOUT_S:g} s"
        await asyncio.sleep(0.005)


def is_gone(pid: int) -> bool:
    """True if the process has ended, even if its parent has not reaped it yet."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"


def all_gone(pids: Iterable[int]) -> bool:
    """Wait until they have ended; False after `TIMEOUT_S` seconds."""
    pids, deadline = list(pids), time.monotonic() + TIMEOUT_S
    while not all(map(is_gone, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
