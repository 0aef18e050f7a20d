"""AWS as a backend: each job gets its own EC2 machine, which then answers all requests about it (`machine.py`).

A machine's tags say what it is for: the job, the attempt, a hash of the order, its host key, its deadline. So any user with credentials
finds it by the job's name (`aws_machines.py`). After its end, AWS remembers it for about an hour; anything older, and the data for the
next attempt, is stored on the machine that launched or fetched (`aws_state.py`).

The process that starts a machine ends it if the job does not start on it for any reason: an error, a timeout, Ctrl-C. The machine itself
schedules its own shutdown before anything else (`boot.sh`), and any user can end expired machines by their deadline tag.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from groupwise.core.interruption import wait_until_done
from groupwise.jobs.clouds.aws_checks import Access, check
from groupwise.jobs.clouds.aws_machines import (
    ARM,
    MARGIN_MINUTES,
    REMOVED,
    VOID,
    AwsMachines,
    AwsTimeouts,
    attempt_of,
    disk_gb_of,
    instance_type_of,
    minutes_of,
)
from groupwise.jobs.clouds.aws_state import (
    JobRecords,
    Record,
    cost_of,
    newest_checkpoint,
    usage_of,
    with_forgotten,
)
from groupwise.jobs.clouds.backend import (
    KEEP_ON_FAILURE,
    Capabilities,
    CloudError,
    Cost,
    Ending,
    FetchedResults,
    Handle,
    JobNotFound,
    Order,
    Outcome,
    Phase,
    Plan,
    RentedMachine,
    Status,
    Unreachable,
)
from groupwise.jobs.clouds.ec2 import Ec2, Machine
from groupwise.jobs.clouds.folder import results_folder
from groupwise.jobs.clouds.machine import MachineBackend
from groupwise.jobs.hosts.answers import LogPart
from groupwise.jobs.hosts.driver import Resume
from groupwise.jobs.hosts.failures import FailureClass
from groupwise.jobs.hosts.files import BlobStore

LOG_PIECE = 1 << 20
SET_UP_REASON = "its machine is made ready"

T = TypeVar("T")


class _MachineUnavailable(Exception):
    """An attempt's machine is not ready, or has ended. `machine`: its description by AWS."""

    def __init__(self, machine: Machine | None) -> None:
        super().__init__(machine)
        self.machine = machine


