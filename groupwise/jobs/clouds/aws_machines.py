"""EC2 machines that belong to jobs: starts a machine for an attempt, waits until it answers, tags it, ends it.

A machine's tags say what it is for. It is started with an idempotency token of its attempt, so two callers that submit at once start one
machine. If AWS still starts two, all callers keep the same one. `aws.py` decides what runs on it.

The machine's user data is a start-up script (`boot.sh`). It first schedules a shutdown, and until the host key is printed any failure of
the script ends the machine at once. Every later boot schedules the same time again. Root may change that time (`ARM`), since another
attempt on the machine has its own deadline. A time that cannot be read counts as now. The script contains no secret: every AWS user who
may see the machine, and every program on it, can read it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.core.interruption import wait_until_done
from groupwise.jobs.clouds.aws_checks import DISK_GB, Access, check_image, price_of
from groupwise.jobs.clouds.aws_state import Record
from groupwise.jobs.clouds.backend import (
    MODEL_GB,
    CloudError,
    NameTaken,
    Order,
    Unreachable,
    identity_fields,
)
from groupwise.jobs.clouds.ec2 import (
    PERMISSION_CODES,
    AwsRefused,
    Ec2,
    InstanceRequest,
    Machine,
    MachineImage,
)
from groupwise.jobs.clouds.machine import ROOT, MachineBackend
from groupwise.jobs.hosts.driver import Runner
from groupwise.jobs.hosts.ssh import Address, SshHost

INSTANCE_TYPE = "g5.2xlarge"
HOURS = 24.0
ROOM_GB = 60
"""GB of a machine's disk in addition to its image, the model and the checkpoints: the job's environment (torch with CUDA takes 12 GB while
pip installs it), the project, data, logs."""
UNKNOWN_MODEL_GB = 120
"""GB for the model and the checkpoints of a command that does not name its model."""
MARGIN_MINUTES = 30
"""Minutes that a machine lives longer than its job's limit: for the set-up before, and for fetching the results afterwards."""
VOID = "void"
"""The tag of a machine that no longer belongs to its job, because its set-up failed or the job was removed."""
REMOVED = "removed"
"""The tag's value if the job was removed: the machine's cost is not part of the next job of this name."""
HOST_KEY = re.compile(
    r"<groupwise-host-key (ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI[A-Za-z0-9+/]{43}=*) ([0-9a-f]{64})>"
)
"""The host key on the console, with its SHA-256: kernel and services write to the console at the same time, in the middle of lines too. All
ed25519 keys have the same length."""
KERNEL_LINE = re.compile(r"\[ *\d+\.\d{6}\] [^\r\n]*[\r\n]+")
"""A message of the kernel, from its time to its end of line."""
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x1f]")
"""Colours and cursor movements of the console, ends of lines, and other control characters."""
ARM = "/var/lib/groupwise/arm"
"""The program that schedules the shutdown: at its first argument (seconds since the epoch), or after its second argument in minutes if that
is sooner. Without arguments it schedules the last time again."""
SCRIPT = Path(__file__).with_name("boot.sh")
"""The script, with `@name@` in place of what differs between machines."""
NOTICE = Path(__file__).with_name("spot_notice.py")


@dataclass(frozen=True, slots=True)
class AwsTimeouts:
    """Timeouts and intervals in seconds."""

    look: float = 4.0
    """Pause between two polls of a machine that is not ready."""
    ready: float = 900.0
    """Timeout from the start of a machine until its sshd answers; console output may be minutes late."""
    known: float = 120.0
    """Timeout until AWS knows a machine that it has just started."""
    other: float = 30.0
    """Timeout until a machine becomes visible that another caller is starting."""


