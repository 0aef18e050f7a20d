"""How much memory a process and its children hold at most: the sum of their proportional set sizes, looked at while they work."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import TracebackType

INTERVAL = 0.05
"""Seconds between looks."""


class Watch:
    """Looks while it is open; `peak` is the largest sum so far (MiB). Only where there is /proc."""

    def __init__(self, pid: int, interval: float = INTERVAL) -> None:
        self.pid = pid
        self.interval = interval
        self.peak = 0
        self._ended = threading.Event()
        self._looking: threading.Thread | None = None

    def __enter__(self) -> None:
        self._ended.clear()
        self._looking = threading.Thread(target=self._look, daemon=True)
        self._looking.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        if self._looking is not None:
            self._looking.join()

    def _look(self) -> None:
        while not self._ended.wait(self.interval):
            self.peak = max(self.peak, sum(map(proportional, family(self.pid))) // 1024)


def family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    found = [pid]
    for each in found:
        for children in Path(f"/proc/{each}/task").glob("*/children"):
            try:
                found += map(int, children.read_text().split())
            except OSError:  # it has just ended
                continue
    return found


def proportional(pid: int) -> int:
    """KiB that a process holds, shared pages by its share of them; 0 for one that has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


def used_on_the_gpu() -> float:
    """MiB of the GPU's memory that are not free; 0 if this process has none. Torch keeps what it has freed, so it is nearly the peak."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return 0.0
    free, everything = torch.cuda.mem_get_info()
    return (everything - free) / 2**20