class AwsBackend:
    """A `Backend` that rents an EC2 machine for each job; it also implements `Renting` and `Priced`."""

    capabilities = Capabilities(paid=True)

    def __init__(
        self,
        name: str,
        ec2: Ec2,
        access: Access,
        records: JobRecords,
        *,
        owner: str = "",
        timeouts: AwsTimeouts | None = None,
    ) -> None:
        """`owner`: the user who launches, shown to users who sweep."""
        self.name = name
        self._ec2, self._access, self._records = ec2, access, records
        self._timeouts = timeouts or AwsTimeouts()
        self._where = f"AWS, {ec2.region}"
        self._machines = AwsMachines(name, ec2, access, owner, self._timeouts)

    # --- placing ------------------------------------------------------------------------------

    async def plan(self, order: Order) -> Plan:
        """See `Backend.plan`. Checks everything that can be checked before any cost arises, as far as credentials allow."""
        order.check()
        checks = await asyncio.to_thread(
            check, self._ec2, self._access, order.place_options, instance_type_of(order), order.gpus
        )
        if checks.failed:
            raise CloudError(
                f"nothing was started on {self._where}:"
                + "".join(f"\n  {failure}" for failure in checks.failed)
            )
        kind = "spot" if order.place_options.get("spot") else "on demand"
        image = order.place_options.get("ami") or "the newest deep-learning image"
        minutes = minutes_of(order)
        size = "a disk" if checks.image is None else f"{disk_gb_of(order, checks.image)} GB"
        steps = (
            *checks.lines,
            (
                f"start {instance_type_of(order)} ({kind}) with {image} and {size} of gp3, {checks.price}; it ends by itself after "
                f"{minutes / 60:.1f} h"
            ),
            f"begin {order.name} there by SSH",
        )
        price, hours = checks.price.dollars, minutes_of(order) / 60
        return Plan(self._where, steps, order.spec.arguments, price, paid=True, paid_hours=hours)

    async def submit(self, order: Order, store: BlobStore) -> Handle:
        """See `Backend.submit`."""
        order.check()
        machine_count = len(await self._machines.list_including_void(order.name))
        machine, record = await self._machine_and_record(order.name)
        if machine is None and record is None:
            return await self._start_on_new_machine(order, store, 1, None, machine_count)
        self._machines.expect_same(order, machine, record)
        if machine is None or not machine.is_alive:
            return self._handle(order.name, attempt_of(machine, record))
        return await self._set_up(
            machine, order, store, await self._newest_checkpoint(record, store)
        )

    async def resume(self, name: str, secrets: Mapping[str, str], store: BlobStore) -> Handle:
        """See `Backend.resume`. Continues on the job's machine if it still exists, else on a new one."""
        machine_count = len(await self._machines.list_including_void(name))
        machine, record = await self._machine_and_record(name)
        if machine is not None and machine.is_alive:
            resumed = await self._resume_on_machine(machine, name, secrets, store)
            if resumed is not None:
                return resumed
            record = self._records.find(name)
        if machine is None and record is None:
            raise JobNotFound(f"{self._where} has no job called {name}.")
        order = replace(self._stored_order(name, record), secrets=dict(secrets))
        order.check()
        attempt = attempt_of(machine, record)
        ending = record.endings.get(attempt) if record else None
        if ending is not None and ending.outcome is Outcome.SUCCEEDED:
            raise CloudError(f"{name} has succeeded: there is nothing to continue.")
        self._records.copy_files_to(order, store)
        newest = await self._newest_checkpoint(record, store)
        return await self._start_on_new_machine(order, store, attempt + 1, newest, machine_count)

    async def _resume_on_machine(
        self, machine: Machine, name: str, secrets: Mapping[str, str], store: BlobStore
    ) -> Handle | None:
        """Resume on the existing machine. None: AWS takes the machine back, so its results were fetched and it was ended."""
        backend = self._machines.backend_for(machine)
        handle = None if backend is None else await backend.find(name)
        if backend is None or handle is None:
            raise CloudError(
                f"{name} has not begun on {machine.id} yet. If that is never made ready: `groupwise launch sweep --name {name}` ends it."
            )
        ending = (await backend.status(handle)).ending
        if machine.spot and ending is not None and ending.failure is FailureClass.PREEMPTION:
            record = self._records.find(name)
            results = None if record is None else record.results
            folder = Path(results) if results else self._records.folder / f"{name}.results"
            await self.fetch(handle, folder)
            await self._machines.end(machine)
            return None
        starts = ending is not None and ending.outcome is not Outcome.SUCCEEDED
        is_postponed = starts and await self._postpone_shutdown(
            machine, backend, await backend.order(handle)
        )
        try:
            new_handle = await backend.resume(name, secrets, store)
        except BaseException:  # also Ctrl-C: restore the machine's earlier deadline
            if is_postponed:
                await wait_until_done(asyncio.create_task(self._restore_shutdown(machine, backend)))
            raise
        await self._machines.tag(machine, {"attempt": str(new_handle.attempt)})
        await asyncio.to_thread(
            self._records.record_start, await backend.order(new_handle), new_handle.attempt, store
        )
        return new_handle

    async def _postpone_shutdown(
        self, machine: Machine, backend: MachineBackend, order: Order
    ) -> bool:
        """Postpone a machine's shutdown if it would come before the end of this job's time; True if it was postponed.

        The old time stays scheduled until the new one is, and the tag never contains a later time than the scheduled one. Raises
        CloudError.
        """
        minutes, now = minutes_of(order), time.time()
        needed_seconds = (minutes - MARGIN_MINUTES / 2) * 60
        if float(machine.tags["deadline"]) - now >= needed_seconds:
            return False
        try:
            await self._schedule_shutdown(machine, backend, now + minutes * 60, minutes)
        except BaseException:  # the new time may be scheduled, but not tagged
            await wait_until_done(asyncio.create_task(self._restore_shutdown(machine, backend)))
            raise
        return True

    async def _schedule_shutdown(
        self, machine: Machine, backend: MachineBackend, deadline: float, minutes: int
    ) -> None:
        result = await backend.run("sudo", "-n", ARM, f"{deadline:.0f}", f"{minutes}")
        if result.code != 0:
            ends_at = time.strftime(
                "%Y-%m-%d %H:%M", time.localtime(float(machine.tags["deadline"]))
            )
            name, reason = machine.tags["job"], result.err.strip() or f"code {result.code}"
            raise CloudError(
                f"{machine.id} ends at {ends_at}, before another attempt of {name} has had its time, and that could not be moved: "
                f"{reason}. `groupwise launch fetch {name}` brings what it has, `groupwise launch sweep --name {name}` ends it, and "
                "`resume` then continues on a new one."
            )
        await self._machines.tag(machine, {"deadline": f"{deadline:.0f}"})

    async def _restore_shutdown(self, machine: Machine, backend: MachineBackend) -> None:
        """Schedule the earlier shutdown again, unless an attempt runs there: it was started after all, or by another caller, and needs its
        time.

        Errors are ignored, because the caller is about to raise the cause; the machine then ends at the later time.
        """
        deadline = float(machine.tags["deadline"])
        minutes = max(0, math.ceil((deadline - time.time()) / 60))
        with suppress(CloudError):
            handle = await backend.find(machine.tags["job"])
            if handle is None or (await backend.status(handle)).ending is not None:
                await self._schedule_shutdown(machine, backend, deadline, minutes)

    def _stored_order(self, name: str, record: Record | None) -> Order:
        if record is None or record.order is None:
            raise CloudError(
                f"the machine of {name} is gone, and what it needs for another attempt is not here: it is on the machine that launched it."
            )
        return Order.from_document(record.order)

    async def _newest_checkpoint(self, record: Record | None, store: BlobStore) -> Resume | None:
        """The newest checkpoint among the results that were fetched to this machine."""
        if record is None or record.results is None:
            return None
        return await asyncio.to_thread(newest_checkpoint, Path(record.results), store)

    # --- a machine ------------------------------------------------------------------------------

    async def _start_on_new_machine(
        self,
        order: Order,
        store: BlobStore,
        attempt: int,
        newest: Resume | None,
        machine_count: int,
    ) -> Handle:
        """Start a machine and this attempt on it; if that fails for any reason, end the machine.

        `machine_count`: how many machines of this job existed when the caller found that this attempt has none.
        """
        started: list[Machine] = []
        try:
            machine = await self._machines.start(order, attempt, started, machine_count)
            machine = await self._machines.choose_machine(order, machine, started)
            return await self._set_up(machine, order, store, newest)
        except BaseException:
            # Also Ctrl-C: a paid machine must not outlive the process that started it.
            if not order.place_options.get(KEEP_ON_FAILURE):
                for started_machine in started:
                    await wait_until_done(asyncio.create_task(self._machines.undo(started_machine)))
            raise

    async def _set_up(
        self, machine: Machine, order: Order, store: BlobStore, newest: Resume | None
    ) -> Handle:
        """Wait until the machine is ready, then start the job on it, or find that it has started."""
        attempt = attempt_of(machine, None)
        backend = await self._machines.ready(machine)
        # The process that started the machine may have died hours ago.
        if "begun" not in machine.tags:
            await self._postpone_shutdown(machine, backend, order)
        if attempt == 1:
            handle = await backend.submit(order, store)
        else:
            handle = await backend.take_over(order, store, attempt, newest)
        await self._machines.tag(
            machine, {"attempt": str(max(attempt, handle.attempt)), "begun": "1"}
        )
        await asyncio.to_thread(self._records.record_start, order, handle.attempt, store)
        usage = usage_of([machine], time.time())
        await asyncio.to_thread(self._records.record_usage, order.name, usage)
        return handle

    # --- finding --------------------------------------------------------------------------------

    async def _machine_and_record(self, name: str) -> tuple[Machine | None, Record | None]:
        """The job's newest machine, and its record on this machine. An ended machine on which the job never started is ignored: the process
        that started the machine died, and the job left nothing there."""
        machine, record = await self._machines.newest(name), self._records.find(name)
        if machine is not None and record is None and not machine.is_alive:
            never_began = "begun" not in machine.tags and attempt_of(machine, None) == 1
            machine = None if never_began else machine
        return machine, record

    async def find(self, name: str) -> Handle | None:
        """See `Backend.find`."""
        machine, record = await self._machine_and_record(name)
        if machine is None:
            return None if record is None else self._handle(name, record.attempt)
        if machine.is_alive:
            backend = self._machines.backend_for(machine)
            try:
                handle = None if backend is None else await backend.find(name)
            except Unreachable:
                if "begun" in machine.tags:
                    raise
                handle = None
            return handle or self._handle(name, attempt_of(machine, None))
        return self._handle(name, attempt_of(machine, record))

    async def list(self) -> list[Handle]:
        """See `Backend.list`."""
        names = {machine.tags["job"] for machine in await self._machines.list_machines()} | set(
            self._records.names()
        )
        handles = await asyncio.gather(*(self.find(name) for name in sorted(names)))
        return [handle for handle in handles if handle is not None]

    async def order(self, handle: Handle) -> Order:
        """See `Backend.order`."""
        try:
            return await self._ask_machine(handle, lambda backend: backend.order(handle))
        except _MachineUnavailable:
            return self._stored_order(handle.name, self._records.find(handle.name))

    def _handle(self, name: str, attempt: int) -> Handle:
        return Handle(self.name, name, attempt, {"where": self._where})

    async def _ask_machine(
        self, handle: Handle, ask: Callable[[MachineBackend], Awaitable[T]]
    ) -> T:
        """The answer of this attempt's machine. Raises _NoAnswer if the machine is not ready, or has ended."""
        machine = self._machines.last_used_machine(handle.name)
        if machine is None:
            machine = await self._machines.newest(handle.name)
        if machine is not None and handle.attempt < int(machine.tags.get("first", 1)):
            raise _MachineUnavailable(None)
        backend = (
            self._machines.backend_for(machine)
            if machine is not None and machine.is_alive
            else None
        )
        if machine is None or backend is None:
            raise _MachineUnavailable(machine)
        try:
            return await ask(backend)
        except (JobNotFound, Unreachable) as error:
            # The machine that this process knows may be outdated: look it up again.
            await self._machines.forget(handle.name)
            machine = await self._machines.newest(handle.name)
            has_begun = machine is not None and machine.is_alive and "begun" in machine.tags
            if has_begun and isinstance(error, Unreachable):
                raise
            raise _MachineUnavailable(machine) from None

    # --- watching -------------------------------------------------------------------------------

    async def status(self, handle: Handle) -> Status:
        """See `Backend.status`."""
        try:
            return await self._ask_machine(handle, lambda backend: backend.status(handle))
        except _MachineUnavailable as unavailable:
            return self._status_without_machine(handle, unavailable.machine)

    def _status_without_machine(self, handle: Handle, machine: Machine | None) -> Status:
        """The status without asking the machine: from its description by AWS, and from the record on this machine."""
        record = self._records.find(handle.name)
        if machine is None and record is None:
            raise JobNotFound(
                f"{self._where} knows nothing of {handle.name}, attempt {handle.attempt}."
            )
        ending = record.endings.get(handle.attempt) if record else None
        log = self._records.log(handle.name, handle.attempt)
        log_size = 0
        with suppress(FileNotFoundError):  # not fetched yet, or removed with the job
            log_size = log.stat().st_size
        if ending is None and machine is not None and machine.is_alive:
            if "begun" in machine.tags:
                raise JobNotFound(f"{machine.id} knows nothing of {handle.name}.")
            return Status(Phase.WAITING, waits_for=SET_UP_REASON)
        return Status(Phase.ENDED, log_size, ending=ending or _lost_ending(machine))

    async def wait(self, handle: Handle, seen: Status, seconds: float) -> Status:
        """See `Backend.wait`."""
        if seen.ending is not None:
            return seen
        try:
            return await self._ask_machine(
                handle, lambda backend: backend.wait(handle, seen, seconds)
            )
        except _MachineUnavailable as unavailable:
            status, deadline = (
                self._status_without_machine(handle, unavailable.machine),
                time.monotonic() + seconds,
            )
        while status == seen and time.monotonic() < deadline:
            await asyncio.sleep(min(self._timeouts.look, seconds))
            status = await self.status(handle)
        return status

    async def log(self, handle: Handle, offset: int, limit: int) -> LogPart:
        """See `Backend.log`."""
        try:
            return await self._ask_machine(
                handle, lambda backend: backend.log(handle, offset, limit)
            )
        except _MachineUnavailable:
            path = self._records.log(handle.name, handle.attempt)
        try:
            data = await asyncio.to_thread(path.read_bytes)
        except FileNotFoundError:
            data = b""
        return LogPart(len(data), data[offset : offset + limit])

    # --- ending ---------------------------------------------------------------------------------

    async def cancel(self, handle: Handle, grace: float) -> None:
        """See `Backend.cancel`. If the job has not started on its machine, the machine is ended."""
        try:
            await self._ask_machine(handle, lambda backend: backend.cancel(handle, grace))
        except _MachineUnavailable as unavailable:
            machine = unavailable.machine
            if machine is not None and machine.is_alive and "begun" not in machine.tags:
                await self._machines.undo(machine)

    async def fetch(self, handle: Handle, folder: Path) -> FetchedResults:
        """See `Backend.fetch`. If the attempt has ended, its ending and its log are stored on this machine."""

        async def fetch_from_machine(backend: MachineBackend) -> FetchedResults:
            ending = (await backend.status(handle)).ending
            fetched = await backend.fetch(handle, folder)
            if ending is not None:
                path, offset = self._records.log(handle.name, handle.attempt), 0
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                with path.open("wb") as file:
                    while part := (await backend.log(handle, offset, LOG_PIECE)).data:
                        file.write(part)
                        offset += len(part)
            await asyncio.to_thread(
                self._records.record_fetch, handle.name, handle.attempt, folder, ending
            )
            return fetched

        try:
            return await self._ask_machine(handle, fetch_from_machine)
        except _MachineUnavailable as unavailable:
            status = self._status_without_machine(handle, unavailable.machine)
            return await asyncio.to_thread(self._earlier_results, handle, folder, status)

    def _earlier_results(self, handle: Handle, folder: Path, status: Status) -> FetchedResults:
        """The results that were fetched while the machine existed; complete if the attempt had ended by then."""
        record = self._records.find(handle.name)
        is_complete = record is not None and handle.attempt in record.endings
        with results_folder(folder, f"{handle.name} on {self._where}") as results:
            files = tuple(path for path in sorted(results.fetched) if (folder / path).is_file())
        left_out = (
            {} if is_complete or status.ending is None else {"the rest": "its machine is gone"}
        )
        return FetchedResults(folder, files, 0, left_out)

    async def cleanup(self, handle: Handle) -> None:
        """See `Backend.cleanup`. Also ends the job's machine."""
        with suppress(_MachineUnavailable):
            await self._ask_machine(handle, lambda backend: backend.cleanup(handle))
        for machine in await self._machines.list_including_void(handle.name):
            await self._machines.make_void(machine, REMOVED)
            if machine.is_alive:
                await self._machines.end(machine)
        await self._machines.forget(handle.name)
        await asyncio.to_thread(self._records.remove, handle.name)

    async def close(self) -> None:
        """See `Backend.close`."""
        await self._machines.close()

    # --- what is paid for -------------------------------------------------------------------------

    async def rented(self) -> list[RentedMachine]:
        """See `Renting.rented`."""
        rented_machines: list[RentedMachine] = []
        for machine in await self._machines.list_including_void():
            if machine.state in ("terminated", "shutting-down"):
                continue
            tags, price = machine.tags, machine.tags.get("price")
            user = tags.get("login", "").rpartition(":")[0]
            rented_machines.append(
                RentedMachine(
                    machine.id,
                    tags["job"],
                    attempt_of(machine, None),
                    tags.get("owner", ""),
                    float(tags.get("since", 0)),
                    float(tags.get("deadline", 0)),
                    f"{user}@{machine.address}" if machine.address else "",
                    None if price is None else float(price),
                )
            )
        return rented_machines

    async def cost(self, handle: Handle) -> Cost | None:
        """See `Priced.cost`: the cost of all machines that the job has had, including those on which it never started."""
        # AWS forgets a machine after about an hour, so store what it reports now.
        machines = await self._machines.list_including_void(handle.name)
        job_machines = [machine for machine in machines if machine.tags.get(VOID) != REMOVED]
        now = time.time()
        reported = usage_of(job_machines, now)
        usage = await asyncio.to_thread(self._records.record_usage, handle.name, reported)
        return cost_of(with_forgotten(usage, reported.keys(), now))

    async def give_back(self, rented: RentedMachine) -> None:
        """See `Renting.give_back`."""
        await asyncio.to_thread(self._ec2.terminate, rented.id)
        await self._machines.forget(rented.job)


def _lost_ending(machine: Machine | None) -> Ending:
    """The ending of an attempt whose machine has ended without reporting how the attempt ended."""
    if machine is None:
        reason = "its machine is gone, and AWS does not remember it"
        return Ending(Outcome.LOST, reason, FailureClass.HOST_LOST)
    deadline = float(machine.tags.get("deadline", "inf"))
    overdue = " Its deadline was over." if time.time() >= deadline else ""
    reason = f"its machine {machine.id} is gone ({machine.why or machine.state}).{overdue}"
    by_aws = machine.why.startswith("Server.SpotInstance")
    failure = FailureClass.PREEMPTION if by_aws else FailureClass.HOST_LOST
    return Ending(Outcome.LOST, reason, failure)
