"""AWS as a backend: a job gets a machine of its own on EC2, and from then on that machine answers all questions (`machine.py`).

A machine's tags say what it is for: the job, the attempt, a hash of the order, its host key, its deadline. So any user with credentials
finds it by the job's name. It is started with a token of its attempt, so that two callers who submit at once start one machine. When it is
gone, AWS remembers it for about an hour; anything older, and what the next attempt needs, is kept on the machine that launched or fetched
(`aws_state.py`).

The process that starts a machine ends it if the job does not begin on it, for whatever reason: an error, a time-out, Ctrl-C. The machine
itself arms its own end before anything else (`boot.py`), and thanks to the tag of its deadline any user can sweep.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from groupwise.jobs.clouds.aws_checks import Access, check, price_of
from groupwise.jobs.clouds.aws_costs import cost_of, stays_of, with_forgotten
from groupwise.jobs.clouds.aws_state import JobRecords, Record, newest_checkpoint
from groupwise.jobs.clouds.backend import (
    KEEP_ON_FAILURE,
    Capabilities,
    CloudError,
    Cost,
    Ending,
    Fetched,
    Handle,
    NameTaken,
    NotHere,
    Order,
    Outcome,
    Phase,
    Plan,
    Rented,
    Status,
    Unreachable,
    identity_fields,
)
from groupwise.jobs.clouds.boot import ARM, host_key_in, user_data
from groupwise.jobs.clouds.ec2 import DISK_GB, Ec2, Machine, Refused, Request
from groupwise.jobs.clouds.folder import results_folder
from groupwise.jobs.clouds.machine import ROOT, MachineBackend, refuse
from groupwise.jobs.hosts.answers import LogPart
from groupwise.jobs.hosts.driver import Resume, Runner
from groupwise.jobs.hosts.failures import FailureClass
from groupwise.jobs.hosts.fetching import to_its_end
from groupwise.jobs.hosts.files import BlobStore
from groupwise.jobs.hosts.ssh import Address, SshHost

INSTANCE_TYPE = "g5.2xlarge"
HOURS = 24.0
MARGIN_MINUTES = 30
"""Minutes that a machine lives beyond its job's own limit: to be made ready before, to have its results fetched after."""
LOG_PIECE = 1 << 20
VOID = "void"
"""The tag of a machine that no longer belongs to its job: its set-up failed, or the job was removed."""
REMOVED = "removed"
"""The tag's value if the job was removed: the machine's cost does not count for the next job of this name."""
SET_UP = "its machine is made ready"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Patience:
    """Times in seconds."""

    look: float = 4.0
    """Pause between two looks at a machine that is not ready."""
    ready: float = 900.0
    """Longest time from the start of a machine to the first answer of its sshd; a console may be minutes late."""
    known: float = 120.0
    """Longest time until AWS knows the machine that it has started."""
    other: float = 30.0
    """Longest time until a machine is seen that another caller starts at this moment."""


@dataclass(slots=True)
class _Reached:
    """A machine that was called, and the backend that calls it."""

    machine: Machine
    backend: MachineBackend


class _NoAnswer(Exception):
    """An attempt's machine is not ready, or gone. `machine` is what AWS says of it."""

    def __init__(self, machine: Machine | None) -> None:
        super().__init__(machine)
        self.machine = machine


