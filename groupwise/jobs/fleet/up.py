"""`groupwise fleet up`: the control plane in one process. For larger fleets, a process may also run a single role, or the API.

    dispatcher   takes jobs from the queue and drives their attempts to the end
    poller       observes the machines
    requeue      finds inconsistent rows and repairs them
    tracker      announces the ends of jobs

Every role is a loop that is meant to run for ever. If it ends, the reason is logged, and it is restarted after a pause; the others
continue. Each role writes a line into `control_processes` every ten seconds, from which `fleet status` and `doctor` know who is alive.

A signal ends all of it cleanly: the dispatcher releases its attempts, and jobs continue, because runners do not need us. A later second
signal ends the process at once. An embedded fleet has one process for each role, held by a lock on a file of its folder that ends with the
process.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Collection,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from groupwise.api.schemas.problems import Refusal
from groupwise.core.errors import GroupwiseError, RunError, UsageError
from groupwise.core.retry import Backoff
from groupwise.core.terminal.quantities import duration
from groupwise.core.waiting import wait_at_most
from groupwise.jobs.fleet import processes
from groupwise.jobs.fleet.attempts import records
from groupwise.jobs.fleet.attempts.effects import Gateway
from groupwise.jobs.fleet.attempts.records import Machine
from groupwise.jobs.fleet.disk_full import explain_disk_errors
from groupwise.jobs.fleet.dispatcher import (
    DispatcherDependencies,
    GlobalJobDispatcher,
    Intervals,
    Tuning,
    new_owner,
)
from groupwise.jobs.fleet.event_listener import EventListener
from groupwise.jobs.fleet.files.artefacts import Collector
from groupwise.jobs.fleet.files.log_shipping import Shipper, sink_of
from groupwise.jobs.fleet.files.logs import LogMirror
from groupwise.jobs.fleet.files.mirror import CheckpointMirror
from groupwise.jobs.fleet.machines import packing
from groupwise.jobs.fleet.machines.clearing import Retention
from groupwise.jobs.fleet.machines.connections import LOCAL, host_of, same_route
from groupwise.jobs.fleet.notify.composite import notifier_of
from groupwise.jobs.fleet.notify.nats import NatsLink, access_from
from groupwise.jobs.fleet.operations import machines
from groupwise.jobs.fleet.operations.actor import Actor
from groupwise.jobs.fleet.operations.status import shortest_deadman
from groupwise.jobs.fleet.poller import Pace, Poller
from groupwise.jobs.fleet.processes import API, ROLES
from groupwise.jobs.fleet.requeue import RequeueManager
from groupwise.jobs.fleet.settings import DATABASE_FILE, FleetPlace
from groupwise.jobs.fleet.states import JobStatus
from groupwise.jobs.fleet.store import events
from groupwise.jobs.fleet.store.database import (
    Database,
    check_schema,
    connect,
    database_time,
    migrate,
)
from groupwise.jobs.fleet.store.tables import VM, ControlProcess, Event, Job
from groupwise.jobs.fleet.tracker import NatsOutlet, Outlet, Tracker
from groupwise.jobs.fleet.webhooks import WebhookOutlet
from groupwise.jobs.hosts.files import BlobStore
from groupwise.jobs.hosts.host import Host
from groupwise.jobs.hosts.ssh import SshHost

if TYPE_CHECKING:
    from groupwise.jobs.fleet.api.serve import Address

NATS_ROLES = ("dispatcher", "tracker", API)
"""They are woken by NATS, publish there, or wake others by it."""
FOLDER_ROLES = ("dispatcher", API)
"""A tracker that ships logs uses it too."""
HEARTBEAT_SECONDS = 10.0
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Seconds before a crashed role is restarted; doubled each time it crashes again soon."""
SAME_SIGNAL_SECONDS = 1.0
"""Seconds within which signals count as one: `timeout`, or a terminal and a wrapper, signal a process and also its whole group."""
LOCAL_MACHINE = "local"
UP = Actor("up")

log = logging.getLogger(__name__)
Say = Callable[[str], None]


