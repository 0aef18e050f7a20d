"""The gateway: all effects of a dispatcher pass through here, one after the other, by name.

There are three kinds: a transaction on the database (`commit`), a request to a machine (`ask`), and a durable write on the control side's
own disk (`write`). A dispatcher may die between any two of them, and the next one must be able to continue. As all effects pass one place,
tests can check every such moment: a hook is called before and after each. It counts them in a run that succeeds, and then dies before and
after the k-th, for every k.

A death is a `BaseException` that unwinds the dispatcher. Once it has been raised the gateway is shut: no `finally` and no other task of the
dying process changes anything any more, as after kill -9. Effects in progress are not undone, since they may have arrived.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import TypeVar

from sqlalchemy.orm import Session

from groupwise.jobs.fleet.attempts.write_batching import BatchedReads, BatchedWrites
from groupwise.jobs.fleet.store.database import Database
from groupwise.jobs.hosts.host import Host, Request, RunnerResponse

T = TypeVar("T")
Key = TypeVar("Key")


class Side(StrEnum):
    """The two moments at which a hook is called: before an effect and after it."""

    BEFORE = "before"
    AFTER = "after"


Hook = Callable[[str, Side], None]
"""Called with the name of the effect; raises `Death` to die there."""


class Death(BaseException):
    """The process counts as dead from here on; only tests raise it. No `except Exception` stops it."""


def _ignore_effect(name: str, side: Side) -> None:
    """The hook of a process that does not die."""


class Gateway:
    """The only way by which a dispatcher affects anything outside itself."""

    def __init__(self, database: Database, hook: Hook = _ignore_effect) -> None:
        self.database = database
        self._writes = BatchedWrites(database)
        self._hook = hook
        self._dead = False

    async def commit(self, name: str, fn: Callable[[Session], T]) -> T:
        """Run one transaction; `fn` may be called several times, see `Database.run`."""
        return await self._run_effect(name, lambda: self.database.in_thread(fn))

    async def commit_of(
        self, epoch: int, name: str, fn: Callable[[Session], T], *, ends: bool = False
    ) -> T:
        """`commit` for a short write about one attempt, which may share its transaction with concurrent ones. `ends`: it ends the
        attempt."""
        return await self._run_effect(name, lambda: self._writes.commit(epoch, fn, ends=ends))

    async def read(self, fn: Callable[[Session], T]) -> T:
        """Read the database. That changes nothing, so it is not an effect, but a dead process must not read either."""
        self._require_alive()
        result = await self.database.read_in_thread(fn)
        self._require_alive()
        return result

    async def read_batched(self, reads: BatchedReads[Key, T], key: Key) -> T | None:
        """`read` for one that many controllers do at the same time; they share transactions."""
        self._require_alive()
        result = await reads.read(key)
        self._require_alive()
        return result

    async def ask(self, name: str, call: Callable[[], Awaitable[T]]) -> T:
        """Send a request to a machine."""
        return await self._run_effect(name, call)

    async def write(self, name: str, fn: Callable[[], T]) -> T:
        """Do a durable write on this machine, in a thread."""
        return await self._run_effect(name, lambda: asyncio.to_thread(fn))

    def host(self, host: Host) -> Host:
        """Wrap the connection to a machine: each request becomes an effect, named by its verb."""
        return _HookedHost(host, self)

    async def _run_effect(self, name: str, effect: Callable[[], Awaitable[T]]) -> T:
        self._call_hook(name, Side.BEFORE)
        try:
            result = await effect()
        except Exception:  # a failed call may have had its effect all the same
            self._call_hook(name, Side.AFTER)
            raise
        self._call_hook(name, Side.AFTER)
        return result

    def _call_hook(self, name: str, side: Side) -> None:
        self._require_alive()
        try:
            self._hook(name, side)
        except Death:
            self._dead = True
            raise

    def _require_alive(self) -> None:
        if self._dead:
            raise Death


class _HookedHost:
    """A `Host` whose requests all pass the gateway."""

    def __init__(self, host: Host, gateway: Gateway) -> None:
        self._host = host
        self._gateway = gateway

    async def call(self, request: Request, *, timeout: float) -> RunnerResponse:
        name = f"host.{request.verb}"
        return await self._gateway.ask(name, lambda: self._host.call(request, timeout=timeout))

    async def close(self) -> None:
        await self._host.close()