class AwsBackend:
    """A `Backend` that rents a machine of EC2 for each job; see `Renting` as well."""

    capabilities = Capabilities(paid=True)

    def __init__(
        self,
        name: str,
        ec2: Ec2,
        access: Access,
        kept: JobRecords,
        *,
        owner: str = "",
        patience: Patience | None = None,
    ) -> None:
        """`owner`: the user who launches, shown to people who sweep."""
        self.name = name
        self._ec2, self._access, self._records = ec2, access, kept
        self._owner = owner
        self._patience = patience or Patience()
        self._where = f"AWS, {ec2.region}"
        self._reached: dict[str, _Reached] = {}
        self._left: list[MachineBackend] = []
        """Backends of machines that were replaced by others; closed at the end."""

    # --- placing ------------------------------------------------------------------------------

    async def plan(self, order: Order) -> Plan:
        """See `Backend.plan`. Everything that can be checked before anything is paid is checked here, as far as there are credentials."""
        refuse(order)
        found = await asyncio.to_thread(
            check, self._ec2, self._access, order.asks, type_of(order), order.gpus
        )
        if found.failed:
            raise CloudError(
                f"nothing was started on {self._where}:"
                + "".join(f"\n  {each}" for each in found.failed)
            )
        kind = "spot" if order.asks.get("spot") else "on demand"
        image = order.asks.get("ami") or "the newest deep-learning image"
        minutes = minutes_of(order)
        steps = (
            *found.lines,
            (
                f"start {type_of(order)} ({kind}) with {image} and {DISK_GB} GB gp3, {found.price}; it ends by itself after "
                f"{minutes / 60:.1f} h"
            ),
            f"begin {order.name} there by SSH",
        )
        price, hours = found.price.dollars, minutes_of(order) / 60
        return Plan(self._where, steps, order.spec.arguments, price, paid=True, paid_hours=hours)

    async def submit(self, order: Order, store: BlobStore) -> Handle:
        """See `Backend.submit`."""
        refuse(order)
        before = await self._before(order.name)
        machine, record = await self._known(order.name)
        if machine is None and record is None:
            return await self._on_new_machine(order, store, 1, None, before)
        self._expect_same(order, machine, record)
        if machine is None or not machine.lives:
            return self._handle(order.name, _attempt(machine, record))
        return await self._set_up(machine, order, store, await self._newest_here(record, store))

    def _expect_same(self, order: Order, machine: Machine | None, record: Record | None) -> None:
        known = machine.tags.get("order") if machine is not None else None
        if known is None and record is not None and record.order is not None:
            known = digest(identity_fields(record.order))
        if known not in (None, digest(identity_fields(order.document()))):
            raise NameTaken(
                f"{self._where} has another job called {order.name}: give this one another name, or remove that one once it has ended."
            )

    async def resume(self, name: str, secrets: Mapping[str, str], store: BlobStore) -> Handle:
        """See `Backend.resume`. It continues on its machine if that still exists, else on a new one."""
        before = await self._before(name)
        machine, record = await self._known(name)
        if machine is not None and machine.lives:
            going_on = await self._resumed_there(machine, name, secrets, store)
            if going_on is not None:
                return going_on
            record = self._records.find(name)
        if machine is None and record is None:
            raise NotHere(f"{self._where} has no job called {name}.")
        order = self._order_here(name, record).with_secrets(secrets)
        refuse(order)
        attempt = _attempt(machine, record)
        ending = record.endings.get(attempt) if record else None
        if ending is not None and ending.outcome is Outcome.SUCCEEDED:
            raise CloudError(f"{name} has succeeded: there is nothing to go on with.")
        self._records.give_files(order, store)
        newest = await self._newest_here(record, store)
        return await self._on_new_machine(order, store, attempt + 1, newest, before)

    async def _resumed_there(
        self, machine: Machine, name: str, secrets: Mapping[str, str], store: BlobStore
    ) -> Handle | None:
        """Resume on the machine that exists. None: AWS wants it back, so its results were fetched and it was ended."""
        on = self._reach(machine)
        handle = None if on is None else await on.find(name)
        if on is None or handle is None:
            raise CloudError(
                f"{name} has not begun on {machine.id} yet. If nobody makes that ready: `groupwise launch sweep --name {name}` ends it."
            )
        ending = (await on.status(handle)).ending
        if machine.spot and ending is not None and ending.failure is FailureClass.PREEMPTION:
            record = self._records.find(name)
            results = None if record is None else record.results
            folder = Path(results) if results else self._records.folder / f"{name}.results"
            await self.fetch(handle, folder)
            await self._end(machine)
            return None
        begins = ending is not None and ending.outcome is not Outcome.SUCCEEDED
        moved = begins and await self._give_time(machine, on, await on.order(handle))
        try:
            again = await on.resume(name, secrets, store)
        except BaseException:  # Ctrl-C, too: the machine ends when it was to end before
            if moved:
                await to_its_end(asyncio.create_task(self._put_back(machine, on)))
            raise
        await self._tag(machine, {"attempt": str(again.attempt)})
        await asyncio.to_thread(
            self._records.note_begun, await on.order(again), again.attempt, store
        )
        return again

    async def _give_time(self, machine: Machine, on: MachineBackend, order: Order) -> bool:
        """Move a machine's end if it would come before this job's time is over; True if it was moved.

        The old end stays armed until the new one is, and the tag never says a later time than the machine has armed. Raises CloudError.
        """
        minutes, now = minutes_of(order), time.time()
        enough = (minutes - MARGIN_MINUTES / 2) * 60
        if float(machine.tags["deadline"]) - now >= enough:
            return False
        try:
            await self._arm(machine, on, now + minutes * 60, minutes)
        except BaseException:  # the new end may be armed, but not in the tag
            await to_its_end(asyncio.create_task(self._put_back(machine, on)))
            raise
        return True

    async def _arm(
        self, machine: Machine, on: MachineBackend, deadline: float, minutes: int
    ) -> None:
        ran = await on.run("sudo", "-n", ARM, f"{deadline:.0f}", f"{minutes}")
        if ran.code != 0:
            ends = time.strftime("%Y-%m-%d %H:%M", time.localtime(float(machine.tags["deadline"])))
            name, why = machine.tags["job"], ran.err.strip() or f"code {ran.code}"
            raise CloudError(
                f"{machine.id} ends at {ends}, before another attempt of {name} has had its time, and that could not be moved: {why}. "
                f"`groupwise launch fetch {name}` brings what it has, `groupwise launch sweep --name {name}` ends it, and `resume` goes on "
                "on a new one then."
            )
        await self._tag(machine, {"deadline": f"{deadline:.0f}"})

    async def _put_back(self, machine: Machine, on: MachineBackend) -> None:
        """Arm the end that it had before this attempt, unless an attempt runs there: that was begun after all, or by another caller, and
        needs its time.

        An error here is swallowed, because the caller is about to raise the cause; the machine then ends at the later time.
        """
        deadline = float(machine.tags["deadline"])
        minutes = max(0, math.ceil((deadline - time.time()) / 60))
        with suppress(CloudError):
            handle = await on.find(machine.tags["job"])
            if handle is None or (await on.status(handle)).ending is not None:
                await self._arm(machine, on, deadline, minutes)

    def _order_here(self, name: str, record: Record | None) -> Order:
        if record is None or record.order is None:
            raise CloudError(
                f"the machine of {name} is gone, and what it needs for another attempt is not here: it is on the machine that launched it."
            )
        return Order.from_document(record.order)

    async def _newest_here(self, record: Record | None, store: BlobStore) -> Resume | None:
        """The newest checkpoint among the results that were fetched here."""
        if record is None or record.results is None:
            return None
        return await asyncio.to_thread(newest_checkpoint, Path(record.results), store)

    # --- a machine ------------------------------------------------------------------------------

    async def _on_new_machine(
        self, order: Order, store: BlobStore, attempt: int, newest: Resume | None, before: int
    ) -> Handle:
        """Begin this attempt on a machine that is started for it, and end the machine if that fails for whatever reason.

        `before`: how many machines of this job there were when the caller found that this attempt has none.
        """
        started: list[Machine] = []
        try:
            machine = await self._started(order, attempt, started, before)
            machine = await self._settled(order, machine, started)
            return await self._set_up(machine, order, store, newest)
        except (
            BaseException
        ):  # Ctrl-C, too: what costs money must not outlive the process that began it
            if not order.asks.get(KEEP_ON_FAILURE):
                for each in started:
                    await to_its_end(asyncio.create_task(self._undo(each)))
            raise

    async def _undo(self, machine: Machine) -> None:
        """End a machine on which nothing has begun. Raises CloudError if it still exists.

        For some seconds AWS may not know what it has just started: it is asked again until it does.
        """
        until = time.monotonic() + self._patience.known
        try:
            await self._make_void(machine)
            while not await self._end(machine):
                if time.monotonic() > until:
                    raise CloudError("AWS says that there is no such machine.")
                await asyncio.sleep(self._patience.look)
            await self._make_void(machine)
        except CloudError as error:
            raise CloudError(
                f"{machine.id} in {self._ec2.region} was started and could NOT be ended: {error.message} It costs money until its "
                f"deadline. End it by hand: aws ec2 terminate-instances --region {self._ec2.region} --instance-ids {machine.id}"
            ) from error

    async def _make_void(self, machine: Machine, why: str = "1") -> None:
        """Tag the machine so that no caller takes it for the job's. A failure to tag must not keep it from being ended."""
        with suppress(CloudError):
            await self._tag(machine, {VOID: why})

    async def _settled(self, order: Order, machine: Machine, started: list[Machine]) -> Machine:
        """The machine to keep if several were started for one attempt. All callers choose the same; those in `started` are ended if it is
        another."""
        chosen = await self._newest(order.name)
        if chosen is None or not chosen.lives or chosen.id == machine.id:
            return machine
        self._expect_same(order, chosen, None)
        for each in [*started]:
            await self._undo(each)
            started.remove(each)
        return chosen

    async def _before(self, name: str) -> int:
        """How many machines were ever started for this job, as far as AWS remembers."""
        return len(await asyncio.to_thread(self._ec2.machines, name))

    async def _started(
        self, order: Order, attempt: int, started: list[Machine], before: int
    ) -> Machine:
        """The machine of this attempt; it is added to `started` if it was started here."""
        request = await self._request(order, attempt, f"{before}")
        try:
            return await self._start(request, started)
        except Refused as refused:
            if refused.aws != "IdempotentParameterMismatch":
                raise
        # Another caller has used the token: at this moment, or for a machine that is gone and forgotten.
        other = await self._started_elsewhere(order.name, attempt)
        if other is not None:
            self._expect_same(order, other, None)
            return other
        request = await self._request(order, attempt, f"{before}/{uuid.uuid4().hex}")
        return await self._start(request, started)

    async def _start(self, request: Request, started: list[Machine]) -> Machine:
        def start() -> Machine:
            # Noted in the thread, because a caller that is cancelled meanwhile must know what exists.
            machine = self._ec2.start(request)
            started.append(machine)
            return machine

        try:
            return await to_its_end(asyncio.to_thread(start))
        except Unreachable as error:
            # It may have been started although no answer came.
            name = request.tags["job"]
            try:
                found = await asyncio.to_thread(self._ec2.machines, name)
            except CloudError:
                raise Unreachable(
                    f"{error.message} Nobody knows whether a machine was started for {name}. If so it ends at its deadline; "
                    f"`groupwise launch sweep --name {name}` ends it as soon as AWS answers."
                ) from None
            ours = [each for each in found if each.tags.get("by") == request.tags["by"]]
            started.extend(each for each in ours if each.lives)
            raise

    async def _started_elsewhere(self, name: str, attempt: int) -> Machine | None:
        """Wait for the living machine of this attempt that another caller starts; None if none is seen in time."""
        until = time.monotonic() + self._patience.other
        while True:
            machine = await self._newest(name)
            if machine is not None and machine.lives and _attempt(machine, None) == attempt:
                return machine
            if time.monotonic() >= until:
                return None
            await asyncio.sleep(self._patience.look)

    async def _request(self, order: Order, attempt: int, salt: str) -> Request:
        """`salt`: the same for all callers who decide this from the same facts, so that AWS starts one machine for them."""
        asks, access = order.asks, self._access
        group = await asyncio.to_thread(access.group, self._ec2)
        image, root_device = await asyncio.to_thread(self._ec2.image, asks.get("ami"))
        minutes = minutes_of(order)
        deadline = time.time() + minutes * 60
        spot = bool(asks.get("spot"))
        token = hashlib.sha256(f"{order.name}/{attempt}/{salt}".encode()).hexdigest()
        kind = type_of(order)
        price = await asyncio.to_thread(price_of, self._ec2, kind, spot=spot)
        tags = {
            "job": order.name,
            "attempt": str(attempt),
            "first": str(attempt),
            "order": digest(identity_fields(order.document())),
            "owner": self._owner[:200],
            "by": uuid.uuid4().hex,
            "since": f"{time.time():.3f}",
            "deadline": f"{deadline:.0f}",
            "login": f"{access.user}:{access.port}",
            **({} if price.dollars is None else {"price": f"{price.dollars:.4f}"}),
        }
        return Request(
            token,
            kind,
            image,
            root_device,
            access.required("key_name"),
            (group.id,),
            user_data(deadline, minutes, access.user, spot=spot),
            tags,
            access.subnet,
            spot,
            asks.get("max_price"),
        )

    async def _set_up(
        self, machine: Machine, order: Order, store: BlobStore, newest: Resume | None
    ) -> Handle:
        """Wait until the machine is ready, and begin the job on it, or find that it has begun."""
        attempt = _attempt(machine, None)
        on = await self._ready(machine)
        if "begun" not in machine.tags:  # a process that died hours ago may have left it
            await self._give_time(machine, on, order)
        if attempt == 1:
            handle = await on.submit(order, store)
        else:
            handle = await on.take_over(order, store, attempt, newest)
        await self._tag(machine, {"attempt": str(max(attempt, handle.attempt)), "begun": "1"})
        await asyncio.to_thread(self._records.note_begun, order, handle.attempt, store)
        seen = stays_of([machine], time.time())
        await asyncio.to_thread(self._records.note_usage, order.name, seen)
        return handle

    async def _ready(self, machine: Machine) -> MachineBackend:
        """Wait until the machine answers with its own host key. Raises CloudError if it does not in time."""
        until = time.monotonic() + self._patience.ready
        while True:
            machine = await self._seen_again(machine)
            if machine.state not in ("pending", "running"):
                raise CloudError(
                    f"{machine.id} has ended before it was ready: {machine.why or machine.state}"
                )
            on = await self._with_host_key(machine)
            why = "it has not said its host key on its console" if on is None else ""
            if on is not None:
                try:
                    await on.list()
                    return on
                except Unreachable as error:
                    why = error.message
                    await on.close()
                    self._reached.pop(machine.tags["job"], None)
            if time.monotonic() >= until:
                raise CloudError(
                    f"{machine.id} was not ready after {self._patience.ready:.0f} s: {why}"
                )
            await asyncio.sleep(self._patience.look)

    async def _seen_again(self, machine: Machine) -> Machine:
        """The machine as AWS describes it now; unchanged while AWS does not know yet what it has just started."""
        found = await asyncio.to_thread(self._ec2.machines, machine.tags["job"])
        return next((each for each in found if each.id == machine.id), machine)

    async def _with_host_key(self, machine: Machine) -> MachineBackend | None:
        """The machine's backend. None: its host key or its address is not known yet."""
        if machine.state != "running" or machine.address is None:
            return None
        if "host-key" not in machine.tags:
            console = await asyncio.to_thread(self._ec2.console, machine.id)
            key = host_key_in(console)
            if key is None:
                return None
            await self._tag(machine, {"host-key": key})
            machine = await self._seen_again(machine)
        return self._reach(machine)

    def _reach(self, machine: Machine) -> MachineBackend | None:
        """The machine's backend, kept for the next call; None: its host key or address is not known yet."""
        job, key = machine.tags["job"], machine.tags.get("host-key")
        known = self._reached.get(job)
        if known is not None and known.machine.id == machine.id:
            return known.backend
        if key is None or machine.address is None:
            return None
        user, _, port = machine.tags["login"].rpartition(":")
        address = Address(machine.address, user, int(port), self._access.required("key_path"), key)
        runner = Runner(SshHost(address), root=ROOT, python=self._access.python)
        backend = MachineBackend(self.name, runner, self._where)
        if known is not None:
            self._left.append(known.backend)
        self._reached[job] = _Reached(machine, backend)
        return backend

    async def _tag(self, machine: Machine, tags: dict[str, str]) -> None:
        await asyncio.to_thread(self._ec2.tag, machine.id, tags)

    async def _end(self, machine: Machine) -> bool:
        """End the machine. False: AWS knows no such machine."""
        known = await asyncio.to_thread(self._ec2.terminate, machine.id)
        await self._forget_way(machine.tags["job"])
        return known

    async def _forget_way(self, name: str) -> None:
        known = self._reached.pop(name, None)
        if known is not None:
            await known.backend.close()

    # --- finding --------------------------------------------------------------------------------

    async def _all(self, name: str | None = None) -> list[Machine]:
        found = await asyncio.to_thread(self._ec2.machines, name)
        return [each for each in found if VOID not in each.tags]

    async def _newest(self, name: str) -> Machine | None:
        """The machine of the newest attempt; a living one before one that is gone, and of two started at once the same for all callers."""
        return max(await self._all(name), key=_newness, default=None)

    async def _known(self, name: str) -> tuple[Machine | None, Record | None]:
        """The job's newest machine, and the record that is kept here. A machine that is gone before the job began on it does not count: the
        process that started it died, and nothing of the job was ever there."""
        machine, record = await self._newest(name), self._records.find(name)
        if machine is not None and record is None and not machine.lives:
            never_began = "begun" not in machine.tags and _attempt(machine, None) == 1
            machine = None if never_began else machine
        return machine, record

    async def find(self, name: str) -> Handle | None:
        """See `Backend.find`."""
        machine, record = await self._known(name)
        if machine is None:
            return None if record is None else self._handle(name, record.attempt)
        if machine.lives:
            on = self._reach(machine)
            try:
                found = None if on is None else await on.find(name)
            except Unreachable:
                if "begun" in machine.tags:
                    raise
                found = None
            return found or self._handle(name, _attempt(machine, None))
        return self._handle(name, _attempt(machine, record))

    async def list(self) -> list[Handle]:
        """See `Backend.list`."""
        names = {each.tags["job"] for each in await self._all()} | set(self._records.names())
        found = await asyncio.gather(*(self.find(name) for name in sorted(names)))
        return [each for each in found if each is not None]

    async def order(self, handle: Handle) -> Order:
        """See `Backend.order`."""
        try:
            return await self._ask_machine(handle, lambda on: on.order(handle))
        except _NoAnswer:
            return self._order_here(handle.name, self._records.find(handle.name))

    def _handle(self, name: str, attempt: int) -> Handle:
        return Handle(self.name, name, attempt, {"where": self._where})

    async def _ask_machine(
        self, handle: Handle, ask: Callable[[MachineBackend], Awaitable[T]]
    ) -> T:
        """The answer of this attempt's machine. Raises _NoAnswer if that is not ready, or gone."""
        known = self._reached.get(handle.name)
        machine = known.machine if known else await self._newest(handle.name)
        if machine is not None and handle.attempt < int(machine.tags.get("first", 1)):
            raise _NoAnswer(None)
        on = self._reach(machine) if machine is not None and machine.lives else None
        if machine is None or on is None:
            raise _NoAnswer(machine)
        try:
            return await ask(on)
        except (NotHere, Unreachable) as error:
            # What this process knows of the machine may be outdated.
            await self._forget_way(handle.name)
            machine = await self._newest(handle.name)
            there = machine is not None and machine.lives and "begun" in machine.tags
            if there and isinstance(error, Unreachable):
                raise
            raise _NoAnswer(machine) from None

    # --- watching -------------------------------------------------------------------------------

    async def status(self, handle: Handle) -> Status:
        """See `Backend.status`."""
        try:
            return await self._ask_machine(handle, lambda on: on.status(handle))
        except _NoAnswer as none:
            return self._status_without(handle, none.machine)

    def _status_without(self, handle: Handle, machine: Machine | None) -> Status:
        """The status without asking the machine: from what AWS says of it, and from the record that is kept here."""
        record = self._records.find(handle.name)
        if machine is None and record is None:
            raise NotHere(
                f"{self._where} knows nothing of {handle.name}, attempt {handle.attempt}."
            )
        ending = record.endings.get(handle.attempt) if record else None
        log = self._records.log(handle.name, handle.attempt)
        log_size = log.stat().st_size if log.exists() else 0
        if ending is None and machine is not None and machine.lives:
            if "begun" in machine.tags:
                raise NotHere(f"{machine.id} knows nothing of {handle.name}.")
            return Status(Phase.WAITING, waits_for=SET_UP)
        return Status(Phase.ENDED, log_size, ending=ending or _lost(machine))

    async def wait(self, handle: Handle, seen: Status, seconds: float) -> Status:
        """See `Backend.wait`."""
        if seen.ending is not None:
            return seen
        try:
            return await self._ask_machine(handle, lambda on: on.wait(handle, seen, seconds))
        except _NoAnswer as none:
            status, until = self._status_without(handle, none.machine), time.monotonic() + seconds
        while status == seen and time.monotonic() < until:
            await asyncio.sleep(min(self._patience.look, seconds))
            status = await self.status(handle)
        return status

    async def log(self, handle: Handle, offset: int, limit: int) -> LogPart:
        """See `Backend.log`."""
        try:
            return await self._ask_machine(handle, lambda on: on.log(handle, offset, limit))
        except _NoAnswer:
            path = self._records.log(handle.name, handle.attempt)
        try:
            data = await asyncio.to_thread(path.read_bytes)
        except FileNotFoundError:
            data = b""
        return LogPart(len(data), data[offset : offset + limit])

    # --- ending ---------------------------------------------------------------------------------

    async def cancel(self, handle: Handle, grace: float) -> None:
        """See `Backend.cancel`. A machine on which the job has not begun is ended."""
        try:
            await self._ask_machine(handle, lambda on: on.cancel(handle, grace))
        except _NoAnswer as none:
            machine = none.machine
            if machine is not None and machine.lives and "begun" not in machine.tags:
                await self._undo(machine)

    async def fetch(self, handle: Handle, folder: Path) -> Fetched:
        """See `Backend.fetch`. Its ending and its log are kept here from then on."""

        async def there(on: MachineBackend) -> Fetched:
            ending = (await on.status(handle)).ending
            fetched = await on.fetch(handle, folder)
            if ending is not None:
                path, offset = self._records.log(handle.name, handle.attempt), 0
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                with path.open("wb") as file:
                    while part := (await on.log(handle, offset, LOG_PIECE)).data:
                        file.write(part)
                        offset += len(part)
            await asyncio.to_thread(
                self._records.note_fetched, handle.name, handle.attempt, folder, ending
            )
            return fetched

        try:
            return await self._ask_machine(handle, there)
        except _NoAnswer as none:
            status = self._status_without(handle, none.machine)
            return await asyncio.to_thread(self._fetched_before, handle, folder, status)

    def _fetched_before(self, handle: Handle, folder: Path, status: Status) -> Fetched:
        """The results fetched while its machine existed; complete if that was after its end."""
        record = self._records.find(handle.name)
        whole = record is not None and handle.attempt in record.endings
        with results_folder(folder, f"{handle.name} on {self._where}") as results:
            files = tuple(path for path in sorted(results.brought) if (folder / path).is_file())
        left_out = {} if whole or status.ending is None else {"the rest": "its machine is gone"}
        return Fetched(folder, files, 0, left_out)

    async def cleanup(self, handle: Handle) -> None:
        """See `Backend.cleanup`. Its machine is ended."""
        with suppress(_NoAnswer):
            await self._ask_machine(handle, lambda on: on.cleanup(handle))
        for machine in await asyncio.to_thread(self._ec2.machines, handle.name):
            await self._make_void(machine, REMOVED)
            if machine.lives:
                await self._end(machine)
        await self._forget_way(handle.name)
        await asyncio.to_thread(self._records.remove, handle.name)

    async def close(self) -> None:
        """See `Backend.close`."""
        for name in [*self._reached]:
            await self._forget_way(name)
        for each in self._left:
            await each.close()

    # --- what is paid for -------------------------------------------------------------------------

    async def rented(self) -> list[Rented]:
        """See `Renting.rented`."""
        found: list[Rented] = []
        for machine in await asyncio.to_thread(self._ec2.machines, None):
            if machine.state in ("terminated", "shutting-down"):
                continue
            tags, price = machine.tags, machine.tags.get("price")
            user = tags.get("login", "").rpartition(":")[0]
            found.append(
                Rented(
                    machine.id,
                    tags["job"],
                    _attempt(machine, None),
                    tags.get("owner", ""),
                    float(tags.get("since", 0)),
                    float(tags.get("deadline", 0)),
                    f"{user}@{machine.address}" if machine.address else "",
                    None if price is None else float(price),
                )
            )
        return found

    async def cost(self, handle: Handle) -> Cost | None:
        """See `Priced.cost`: the cost of all machines that the job has had, also of those on which it never began."""
        # AWS forgets a machine after about an hour, so what it says now is kept here.
        machines = await asyncio.to_thread(self._ec2.machines, handle.name)
        its = [each for each in machines if each.tags.get(VOID) != REMOVED]
        now = time.time()
        seen = stays_of(its, now)
        kept = await asyncio.to_thread(self._records.note_usage, handle.name, seen)
        return cost_of(with_forgotten(kept, seen.keys(), now))

    async def give_back(self, rented: Rented) -> None:
        """See `Renting.give_back`."""
        await asyncio.to_thread(self._ec2.terminate, rented.id)
        await self._forget_way(rented.job)