def run(
    place: FleetPlace, roles: Sequence[str], *, say: Say, address: Address | None = None
) -> int:
    """Run these roles until a signal comes; returns the exit code. Raises UsageError if they cannot start.

    `address`: where to serve the fleet's API meanwhile; None: do not serve it.
    """
    is_alone = len(roles) == 1
    logging.basicConfig(  # with all roles, only problems are logged: the event listener prints the rest
        level=logging.INFO if is_alone else logging.WARNING,
        format="%(asctime)s %(levelname)-7s "
        + ("%(name)s: %(message)s" if is_alone else "%(message)s"),
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )
    logging.getLogger("asyncssh").setLevel(logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    with explain_disk_errors(place.folder), contextlib.ExitStack() as locks:
        place.keep_private()
        with contextlib.closing(connect(place.database_url)) as database:
            if place.is_embedded:
                _take_locks(locks, database, place.folder, roles)
            else:
                check_schema(database)
            result = database.run(_local_machine_update(place, roles))
            if result is not None:
                say(result)
            if _serves_commands(roles):
                import_module("groupwise.jobs.fleet.api.serve")
            freeze_imported_objects()
            return asyncio.run(_ControlPlane(place, database, roles, say).run(address))


def _serves_commands(roles: Sequence[str]) -> bool:
    """True for a whole control plane and for an API. Single roles do not load FastAPI."""
    return set(roles) == set(ROLES) or API in roles


# --- before the start -----------------------------------------------------------------------------


def freeze_imported_objects() -> None:
    """Exempt imported objects from garbage collection: full collections would delay claims by a tenth of a second each."""
    gc.collect()
    gc.freeze()


def _take_locks(
    locks: contextlib.ExitStack, database: Database, folder: Path, roles: Sequence[str]
) -> None:
    """Lock the roles and check the schema: from here on no other process has these roles, and the tables stay those of this version.

    The schema is checked twice. Roles that start at once must not take each other for processes that work with the old tables; and a
    process that changed them in between has not seen our locks.
    """
    migrate(database, lambda: processes.role_holder(folder))
    for role in roles:
        locks.enter_context(processes.hold_role(folder, role))
    migrate(database, lambda: processes.role_holder(folder, but=roles))


def _local_machine_update(
    place: FleetPlace, roles: Sequence[str]
) -> Callable[[Session], str | None]:
    """Update this machine's row before a role reads it (added, interpreter, folder). The returned function gives a message for users."""

    def look(session: Session) -> str | None:
        if set(roles) == set(ROLES):
            # This machine is the fleet's first one; if it was removed, it stays removed.
            vm = session.get(VM, LOCAL_MACHINE)
            if vm is None:
                new_machine = machines.NewMachine(
                    LOCAL_MACHINE,
                    transport=LOCAL,
                    workdir=str(place.folder / "work"),
                    python=sys.executable,
                )
                machines.add(session, UP, new_machine)
            elif vm.transport == LOCAL and vm.active and not Path(vm.python).exists():
                machines.change(session, UP, LOCAL_MACHINE, python=sys.executable)
        # with its own database setting, a fleet is not tied to this folder; and an API uses no machine
        if place.settings.database is not None or API in roles:
            return None
        vm = session.get(VM, LOCAL_MACHINE)
        if vm is None or vm.transport != LOCAL or not vm.active:
            return None
        return _move_work_folder(session, vm, place.folder)

    return look


def _move_work_folder(session: Session, vm: VM, folder: Path) -> str | None:
    """Move this machine's working folder if the fleet was moved. Raises UsageError if two fleets would share it."""
    old_folder, new_folder = Path(vm.workdir), folder / "work"
    if old_folder == new_folder or not _was_set_by_up(session):
        return None
    with contextlib.suppress(OSError):  # one of them does not exist
        if old_folder.parent.samefile(folder):
            return None  # one folder, through links
    if os.path.exists(old_folder.parent / DATABASE_FILE):
        raise UsageError(
            f"{folder} is a copy of the fleet in {old_folder.parent}, and that one is still there: both would run their jobs in "
            f"{old_folder}, and take each other's for their own. To use {folder} instead of {old_folder.parent}, move "
            f"{old_folder.parent} away. To have both, give this one a working folder of its own, while no job of it runs: `groupwise fleet "
            f"vm set --fleet {folder} local --workdir {new_folder}`."
        )
    try:
        machines.change(session, UP, LOCAL_MACHINE, workdir=str(new_folder))
    except (
        Refusal
    ) as refusal:  # the supervisor of a job writes its exit record to the path that it knows
        raise UsageError(
            f"the fleet was moved from {old_folder.parent} to {folder} while jobs were on this machine, and these know the old path alone. "
            f"`ln -s {folder} {old_folder.parent}` lets them continue; once they have ended the link may go. ({refusal.message})"
        ) from None
    return f"The fleet was moved from {old_folder.parent}: jobs of this machine run in {new_folder} from now on."


def _was_set_by_up(session: Session) -> bool:
    """True if only `up` itself has set this machine's working folder."""
    query = (
        select(Event)
        .where(Event.vm_id == LOCAL_MACHINE, Event.kind.in_((events.VM_ADDED, events.VM_CHANGED)))
        .order_by(Event.event_id.desc())
    )
    question = (
        event.actor == UP.name
        for event in session.scalars(query)
        if event.kind == events.VM_ADDED or "workdir" in (event.after or {})
    )
    return next(question, False)


# --- the process ----------------------------------------------------------------------------------


class Hosts:
    """Connections to machines, opened when first used and kept until the machine's address changes."""

    def __init__(self) -> None:
        self._connections: dict[str, tuple[Machine, Host]] = {}
        self._replaced: list[Host] = []

    def __call__(self, machine: Machine) -> Host:
        connection = self._connections.get(machine.vm_id)
        if connection is not None and same_route(connection[0], machine):
            return connection[1]
        if connection is not None:
            self._replaced.append(connection[1])
        host = host_of(machine)
        self._connections[machine.vm_id] = machine, host
        return host

    def note_restart(self, vm_id: str) -> None:
        """Mark connections kept open to this machine as possibly dead."""
        connection = self._connections.get(vm_id)
        if connection is not None and isinstance(connection[1], SshHost):
            connection[1].note_restart()

    async def keep_only(self, vm_ids: Collection[str]) -> None:
        """Close connections to all machines but these, and those that were replaced."""
        removed_hosts = [
            self._connections.pop(vm_id)[1] for vm_id in self._connections.keys() - set(vm_ids)
        ]
        hosts_to_close, self._replaced = [*self._replaced, *removed_hosts], []
        await asyncio.gather(*(host.close() for host in hosts_to_close), return_exceptions=True)

    async def close(self) -> None:
        """Close all connections."""
        await self.keep_only(())


@dataclass(slots=True)
class _Role:
    """A role that runs in this process."""

    name: str
    owner: str = field(default_factory=new_owner)
    crashes: int = 0
    last_error: str | None = None
    dispatcher: GlobalJobDispatcher | None = None
    """Set while this role is a dispatcher."""
    link: NatsLink | None = None
    """The link on which a tracker announces ends of jobs."""


class _ControlPlane:
    """One process with one or more roles."""

    def __init__(
        self, place: FleetPlace, database: Database, roles: Sequence[str], say: Say
    ) -> None:
        self._place = place
        self._settings = place.settings
        self._database = database
        self._roles = [_Role(name) for name in roles]
        self._say = say
        self._stopping = asyncio.Event()
        self._stop_requested_at: float | None = None
        self._started_at = time.monotonic()
        self._hosts = Hosts()
        self._identity = processes.identity(os.getpid())
        self._release = packing.version()
        # the address without secrets, since every user of the database may read it
        nats = None if place.nats_url is None else access_from(place.nats_url, os.environ)
        self._nats = nats and {"url": nats.shown, "whole": nats.is_shown_whole}
        uses_folder = any(self._uses_folder(role) for role in self._roles)
        self._folder = processes.folder_identity(place.folder) if uses_folder else None
        self._notifier = notifier_of(place.folder, database, place.nats_url, os.environ)
        self._players: Mapping[str, Callable[[_Role], Awaitable[None]]] = {
            "dispatcher": self._play_dispatcher,
            "poller": self._play_poller,
            "requeue": self._play_requeue,
            "tracker": self._play_tracker,
            API: self._play_api,
        }

    async def run(self, address: Address | None) -> int:
        """Run until a signal comes."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_stop_signal, number)
        self._notifier.open()
        try:
            async with self._serve_api(address) as url, asyncio.TaskGroup() as group:
                role_tasks = [group.create_task(self._run_role(role)) for role in self._roles]
                other_tasks = [group.create_task(self._heartbeats())]
                if len(self._roles) == len(ROLES):
                    listener = EventListener(self._place, self._database, self._say, url)
                    other_tasks.append(group.create_task(listener.run()))
                elif url is not None:
                    self._say(f"The API answers at {url}.")
                await self._stopping.wait()
                await asyncio.wait(role_tasks)
                for task in other_tasks:
                    task.cancel()
        finally:
            await self._notifier.close()
            await self._hosts.close()
        await self._sign_off()
        return 0

    @contextlib.asynccontextmanager
    async def _serve_api(self, address: Address | None) -> AsyncGenerator[str | None]:
        """Answer the commands of this machine, and serve the API if there is an address; yields its URL, or None."""
        if not _serves_commands([role.name for role in self._roles]):
            yield None
            return
        from groupwise.jobs.fleet.api.serve import serving, serving_commands

        async with serving_commands(self._place, self._database, self._notifier):
            if address is None:
                yield None
                return
            async with serving(self._place, self._database, self._notifier, address) as url:
                yield url

    async def _play_api(self, _: _Role) -> None:
        """Wait for the stop: the API runs in this process regardless of the roles (`_serve_api`)."""
        await self._stopping.wait()

    def _on_stop_signal(self, number: int) -> None:
        now = time.monotonic()
        if self._stop_requested_at is None:
            self._stop_requested_at = now
        elif now - self._stop_requested_at > SAME_SIGNAL_SECONDS:
            # The operator does not want to wait.
            os._exit(128 + number)
        self._stopping.set()

    # --- roles ------------------------------------------------------------------------------------

    async def _run_role(self, role: _Role) -> None:
        """Run a role until the stop, and restart it after a pause whenever it crashes."""
        backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE, low=1.0)
        loop = asyncio.get_running_loop()
        while not self._stopping.is_set():
            started_at = loop.time()
            try:
                await self._players[role.name](role)
            except RunError as error:
                self._note_crash(role, str(error))
            except Exception as error:  # a bug in one role must not end the others
                log.exception("the %s crashed", role.name)
                self._note_crash(role, f"{type(error).__name__}: {error}")
            if loop.time() - started_at > 2 * LONGEST_PAUSE:
                backoff.reset()
            if not self._stopping.is_set():
                await wait_at_most(backoff.next(), self._stopping)

    def _note_crash(self, role: _Role, reason: str) -> None:
        role.crashes += 1
        role.last_error = reason
        log.error("the %s ended: %s; it is restarted", role.name, reason)

    async def _until_stopped(self, work: Awaitable[None]) -> None:
        """Run an endless loop until the stop."""
        task = asyncio.ensure_future(work)
        stop_task = asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait((task, stop_task), return_when=asyncio.FIRST_COMPLETED)
        for either in (task, stop_task):
            either.cancel()
        await asyncio.gather(stop_task, return_exceptions=True)
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def _play_poller(self, role: _Role) -> None:
        settings = self._settings
        at_once = settings.concurrency
        unsure = min(Pace().unsure_at_once, at_once)
        pace = Pace(interval=settings.poll_seconds, at_once=at_once, unsure_at_once=unsure)
        poller = Poller(self._database, pace=pace, trust_on_first_use=settings.trust_on_first_use)
        await self._until_stopped(poller.run())

    async def _play_dispatcher(self, role: _Role) -> None:
        settings = self._settings
        intervals = Intervals(
            lease=settings.lease_seconds,
            renew=settings.lease_seconds / 3,
            adopt=min(settings.lease_seconds / 3, settings.sweep_seconds),
            sweep=settings.sweep_seconds,
            reconcile=settings.requeue_seconds,
        )
        gateway = Gateway(self._database)
        if settings.database is None:
            # the folder's lock shows that the previous dispatcher is gone, so its leases need not run out
            await self._database.in_thread(records.end_leases)
        started_at: float | None = None
        if len(self._roles) == len(ROLES):  # its own poller is about to observe all machines
            now = await self._database.read_in_thread(database_time)
            started_at = now - (time.monotonic() - self._started_at)
        dispatcher = GlobalJobDispatcher(
            self._dispatcher_dependencies(gateway),
            Tuning(
                intervals=intervals,
                concurrency=settings.concurrency,
                retention=Retention(
                    3600 * settings.keep_completed_hours, 3600 * settings.keep_failed_hours
                ),
                began=started_at,
            ),
            owner=role.owner,
            gateway=gateway,
        )
        role.dispatcher = dispatcher
        dispatch_task = asyncio.ensure_future(dispatcher.run())
        stop_task = asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait((dispatch_task, stop_task), return_when=asyncio.FIRST_COMPLETED)
        stop_task.cancel()
        dispatcher.stop()
        await dispatch_task

    def _dispatcher_dependencies(self, gateway: Gateway) -> DispatcherDependencies:
        place = self._place
        store = BlobStore(place.blobs)
        return DispatcherDependencies(
            database=self._database,
            host=self._hosts,
            note_restart=self._hosts.note_restart,
            keep_only=self._hosts.keep_only,
            listener=self._notifier,
            logs=LogMirror(place.logs, gateway),
            checkpoints=CheckpointMirror(store, gateway, keep=self._settings.keep_checkpoints),
            collector=Collector(place.artefacts, store, gateway),
            store=store,
            secrets=place.secrets,
            folders=(place.logs, place.artefacts),
        )

    async def _play_requeue(self, role: _Role) -> None:
        manager = RequeueManager(
            self._database,
            interval=self._settings.requeue_seconds,
            secrets=self._place.secrets,
        )
        await self._until_stopped(manager.run())

    async def _play_tracker(self, role: _Role) -> None:
        webhooks = WebhookOutlet(self._database, allow_private=self._settings.webhooks_to_private)
        outlets: list[Outlet] = [webhooks]
        link = None
        if (url := self._place.nats_url) is not None:
            # a configured address that fails is an error; the default one need not answer
            absent_level = logging.WARNING if self._settings.nats_url else logging.INFO
            role.link = link = NatsLink(access_from(url, os.environ), absent=absent_level)
            link.open()
            outlets.append(NatsOutlet(link))
        try:
            async with asyncio.TaskGroup() as group:
                for outlet in outlets:
                    group.create_task(self._until_stopped(Tracker(self._database, outlet).run()))
                if (log_target := self._settings.ship_logs) is not None:
                    shipper = Shipper(self._database, self._place.logs, sink_of(log_target))
                    group.create_task(self._until_stopped(shipper.run()))
        finally:
            await webhooks.close()
            if link is not None:
                await link.close()

    # --- shared by all roles --------------------------------------------------------------------------

    async def _heartbeats(self) -> None:
        while True:
            try:
                await self._database.in_thread(self._write_heartbeat)
            except RunError as error:  # the roles themselves report an unreachable database
                log.debug("no heartbeat: %s", error)
            except Exception:  # a bug here ends no role
                log.exception("no heartbeat")
            await asyncio.sleep(HEARTBEAT_SECONDS)

    def _write_heartbeat(self, session: Session) -> None:
        now = database_time(session)
        for role in self._roles:
            row = session.get(ControlProcess, role.owner)
            if row is None:
                # the folder's lock shows that the process that had the role before is gone
                alone = self._settings.database is None
                processes.delete_ended_processes(session, role.name, alone=alone)
                row = ControlProcess(
                    owner=role.owner,
                    role=role.name,
                    host=socket.gethostname(),
                    pid=os.getpid(),
                    started_at=now,
                )
                session.add(row)
            row.seen_at = now
            row.facts = self._role_facts(role)

    def _uses_folder(self, role: _Role) -> bool:
        ships = role.name == "tracker" and self._settings.ship_logs is not None
        return ships or role.name in FOLDER_ROLES

    def _role_facts(self, role: _Role) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "crashes": role.crashes,
            "last_error": role.last_error,
            processes.PROCESS: self._identity,
            processes.RELEASE: self._release,
        }
        if self._uses_folder(role):
            facts[processes.FOLDER] = self._folder
        # without a configured address there need not be a server
        if role.link is not None and (self._settings.nats_url or role.link.is_there):
            facts[processes.PUBLISHING] = {"trouble": role.link.trouble}
        if role.name in NATS_ROLES:
            facts[processes.NATS] = self._nats
        if role.dispatcher is not None and role.dispatcher.unobserved_machines:
            facts[processes.UNOBSERVED] = role.dispatcher.unobserved_machines
        return facts

    async def _sign_off(self) -> None:
        """Remove the rows of this process, and report how many jobs are still running."""
        owners = [role.owner for role in self._roles]

        def leave(session: Session) -> tuple[list[str], float | None]:
            session.execute(delete(ControlProcess).where(ControlProcess.owner.in_(owners)))
            query = select(Job.job_id).where(Job.status == JobStatus.RUNNING)
            return list(session.scalars(query.order_by(Job.created_at))), shortest_deadman(session)

        try:
            running_jobs, deadman = await self._database.in_thread(leave)
        except GroupwiseError as error:
            log.warning("the end could not be written down: %s", error)
            return
        if len(self._roles) < len(ROLES):
            return
        farewell = "The fleet has ended. Jobs that wait begin when `groupwise fleet up` runs again."
        if running_jobs:
            rest_note = f" and {len(running_jobs) - 3} more" if len(running_jobs) > 3 else ""
            verb = "runs" if len(running_jobs) == 1 else "run"
            farewell = (
                f"The fleet has ended; {', '.join(running_jobs[:3])}{rest_note} {verb} on. "
                "`groupwise fleet up` picks up where it is then."
            )
            if deadman is not None:
                farewell += f" Start it again within {duration(deadman)}: after that, machines with a deadman end their jobs."
        with contextlib.suppress(OSError):  # the output has no reader any more
            self._say(farewell)
