"""Work in fresh processes, so that what a run leaves behind (threads, memory, patched code) does not reach the next one."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def apart(*works: Callable[[], Result]) -> list[Result]:
    """What each of them returns, all at the same time, each in a process of its own; they must be known to pickle."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(works), mp_context=spawn, max_tasks_per_child=1) as pool:
        return [each.result() for each in [pool.submit(work) for work in works]]
