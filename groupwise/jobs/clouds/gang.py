"""Several machines as one backend: a job whose command runs on all of them at once.

Attempts, log, results and checkpoints of the job are those of the first machine. The other machines start it under the same name and
epoch, so submitting again completes a partial start. Either all start, or none. The command itself connects the machines
(`groupwise.engine.learner.launch_node`); it gets the address to meet at (`core/rendezvous.py`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar

from groupwise.core.errors import UsageError
from groupwise.core.interruption import wait_until_done
from groupwise.core.rendezvous import KEY, KEY_FILE, new_secret, rendezvous_variables
from groupwise.core.terminal.quantities import counted
from groupwise.jobs.clouds.backend import (
    Capabilities,
    CloudError,
    FetchedResults,
    Handle,
    JobNotFound,
    Order,
    Plan,
    Unreachable,
)
from groupwise.jobs.clouds.folder import ResultsFolder
from groupwise.jobs.clouds.machine import NAME_ALL, OVERTAKEN, TRIES, MachineBackend
from groupwise.jobs.hosts.answers import MemberState
from groupwise.jobs.hosts.driver import Launch, Resume, Runner
from groupwise.jobs.hosts.files import BlobStore
from groupwise.jobs.hosts.spec import JobSpec

NODES = "nodes"
"""The folder in the results for the logs of the other machines."""
END_TIMEOUT = 60.0
"""Seconds to wait for killed attempts to end."""
PIECE = 1 << 20
Result = TypeVar("Result")


class _Overtaken(CloudError):
    """A machine has seen a later epoch of this name, which belonged to a removed job."""

    def __init__(self, message: str, highest: int) -> None:
        super().__init__(message)
        self.highest = highest

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.highest)


class _GangMachine(MachineBackend):
    """One of the machines, with its rank."""

    def __init__(
        self, name: str, runner: Runner, where: str, rank: int, count: int, meets_at: str
    ) -> None:
        super().__init__(name, runner, where)
        self._rank, self._count, self._meets_at = rank, count, meets_at

    async def _launch_request(
        self, order: Order, spec: JobSpec, epoch: int, attempt: int, resume: Resume | None
    ) -> Launch:
        launch = await super()._launch_request(order, spec, epoch, attempt, resume)
        meets_at = order.meets_at or self._meets_at
        meeting = rendezvous_variables(self._rank, self._count, meets_at, f"{order.name}.{epoch}")
        return replace(
            launch,
            rank=self._rank,
            members=self._count,
            environment={**launch.environment, **meeting, KEY_FILE: KEY},
        )

    async def _end_attempt(self, handle: Handle) -> None:
        """End an attempt at once and wait for its end. Raises CloudError if it does not end."""
        await self.cancel(handle, 0.0)
        status, deadline = await self.status(handle), time.monotonic() + END_TIMEOUT
        while status.ending is None:
            if time.monotonic() > deadline:
                raise CloudError(
                    f"{handle.name} does not end on {self._where}, although it was killed: look there for processes that hang, as in the "
                    "driver of a GPU."
                )
            status = await self.wait(handle, status, 1.0)


class _OtherMachine(_GangMachine):
    """A machine other than the first one."""

    async def newest_epoch(self, name: str) -> int:
        """The newest epoch of this job on this machine; 0: none."""
        return max((attempt.epoch for attempt in await self._attempts(name)), default=0)

    async def join(
        self, order: Order, store: BlobStore, epoch: int, attempt: int, secret: bytes
    ) -> MemberState:
        """Start this machine's part of the epoch, unless it was started before. `secret`: that of the first machine. Raises CloudError if
        the machine refuses."""
        state = await self._start_epoch(order, store, epoch, attempt, None, {KEY: secret})
        if state.refused is not None and state.refused.code == OVERTAKEN:
            raise _Overtaken(state.refused.message, state.refused.highest or epoch)
        self._expect_started(order, state)
        return state

    async def end(self, name: str, newest: int | None = None) -> None:
        """End this job's living attempts at once, and wait for their end. Raises CloudError if one does not end.

        `newest`: the last epoch to end; None: all."""
        for state in await self._attempts(name):
            is_newest = newest is None or state.epoch <= newest
            if is_newest and self._status(state).ending is None:
                await self._end_attempt(self._handle(state))

    async def forget(self, name: str) -> None:
        """Remove all data of this job from this machine."""
        newest = await self._newest_attempt(name)
        if newest is not None:
            await self.cleanup(self._handle(newest))


class GangBackend(_GangMachine):
    """A `Backend` that runs each job on all of its machines."""

    capabilities = Capabilities(nodes=True)

    def __init__(self, name: str, machines: Sequence[tuple[Runner, str]], meets_at: str) -> None:
        """`machines`: for each machine its runner and its name in messages; `meets_at`: the address of the first machine for the others."""
        count = len(machines)
        (runner, where), *other_machines = machines
        super().__init__(name, runner, where, 0, count, meets_at)
        self._own_secrets: set[bytes] = set()
        """Secrets of the attempts that this object started, or tried to. The first machine stores the secret of the process that
        succeeded."""
        self._others = [
            _OtherMachine(name, runner, where, rank, count, meets_at)
            for rank, (runner, where) in enumerate(other_machines, 1)
        ]

    async def plan(self, order: Order) -> Plan:
        """See `Backend.plan`."""
        self._expect_all(order)
        plans = [
            await super().plan(order),
            *[await machine.plan(order) for machine in self._others],
        ]
        steps = tuple(f"on {plan.where}: {step}" for plan in plans for step in plan.steps)
        meeting_step = (
            f"they meet at {self._meets_at}, at a port that follows from the attempt's name"
        )
        return Plan(
            " and ".join(plan.where for plan in plans), (*steps, meeting_step), plans[0].command
        )

    async def submit(self, order: Order, store: BlobStore) -> Handle:
        """See `Backend.submit`."""
        self._expect_all(order)
        return await self._start_on_others(order, store, await super().submit(order, store))

    async def _start_attempt(
        self, order: Order, store: BlobStore, epoch: int, attempt: int, resume: Resume | None = None
    ) -> Handle:
        """End earlier attempts on the other machines, then start on the first machine, then on the others. If the first machine has the
        attempt already, only complete it. The first machine is queried after the others: so no part of a living attempt is ended."""
        # Raises if another job has this name there.
        await _gather_all(machine._attempt_since(order, 0) for machine in self._others)
        newest_epochs = await _gather_all(
            machine.newest_epoch(order.name) for machine in self._others
        )
        if (handle := await self._attempt_since(order, epoch)) is not None:
            return await self._start_on_others(order, store, handle)
        pairs = zip(self._others, newest_epochs, strict=True)
        await _gather_all(machine.end(order.name, newest) for machine, newest in pairs)
        await _gather_all(machine._free_gpus(order.gpus) for machine in self._others)
        epoch = max(epoch, *(epoch_there + 1 for epoch_there in newest_epochs))
        for tries_left in reversed(range(TRIES)):
            handle = await super()._start_attempt(order, store, epoch, attempt, resume)
            try:
                return await self._start_on_others(order, store, handle)
            except _Overtaken as overtaken:
                if not tries_left:
                    raise
                await self._end_attempt(handle)
                epoch = max(handle.attempt, overtaken.highest) + 1
        raise AssertionError("the last try returns or raises")

    async def _start_on_others(self, order: Order, store: BlobStore, handle: Handle) -> Handle:
        """Start on the other machines an attempt that the first machine has. If another process started it, it is not completed after its
        end, and it is not cancelled if another machine refuses."""
        has_ended = (await self.status(handle)).ending is not None
        if has_ended and not self._own_secrets:
            return handle
        secret = await self._read_own_file(handle, KEY)
        if has_ended and secret not in self._own_secrets:
            return handle
        attempt = len(await self._started_attempts(order.name))
        try:
            await _gather_all(
                machine.join(order, store, handle.attempt, attempt, secret)
                for machine in self._others
            )
        except CloudError:
            if secret in self._own_secrets:
                await self.cancel(handle, 0.0)
            raise
        return handle

    async def _start_epoch(
        self,
        order: Order,
        store: BlobStore,
        epoch: int,
        attempt: int,
        resume: Resume | None,
        extra_files: Mapping[str, bytes] = MappingProxyType({}),
    ) -> MemberState:
        # A new secret for each try: the stored one shows which process started the attempt.
        secret = new_secret().encode()
        self._own_secrets.add(secret)
        files = {**extra_files, KEY: secret}
        return await super()._start_epoch(order, store, epoch, attempt, resume, files)

    def _expect_same_machines(self, order: Order, attempt: MemberState) -> None:
        self._expect_all(order)
        if attempt.rank:
            raise UsageError(
                f"{self._where} is not the machine that has what {order.name} made, but number {attempt.rank + 1} of its "
                f"machines: {NAME_ALL}"
            )

    async def cancel(self, handle: Handle, grace: float) -> None:
        """See `Backend.cancel`."""

        async def cancelled(other: _OtherMachine) -> None:
            # An unreachable machine ends its part by itself once the first one is missing.
            with suppress(Unreachable):
                await other.cancel(handle, grace)

        await _gather_all((super().cancel(handle, grace), *map(cancelled, self._others)))

    async def _fetch_results(
        self, handle: Handle, results: ResultsFolder, *, has_ended: bool
    ) -> FetchedResults:
        """Fetch the results and, at the end, the logs of the other machines."""
        fetched = await super()._fetch_results(handle, results, has_ended=has_ended)
        if not has_ended:
            return fetched
        logs: dict[str, bytes] = {}
        unfetched: dict[str, str] = {}
        for rank, other in enumerate(self._others, 1):
            name, log = f"{NODES}/{rank}.log", b""
            try:
                with suppress(JobNotFound):
                    while part := (await other.log(handle, len(log), PIECE)).data:
                        log += part
                logs[name] = log
            except Unreachable as error:  # this may be the reason why the job ended
                unfetched[name] = error.message
        await wait_until_done(asyncio.to_thread(results.write_files, logs, handle.attempt))
        return replace(fetched, left_out={**fetched.left_out, **unfetched})

    async def cleanup(self, handle: Handle) -> None:
        """See `Backend.cleanup`."""
        if (await self.status(handle)).ending is not None:
            await _gather_all(machine.end(handle.name) for machine in self._others)
            await _gather_all(machine.forget(handle.name) for machine in self._others)
        await super().cleanup(handle)

    async def close(self) -> None:
        """See `Backend.close`."""
        await _gather_all((super().close(), *(machine.close() for machine in self._others)))

    def _expect_all(self, order: Order) -> None:
        if order.nodes != self._count:
            raise UsageError(
                f"{order.name} is for {counted(order.nodes, 'machine')}, and {self._count} are named."
            )


async def _gather_all(awaitables: Iterable[Awaitable[Result]]) -> list[Result]:
    """Await all and return their results. The first error is raised only once all have ended."""
    results = await asyncio.gather(*awaitables, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
