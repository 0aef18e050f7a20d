"""`groupwise`, but for a dispatcher that dies by SIGKILL at one named effect, or is stopped there by SIGSTOP until somebody lets it go on.

DIES_AT=<effect>:<when> or STOPS_AT=<effect>:<when>, as `attempt.running:after`. When:

    before   of a transaction: all of it is written and nothing committed; of anything else: it has not begun
    during   of a request to a machine: it has been sent a moment ago, and its answer is not heard
    after    it is done, and nobody in this process knows yet

Nothing of this is in the package: here its gateway is replaced by one that can die.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import TypeVar

from sqlalchemy.orm import Session

from groupwise.cli.main import main
from groupwise.jobs.fleet import up
from groupwise.jobs.fleet.attempts.effects import Gateway
from groupwise.jobs.fleet.queue.claim import ClaimResult

T = TypeVar("T")

DIES = "DIES_AT" in os.environ
POINT = os.environ["DIES_AT" if DIES else "STOPS_AT"]
REQUEST_DELAY_S = 0.03
"""From sending a request to the death of its sender."""


class MortalGateway(Gateway):
    """Dies, or stops once, at its point."""

    stopped = False
    done = False

    async def commit(self, name: str, fn: Callable[[Session], T]) -> T:
        result = await super().commit(name, self.dying(name, fn))
        if is_effect(name, result):
            self.perhaps(f"{name}:after")
        return result

    async def commit_of(
        self, epoch: int, name: str, fn: Callable[[Session], T], *, ends: bool = False
    ) -> T:
        result = await super().commit_of(epoch, name, self.dying(name, fn), ends=ends)
        if is_effect(name, result):
            self.perhaps(f"{name}:after")
        return result

    def dying(self, name: str, fn: Callable[[Session], T]) -> Callable[[Session], T]:
        """What is written, and is not committed."""

        def write(session: Session) -> T:
            result = fn(session)
            session.flush()
            if is_effect(name, result):
                self.perhaps(f"{name}:before")
            return result

        return write

    async def ask(self, name: str, call: Callable[[], Awaitable[T]]) -> T:
        self.perhaps(f"{name}:before")
        asked = asyncio.ensure_future(super().ask(name, call))
        if f"{name}:during" == POINT:
            await asyncio.sleep(REQUEST_DELAY_S)
            self.perhaps(f"{name}:during")
        try:
            result = await asked
        finally:
            self.has_done(name)
        self.perhaps(f"{name}:after")
        self.has_done(name)
        return result

    async def write(self, name: str, fn: Callable[[], T]) -> T:
        self.perhaps(f"{name}:before")
        result = await super().write(name, fn)
        self.perhaps(f"{name}:after")
        return result

    def perhaps(self, point: str) -> None:
        if point != POINT or self.stopped:
            return
        self.stopped = True
        print("dies at" if DIES else "stops at", POINT, flush=True)
        os.kill(os.getpid(), signal.SIGKILL if DIES else signal.SIGSTOP)

    def has_done(self, name: str) -> None:
        """What it was about to do when it was stopped."""
        if self.stopped and not self.done and POINT.startswith(f"{name}:"):
            self.done = True
            print("has done it", flush=True)


def is_effect(name: str, result: object) -> bool:
    """A queue that was found empty is none."""
    return not isinstance(result, ClaimResult) or bool(result.claimed)


if __name__ == "__main__":
    up.Gateway = MortalGateway  # pyright: ignore[reportAttributeAccessIssue, reportPrivateImportUsage]
    sys.exit(main())