class AwsMachines:
    """The machines of all jobs of an account in one region."""

    def __init__(
        self, name: str, ec2: Ec2, access: Access, owner: str, timeouts: AwsTimeouts
    ) -> None:
        """`name`: the backend's name; `owner`: the user who launches, shown to users who sweep."""
        self._name, self._owner = name, owner
        self._ec2, self._access, self._timeouts = ec2, access, timeouts
        self._where = f"AWS, {ec2.region}"
        self._backends: dict[str, tuple[Machine, MachineBackend]] = {}
        """The last used machine of each job, and the backend that calls it."""
        self._replaced_backends: list[MachineBackend] = []
        """Backends of machines that were replaced by others; `close` closes them."""

    async def newest(self, name: str) -> Machine | None:
        """The machine of the newest attempt. If several were started for it, a living one, and the same for all callers."""

        def newness(machine: Machine) -> tuple[int, bool, float]:
            since = float(machine.tags.get("since", 0))
            return (
                attempt_of(machine, None),
                machine.is_alive,
                -since if machine.is_alive else since,
            )

        return max(await self.list_machines(name), key=newness, default=None)

    async def list_including_void(self, name: str | None = None) -> list[Machine]:
        """All machines of this job, or of all jobs, including those with the tag VOID."""
        return await asyncio.to_thread(self._ec2.machines, name)

    async def list_machines(self, name: str | None = None) -> list[Machine]:
        """The machines that belong to this job, or to any job: those without the tag VOID."""
        return [
            machine for machine in await self.list_including_void(name) if VOID not in machine.tags
        ]

    def expect_same(self, order: Order, machine: Machine | None, record: Record | None) -> None:
        known_hash = machine.tags.get("order") if machine is not None else None
        if known_hash is None and record is not None and record.order is not None:
            known_hash = document_hash(identity_fields(record.order))
        if known_hash not in (None, document_hash(identity_fields(order.document()))):
            raise NameTaken(
                f"{self._where} has another job called {order.name}: give this one another name, or remove that one once it has ended."
            )

    async def start(
        self, order: Order, attempt: int, started: list[Machine], machine_count: int
    ) -> Machine:
        """Start the machine of this attempt, or find it; it is added to `started` if it was started here."""
        request = await self._request(order, attempt, f"{machine_count}")
        try:
            return await self._run_instance(request, started)
        except AwsRefused as refused:
            if refused.aws != "IdempotentParameterMismatch":
                raise
        # Another caller has used the token: at this moment, or for a machine that has ended and that AWS has forgotten.
        deadline = time.monotonic() + self._timeouts.other
        while True:
            machine = await self.newest(order.name)
            if machine is not None and machine.is_alive and attempt_of(machine, None) == attempt:
                self.expect_same(order, machine, None)
                return machine
            if time.monotonic() >= deadline:
                break
            await asyncio.sleep(self._timeouts.look)
        request = await self._request(order, attempt, f"{machine_count}/{uuid.uuid4().hex}")
        return await self._run_instance(request, started)

    async def _run_instance(self, request: InstanceRequest, started: list[Machine]) -> Machine:
        def start() -> Machine:
            # Recorded in the thread: a caller that is cancelled meanwhile must know which machine exists.
            machine = self._ec2.start(request)
            started.append(machine)
            return machine

        try:
            return await wait_until_done(asyncio.to_thread(start))
        except Unreachable as error:
            # It may have been started although AWS did not answer.
            name = request.tags["job"]
            try:
                machines = await asyncio.to_thread(self._ec2.machines, name)
            except CloudError:
                raise Unreachable(
                    f"{error.message} It is unknown whether a machine was started for {name}. If so it ends at its deadline; "
                    f"`groupwise launch sweep --name {name}` ends it as soon as AWS answers."
                ) from None
            own_machines = [
                candidate
                for candidate in machines
                if candidate.tags.get("by") == request.tags["by"]
            ]
            started.extend(candidate for candidate in own_machines if candidate.is_alive)
            raise

    async def _request(self, order: Order, attempt: int, salt: str) -> InstanceRequest:
        """The request for a machine. `salt`: the same for all callers that decide from the same facts: AWS then starts one machine for
        them."""
        place_options, access = order.place_options, self._access
        group = await asyncio.to_thread(access.group, self._ec2)
        image = await asyncio.to_thread(self._ec2.image, place_options.get("ami"))
        minutes = minutes_of(order)
        deadline = time.time() + minutes * 60
        spot = bool(place_options.get("spot"))
        token = hashlib.sha256(f"{order.name}/{attempt}/{salt}".encode()).hexdigest()
        kind = instance_type_of(order)
        try:
            instance_type = await asyncio.to_thread(self._ec2.instance_type, kind)
        except AwsRefused as refused:
            if refused.aws not in PERMISSION_CODES:
                raise
        else:  # also at a resume, whose image may be newer
            check_image(image, instance_type, place_options.get(DISK_GB))
        price = await asyncio.to_thread(price_of, self._ec2, kind, spot=spot)
        tags = {
            "job": order.name,
            "attempt": str(attempt),
            "first": str(attempt),
            "order": document_hash(identity_fields(order.document())),
            "owner": self._owner[:200],
            "by": uuid.uuid4().hex,
            "since": f"{time.time():.3f}",
            "deadline": f"{deadline:.0f}",
            "login": f"{access.user}:{access.port}",
            **({} if price.dollars is None else {"price": f"{price.dollars:.4f}"}),
        }
        return InstanceRequest(
            token,
            kind,
            image.id,
            image.root_device,
            disk_gb_of(order, image),
            access.require("key_name"),
            (group.id,),
            user_data(deadline, minutes, access.user, spot=spot),
            tags,
            access.subnet,
            spot,
            place_options.get("max_price"),
        )

    async def choose_machine(
        self, order: Order, machine: Machine, started: list[Machine]
    ) -> Machine:
        """The machine to keep if several were started for one attempt. All callers choose the same; if it is another machine, those in
        `started` are ended."""
        newest = await self.newest(order.name)
        if newest is None or not newest.is_alive or newest.id == machine.id:
            return machine
        self.expect_same(order, newest, None)
        for started_machine in [*started]:
            await self.undo(started_machine)
            started.remove(started_machine)
        return newest

    async def ready(self, machine: Machine) -> MachineBackend:
        """Wait until the machine answers with its own host key. Raises CloudError after the timeout."""
        deadline = time.monotonic() + self._timeouts.ready
        while True:
            machine = await self._refresh_machine(machine)
            if machine.state not in ("pending", "running"):
                raise CloudError(
                    f"{machine.id} has ended before it was ready: {machine.why or machine.state}"
                )
            if machine.state == "running" and machine.address and "host-key" not in machine.tags:
                console = await asyncio.to_thread(self._ec2.console, machine.id)
                if (key := host_key_in(console)) is not None:
                    await self.tag(machine, {"host-key": key})
                    machine = await self._refresh_machine(machine)
            backend = self.backend_for(machine) if machine.state == "running" else None
            reason = "it has not said its host key on its console" if backend is None else ""
            if backend is not None:
                try:
                    await backend.list()
                    return backend
                except Unreachable as error:
                    reason = error.message
                    await backend.close()
                    self._backends.pop(machine.tags["job"], None)
            if time.monotonic() >= deadline:
                raise CloudError(
                    f"{machine.id} was not ready after {self._timeouts.ready:.0f} s: {reason}"
                )
            await asyncio.sleep(self._timeouts.look)

    async def _refresh_machine(self, machine: Machine) -> Machine:
        """The machine as AWS describes it now; unchanged while AWS does not know the new machine yet."""
        machines = await asyncio.to_thread(self._ec2.machines, machine.tags["job"])
        return next((candidate for candidate in machines if candidate.id == machine.id), machine)

    def backend_for(self, machine: Machine) -> MachineBackend | None:
        """The machine's backend, cached for the next call; None: its host key or address is not known yet."""
        job, key = machine.tags["job"], machine.tags.get("host-key")
        cached = self._backends.get(job)
        if cached is not None and cached[0].id == machine.id:
            return cached[1]
        if key is None or machine.address is None:
            return None
        user, _, port = machine.tags["login"].rpartition(":")
        address = Address(machine.address, user, int(port), self._access.require("key_path"), key)
        runner = Runner(SshHost(address), root=ROOT, python=self._access.python)
        backend = MachineBackend(self._name, runner, self._where)
        if cached is not None:
            self._replaced_backends.append(cached[1])
        self._backends[job] = (machine, backend)
        return backend

    def last_used_machine(self, name: str) -> Machine | None:
        """The job's last used machine; None if none was used."""
        cached = self._backends.get(name)
        return None if cached is None else cached[0]

    async def tag(self, machine: Machine, tags: dict[str, str]) -> None:
        """Set tags of a machine."""
        await asyncio.to_thread(self._ec2.tag, machine.id, tags)

    async def undo(self, machine: Machine) -> None:
        """End a machine on which nothing has started. Raises CloudError if it still exists.

        For some seconds AWS may not know a machine that it has just started: the request is repeated until it does.
        """
        deadline = time.monotonic() + self._timeouts.known
        try:
            await self.make_void(machine)
            while not await self.end(machine):
                if time.monotonic() > deadline:
                    raise CloudError("AWS says that there is no such machine.")
                await asyncio.sleep(self._timeouts.look)
            await self.make_void(machine)
        except CloudError as error:
            raise CloudError(
                f"{machine.id} in {self._ec2.region} was started and could NOT be ended: {error.message} It costs money until its "
                f"deadline. End it by hand: aws ec2 terminate-instances --region {self._ec2.region} --instance-ids {machine.id}"
            ) from error

    async def make_void(self, machine: Machine, value: str = "1") -> None:
        """Tag the machine as no longer belonging to its job. Errors are ignored: they must not prevent its end."""
        with suppress(CloudError):
            await self.tag(machine, {VOID: value})

    async def end(self, machine: Machine) -> bool:
        """End the machine. False: AWS does not know this machine."""
        is_known = await asyncio.to_thread(self._ec2.terminate, machine.id)
        await self.forget(machine.tags["job"])
        return is_known

    async def close(self) -> None:
        """Close the connections to all machines."""
        for name in [*self._backends]:
            await self.forget(name)
        for backend in self._replaced_backends:
            await backend.close()

    async def forget(self, name: str) -> None:
        """Close the connection to the job's last used machine, which may have been replaced."""
        cached = self._backends.pop(name, None)
        if cached is not None:
            await cached[1].close()