def type_of(order: Order) -> str:
    """The instance type that an order asks for."""
    return order.asks.get("instance_type") or INSTANCE_TYPE


def minutes_of(order: Order) -> int:
    """Minutes after which the order's machine ends by itself."""
    seconds = order.spec.limits.time_seconds or HOURS * 3600
    return math.ceil(seconds / 60) + MARGIN_MINUTES


def digest(document: Any) -> str:
    """A hash of a document."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _newness(machine: Machine) -> tuple[int, bool, float]:
    since = float(machine.tags.get("since", 0))
    return _attempt(machine, None), machine.lives, -since if machine.lives else since


def _attempt(machine: Machine | None, record: Record | None) -> int:
    of_machine = 0 if machine is None else int(machine.tags.get("attempt", 1))
    return max(of_machine, 0 if record is None else record.attempt)


def _lost(machine: Machine | None) -> Ending:
    """The ending of an attempt whose machine is gone and never said how it ended."""
    if machine is None:
        why = "its machine is gone, and AWS does not remember it"
        return Ending(Outcome.LOST, why, FailureClass.HOST_LOST)
    deadline = float(machine.tags.get("deadline", "inf"))
    over = " Its deadline was over." if time.time() >= deadline else ""
    why = f"its machine {machine.id} is gone ({machine.why or machine.state}).{over}"
    by_aws = machine.why.startswith("Server.SpotInstance")
    failure = FailureClass.PREEMPTION if by_aws else FailureClass.HOST_LOST
    return Ending(Outcome.LOST, why, failure)
