"""Starts engines, one after another, and stops after too many restarts.

An engine may end at any moment: killed, out of memory, hanging, or because of a full disk. Its driver then requests the next one here.
Restarts are counted within a time window, with a growing pause between them; beyond the limit the reason is reported and no further engine
is started. A full disk is waited for, and not counted.
"""

from __future__ import annotations

import errno
import logging
import os
import tempfile
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from groupwise.core.errors import CheckpointError, RunError, StoreError
from groupwise.core.retry import Timing, doubled
from groupwise.server.engine.engine_protocol import Engine, Opened, OpenRun

logger = logging.getLogger(__name__)

FIRST_PAUSE = 0.5
"""Seconds before the second restart in a window; doubled with each one, up to LONGEST_PAUSE."""
LONGEST_PAUSE = 30.0
DISK_CHECK_SECONDS = 5.0
"""Seconds between two attempts to write to a full disk."""
MIN_WRITABLE_BYTES = 1 << 20
"""Bytes that must be writable before an engine is started again; about what a step of a small run writes."""


class TooManyRestarts(RunError):
    """The engine ended too often; the message contains the last reason."""

    code = "engine_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How often an engine may be restarted."""

    restarts: int = 5
    """Restarts allowed within the window."""
    window: float = 600.0
    """Length of the window in seconds."""


class EngineSupervisor:
    """Runs at most one engine at a time."""

    def __init__(
        self,
        make: Callable[[], Awaitable[Engine]],
        limits: Limits = Limits(),
        timing: Timing | None = None,
    ) -> None:
        """`make` starts an engine in which nothing is open yet."""
        self.restarts = 0
        """Number of engine restarts since this server started."""
        self._make = make
        self._limits = limits
        self._timing = timing or Timing()
        self._ends: deque[float] = deque()
        """Times (monotonic) at which engines ended, within the window."""
        self._engine: Engine | None = None

    async def begin(self) -> Engine:
        """Start a new engine in which nothing is open; the previous one is ended first."""
        await self.end()
        engine = self._engine = await self._make()
        return engine

    async def open(self, open_request: OpenRun) -> tuple[Engine, Opened]:
        """Start a new engine and open this run in it. If `Engine.open` raises, the engine is ended."""
        engine = await self.begin()
        try:
            return engine, await engine.open(open_request)
        except BaseException:
            await self.end()
            raise

    async def end(self) -> None:
        """End the engine, if there is one."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close()

    async def pause(self, why: Exception) -> None:
        """Call after an engine has ended: waits until the next one may be started. Raises TooManyRestarts."""
        await self.end()
        now = self._timing.clock()
        self._ends.append(now)
        while self._ends[0] <= now - self._limits.window:
            self._ends.popleft()
        self.restarts += 1
        if len(self._ends) > self._limits.restarts:
            raise TooManyRestarts(
                f"The engine ended {len(self._ends)} times within {self._limits.window:g} seconds and is not started again. It ended "
                f"last because: {why}"
            ) from why
        pauses = len(self._ends) - 1
        if pauses:
            await self._timing.sleep(doubled(FIRST_PAUSE, pauses, LONGEST_PAUSE))

    async def wait_for_disk(self, folder: Path) -> None:
        """Wait until a full disk can be written to again. If the write fails for another reason, return at once."""
        while _is_still_full(folder):
            await self._timing.sleep(DISK_CHECK_SECONDS)


DISK_FULL_RETRY_SECONDS = 10.0
"""Seconds after which a client refused because of a full disk may ask again."""


def is_full(error: BaseException) -> bool:
    """True if an error came from a full disk. Errors of an engine have crossed a socket, so only their message is left to check."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    full_messages = (
        os.strerror(errno.ENOSPC),
        os.strerror(errno.EDQUOT),
        "database or disk is full",
    )
    return isinstance(error, StoreError | CheckpointError) and any(
        message in str(error) for message in full_messages
    )


def _is_still_full(folder: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(MIN_WRITABLE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return is_full(error)
    return False