def instance_type_of(order: Order) -> str:
    """The instance type that an order requests, or the default."""
    return order.place_options.get("instance_type") or INSTANCE_TYPE


def disk_gb_of(order: Order, image: MachineImage) -> int:
    """GB of the machine's disk: as requested, or by the size of the image and of the model."""
    options = order.place_options
    return options.get(DISK_GB) or (
        image.size_gb + ROOM_GB + options.get(MODEL_GB, UNKNOWN_MODEL_GB)
    )


def minutes_of(order: Order) -> int:
    """Minutes after which the order's machine ends by itself."""
    seconds = order.spec.limits.time_seconds or HOURS * 3600
    return math.ceil(seconds / 60) + MARGIN_MINUTES


def document_hash(document: Any) -> str:
    """A hash of a document."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def attempt_of(machine: Machine | None, record: Record | None) -> int:
    """The newest attempt according to the machine's tags and the record; 0 without both."""
    of_machine = 0 if machine is None else int(machine.tags.get("attempt", 1))
    return max(of_machine, 0 if record is None else record.attempt)


def user_data(deadline: float, minutes: int, user: str, *, spot: bool) -> str:
    """The script of a machine that ends at `deadline` (seconds since the epoch), which is `minutes` from now."""
    watch = notice = ""
    if spot:
        watch = f"setsid python3 -I /var/lib/groupwise/spot_notice.py ~{user}/{ROOT} </dev/null >/dev/null 2>&1 &"
        program = NOTICE.read_text("utf-8")
        notice = f"cat > /var/lib/groupwise/spot_notice.py <<'END_OF_FILE'\n{program}END_OF_FILE"
    values = {
        "deadline": f"{deadline:.0f}",
        "minutes": str(minutes),
        "arm": ARM,
        "watch": watch,
        "notice": notice,
    }
    return re.sub(r"@(\w+)@", lambda name: values[name[1]], SCRIPT.read_text("utf-8"))


def host_key_in(console: str) -> str | None:
    """The host key that the machine has printed; None if it has not, or if AWS's copy of the console is late.

    The machine prints it several times. A copy counts if its checksum is right, so one that other text has got into is either mended or
    ignored. The last one counts, because a machine may have got another key since an earlier boot."""
    text = CONTROL.sub("", KERNEL_LINE.sub("", console))
    keys = [
        key
        for key, checksum in HOST_KEY.findall(text)
        if hashlib.sha256(key.encode()).hexdigest() == checksum
    ]
    return keys[-1] if keys else None
