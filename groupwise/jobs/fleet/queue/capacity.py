"""Capacity: the resources of the fleet that are free.

`view` reads machines, GPUs and open reservations into the dataclasses of `placement.py`, together with the capacity withheld for
long-waiting jobs and each project's use of its quota. `pending_reasons.py` derives from it why a job waits. `claim.py` places jobs, and
`requeue_pending.py` checks which pending jobs could start; both need the machines with room alone, so they take `view_of_room`, which
leaves full machines in the database.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, cast

from sqlalchemy import Select, case, func, or_, select
from sqlalchemy.orm import Session

from groupwise.api.schemas.fleet import MAX_SLOTS, UNPREPARED
from groupwise.core.terminal.quantities import counted
from groupwise.jobs.fleet.queue import untracked_processes
from groupwise.jobs.fleet.queue.elastic import elastic_of
from groupwise.jobs.fleet.queue.placement import (
    LONG_WAIT_SECONDS,
    NOTHING_AVOIDED,
    NOTHING_WITHHELD,
    Avoid,
    Blocked,
    Machine,
    MachineGPU,
    Placement,
    WithheldCapacity,
    apply,
    has_room,
    is_oversubscribed,
    place,
    room,
    withhold,
)
from groupwise.jobs.fleet.queue.resource_shapes import QUEUED, RankKey, best_of_shapes
from groupwise.jobs.fleet.queue.resources import Resources
from groupwise.jobs.fleet.states import AttemptState, Contact, Observed
from groupwise.jobs.fleet.store.database import database_time
from groupwise.jobs.fleet.store.tables import GPU, VM, Attempt, Job, Project, Reservation
from groupwise.jobs.hosts.answers import vendor_of

STALE_SECONDS = 120.0
"""A machine that was not observed for this many seconds gets no new job; by default it is polled every 15 seconds."""
STALE_LOOKS = 4
"""Polling intervals without an observation that are the limit for a machine that is polled more rarely."""
LOOK_SECONDS = "look_seconds"
"""Key in the facts of a machine: its polling interval in seconds."""
MAX_LONG_WAITING = 16
"""Long-waiting jobs for which capacity is withheld at once; those for which none could be withheld do not count."""
MAX_ASKED = 256
"""Maximum of long-waiting jobs that are considered for that."""
MAX_NAMED = 1000
"""Maximum of machines that a query names; if more have room, the whole fleet is read, unless `FreeCapacity.changed` is given."""


@dataclass(frozen=True, slots=True)
class Quota:
    """GPUs that a project may hold and holds now. A GPU counts once, even if the project holds several shares of it."""

    most: int
    held: frozenset[int] = frozenset()
    """gpu_id of each GPU that it holds."""
    of_engines: int = 0
    """GPUs requested from engines, in addition."""

    @property
    def used(self) -> int:
        """All GPUs that count for the quota."""
        return len(self.held) + self.of_engines

    def has_room_for(self, resources: Resources) -> bool:
        """True if the quota has room for all GPUs of the job, assuming that the project shares none of them already."""
        gpus = _gpu_total(resources)
        return not gpus or self.used + gpus <= self.most


class MachinesRead(IntEnum):
    """The machines that a view has read so far; each level includes those below it."""

    FREE_GPUS = 1
    """Machines with an engine, or with a GPU that no job holds whole."""
    FREE_SLOTS = 2
    """Those with a free CPU slot as well."""
    ALL = 3


@dataclass(slots=True)
class FreeCapacity:
    """Free capacity at one moment, less the bookings by `take` since. Machines that it lacks are read when a job needs them."""

    now: float
    machines: dict[str, Machine]
    long_waiting: deque[tuple[RankKey, Resources, str]] = field(
        default_factory=deque[tuple[RankKey, Resources, str]]
    )
    """Long-waiting jobs with their projects, by rank, for which nothing was withheld yet: that is computed when a later job is placed."""
    held: list[tuple[RankKey, WithheldCapacity]] = field(
        default_factory=list[tuple[RankKey, WithheldCapacity]]
    )
    """Capacity withheld for the other long-waiting jobs, by rank."""
    quotas: dict[str, Quota] = field(default_factory=dict[str, Quota])
    """Quotas of the projects that have one."""
    roomy: set[str] | None = None
    """Machines that have anything free, fewer with each booking. None: not computed yet."""
    read: MachinesRead = MachinesRead.ALL
    session: Session | None = None
    """Reads the other machines; needed unless `read` is ALL."""
    known: Mapping[str, Machine] | None = None
    """All machines as they were shortly before. Capacity of full ones is withheld by this, so that they are not read under a lock."""
    changed: Collection[str] | None = None
    """For the holder of a lock: if too many machines have room to name all, these and `MAX_NAMED` others are read."""

    def find_placement(
        self,
        resources: Resources,
        project: str,
        key: RankKey,
        avoid: Avoid = NOTHING_AVOIDED,
    ) -> Placement | Blocked:
        """Find room for a job, or return the reasons why there is none."""
        self._read_up_to(MachinesRead.ALL)
        if (quota_reason := self.over_quota(resources, project)) is not None:
            return quota_reason
        open_machines = self._machines_open_to(resources, project, self.machines.values())
        held_before = self.held_before(key)
        placement = place(resources, open_machines, held_for_others=held_before, avoid=avoid)
        if isinstance(placement, Blocked) and self._exceeds_quota(resources, project):
            quota_use, share = self._quota_use(project), resources.share_mb
            return Blocked((f"{quota_use}, and those have no room for a share of {share} MB",))
        return placement

    def room_for(
        self, resources: Resources, project: str, key: RankKey, avoid: Avoid = NOTHING_AVOIDED
    ) -> Placement | None:
        """The same placement without reasons. Faster: machines with nothing free, which are most of a full fleet, are skipped."""
        if self.over_quota(resources, project):
            return None
        if resources.oversubscribe:
            machines = self._named_machine(resources.vm)
        else:
            if not resources.gpu_count:
                self._read_up_to(MachinesRead.FREE_SLOTS)
            machines = self._machines_with_room()
        open_to_it = self._machines_open_to(resources, project, machines)
        return room(resources, open_to_it, self.held_before(key), avoid)

    def take(self, placement: Placement, resources: Resources, project: str) -> None:
        """Book the placement; the next job then sees only the remaining capacity."""
        apply(placement, resources, self.machines)
        if self.roomy is not None:
            booked = (seat.vm_id for seat in placement.seats)
            self.roomy -= {vm_id for vm_id in booked if not has_room(self.machines[vm_id])}
        if quota := self.quotas.get(project):
            gpu_ids = {gpu.gpu_id for seat in placement.seats for gpu in seat.gpus}
            unnamed_gpus = sum(resources.gpu_count for seat in placement.seats if not seat.gpus)
            self.quotas[project] = replace(
                quota, held=quota.held | gpu_ids, of_engines=quota.of_engines + unnamed_gpus
            )

    def is_full(self, after: RankKey | None = None) -> bool:
        """True if nothing is free, for any job or for jobs after `after`; none of them needs to be tried then."""
        held_before = NOTHING_WITHHELD if after is None else self.held_before(after)
        if any(has_room(machine, held_before) for machine in self._machines_with_room()):
            return False
        if self.session is None or self.read >= MachinesRead.FREE_SLOTS:
            return True
        return self.session.scalar(_FREE_SLOTS.limit(1)) is None

    def _read_up_to(self, wanted: MachinesRead) -> None:
        """Read the machines of this level that were not read yet; those read before keep their bookings."""
        if wanted <= self.read:
            return
        assert self.session is not None
        vm_ids = (
            None
            if wanted == MachinesRead.ALL
            else _at_most_named(self.session, _FREE_SLOTS, self.changed)
        )
        self.machines = machines(self.session, self.now, vm_ids) | self.machines
        self.roomy = None
        self.read = MachinesRead.ALL if vm_ids is None else wanted

    def _named_machine(self, vm_id: str | None) -> list[Machine]:
        """The machine that a job names, if the fleet has it, whether it has room or not; others are not read for it."""
        assert vm_id is not None
        if vm_id not in self.machines and self.read < MachinesRead.ALL:
            assert self.session is not None
            self.machines = self.machines | machines(self.session, self.now, [vm_id])
            self.roomy = None
        return [self.machines[vm_id]] if vm_id in self.machines else []

    def _machines_with_room(self) -> list[Machine]:
        if self.roomy is None:
            self.roomy = {name for name, machine in self.machines.items() if has_room(machine)}
        return [self.machines[name] for name in self.roomy]

    def over_quota(self, resources: Resources, project: str) -> Blocked | None:
        """The reason why the project's quota forbids the job on every machine, if it does. A share may use a GPU that the project
        shares."""
        quota, gpus = self.quotas.get(project), _gpu_total(resources)
        if quota is None or quota.has_room_for(resources):
            return None
        if resources.share_mb is not None and self._gpus_shared_by(project):
            return None
        return Blocked(
            (f"{self._quota_use(project)}, {gpus} wanted",),
            never=gpus > quota.most,
        )

    def _quota_use(self, project: str) -> str:
        quota = self.quotas[project]
        return f"project {project} uses {quota.used} of its {counted(quota.most, 'GPU')}"

    def _exceeds_quota(self, resources: Resources, project: str) -> bool:
        quota = self.quotas.get(project)
        return quota is not None and not quota.has_room_for(resources)

    def _gpus_shared_by(self, project: str) -> frozenset[int]:
        """gpu_id of each GPU that the project holds shares of."""
        held_gpus = self.quotas[project].held
        return frozenset(
            gpu.gpu_id
            for machine in self.machines.values()
            for gpu in machine.gpus
            if gpu.gpu_id in held_gpus and not gpu.whole
        )

    def _machines_open_to(
        self, resources: Resources, project: str, machines: Iterable[Machine]
    ) -> Iterable[Machine]:
        """The machines as the job may use them: those kept for other projects are closed, and a project with an exhausted quota sees only
        GPUs that it shares already."""
        machines = [
            machine
            if machine.projects is None or project in machine.projects
            else replace(machine, closed=True)
            for machine in machines
        ]
        if not self._exceeds_quota(resources, project):
            return machines
        shared_gpus = self._gpus_shared_by(project)
        with_shared_gpus = (
            (machine, tuple(g for g in machine.gpus if g.gpu_id in shared_gpus))
            for machine in machines
        )
        return [replace(machine, gpus=gpus) for machine, gpus in with_shared_gpus if gpus]

    def held_before(self, key: RankKey) -> WithheldCapacity:
        """Capacity withheld for jobs before this one in the queue."""
        while self.long_waiting and self.long_waiting[0][0] < key:
            other_key, resources, project = self.long_waiting.popleft()
            if len(self.held) < MAX_LONG_WAITING and self.over_quota(resources, project) is None:
                self.withhold_for(resources, project, other_key)
        total = NOTHING_WITHHELD
        for other_key, withheld in self.held:
            if other_key < key:
                total = total.union(withheld)
        return total

    def withhold_for(self, resources: Resources, project: str, key: RankKey) -> None:
        """Withhold the capacity that this job will need, except that which is withheld for jobs before it."""
        if all(other_key != key for other_key, _ in self.held):
            held_before = self.held_before(key)
            is_gang = resources.machines > 1  # it may take full machines beside those with room
            if is_gang and self.known is None:
                self._read_up_to(MachinesRead.ALL)
            elif not resources.gpu_count:
                self._read_up_to(MachinesRead.FREE_SLOTS)
            candidates: Mapping[str, Machine] = self.machines
            if is_gang and self.known is not None:
                has_free = _has_free_gpu if resources.gpu_count else _has_free_slot
                full = {name: m for name, m in self.known.items() if not has_free(m)}
                candidates = full | self.machines
            # For a single machine, least is missing on those with room; what is withheld on full ones could not be placed now anyway.
            open_machines = self._machines_open_to(resources, project, candidates.values())
            withheld = withhold(resources, open_machines, job_id=key[1], held=held_before)
            if withheld.gpus or withheld.slots:
                self.held.append((key, withheld))
                self.held.sort(key=lambda entry: entry[0])


def _has_free_gpu(machine: Machine) -> bool:
    return any(gpu.trouble is None and not gpu.whole for gpu in machine.gpus)


def _has_free_slot(machine: Machine) -> bool:
    return any(slot not in machine.taken_slots for slot in range(machine.slots))


def _gpu_total(resources: Resources) -> int:
    return resources.gpu_count * resources.machines


def view(
    session: Session, projects: Collection[str], apart_from: str | None = None
) -> FreeCapacity:
    """Read the free capacity, the withheld capacity, and the quotas of these projects.

    What the job `apart_from` still holds, from an attempt that has ended, counts as free.
    """
    now = database_time(session)
    waiting_jobs = _long_waiting_jobs(session, now)
    counted_projects = {*projects, *(project for _, _, project in waiting_jobs)}
    in_use = _sum_reservations(session, None, apart_from)
    limits = {
        name: Quota(
            max_gpus, frozenset(in_use.of_project.get(name, ())), in_use.of_engines.get(name, 0)
        )
        for name, max_gpus in _read_quotas(session, counted_projects).items()
    }
    return FreeCapacity(
        now, _read_machines(session, now, None, in_use), deque(waiting_jobs), quotas=limits
    )


def machines_for_gangs(session: Session) -> dict[str, Machine] | None:
    """All machines, if a job on several of them has waited long, so that capacity is withheld for it. Call it before a lock is taken:
    in a large fleet this takes a second."""
    now = database_time(session)
    jobs = _long_waiting_jobs(session, now)
    has_gang = any(resources.machines > 1 for _, resources, _ in jobs)
    return machines(session, now) if has_gang else None


def view_of_room(
    session: Session,
    projects: Collection[str],
    known: Mapping[str, Machine] | None = None,
    changed: Collection[str] | None = None,
) -> FreeCapacity:
    """Like `view`, but machines on which nothing is free are read only if a job needs them, so that a full fleet costs little. `known` and
    `changed`: see `FreeCapacity`."""
    now = database_time(session)
    waiting_jobs = _long_waiting_jobs(session, now)
    counted_projects = {*projects, *(project for _, _, project in waiting_jobs)}
    names = _at_most_named(session, _FREE_GPUS, changed)
    return FreeCapacity(
        now,
        machines(session, now, names),
        deque(waiting_jobs),
        quotas=quotas(session, counted_projects),
        read=MachinesRead.ALL if names is None else MachinesRead.FREE_GPUS,
        session=session,
        known=known,
        changed=changed,
    )


def _at_most_named(
    session: Session, query: Select[str], changed: Collection[str] | None
) -> list[str] | None:
    """The machines that the query finds; if they are too many to name, `changed` and as many others as can be named, or None."""
    names = list(session.scalars(query.limit(MAX_NAMED + 1)))
    if len(names) <= MAX_NAMED:
        return names
    return None if changed is None else [*changed, *names[:MAX_NAMED]]


_OPEN = Reservation.released_at.is_(None)
# Sets, computed once: in a join, PostgreSQL reads all open reservations for each GPU while its statistics are old.
_HELD_WHOLE = select(Reservation.gpu_id).where(
    _OPEN, Reservation.share_mb.is_(None), Reservation.gpu_id.is_not(None)
)
_WITH_FREE_GPU = select(GPU.vm_id).where(
    GPU.observed == Observed.OK,
    GPU.quarantine_reason.is_(None),
    GPU.gpu_id.not_in(_HELD_WHOLE),
)
_FREE_GPUS = select(VM.vm_id).where(
    VM.active, or_(VM.engine.is_not(None), VM.vm_id.in_(_WITH_FREE_GPU))
)
_TAKEN_SLOTS = (
    select(Reservation.vm_id, func.count().label("slots"))
    .where(_OPEN, Reservation.slot < MAX_SLOTS)
    .group_by(Reservation.vm_id)
    .subquery()
)
_FREE_SLOTS = (
    select(VM.vm_id)
    .outerjoin(_TAKEN_SLOTS, _TAKEN_SLOTS.c.vm_id == VM.vm_id)
    .where(VM.active, func.coalesce(VM.cpu_slots, 1) > func.coalesce(_TAKEN_SLOTS.c.slots, 0))
)


def machines(
    session: Session, now: float, vm_ids: Collection[str] | None = None
) -> dict[str, Machine]:
    """Read the machines of the fleet, or only `vm_ids`, as placement sees them."""
    return _read_machines(session, now, vm_ids, _sum_reservations(session, vm_ids))


def _read_machines(
    session: Session, now: float, vm_ids: Collection[str] | None, in_use: _Usage
) -> dict[str, Machine]:
    is_selected = VM.active if vm_ids is None else VM.active & VM.vm_id.in_(vm_ids)
    rows = session.execute(select(*_VM_COLUMNS).where(is_selected)).all()
    gpus = _read_gpus(session, vm_ids, in_use)
    by_name: dict[str, Machine] = {}
    for row in rows:
        facts: Mapping[str, Any] = row.facts or {}
        strays = untracked_processes.holding(facts)
        engine = elastic_of(row.engine)
        usable_gpus = (
            ()
            if engine
            else tuple(_without_untracked(gpu, strays) for gpu in gpus.get(row.vm_id, ()))
        )
        own_slots = 1 if row.cpu_slots is None else row.cpu_slots
        slots = engine.body.slots if engine else own_slots
        labels: Mapping[str, Any] = row.labels or {}
        unreachable_reason, other_reason = _machine_problems(row, now)
        by_name[row.vm_id] = Machine(
            vm_id=row.vm_id,
            gpus=usable_gpus,
            trouble=unreachable_reason or other_reason or (engine and engine.problem),
            unreachable_reason=unreachable_reason or (engine and engine.problem),
            projects=kept_for(row.projects),
            slots=slots,
            taken_slots=frozenset(
                n for n in strays.slots if n < slots or is_oversubscribed(n)
            ).union(in_use.slots.get(row.vm_id, ())),
            labels={name: str(value) for name, value in labels.items()},
            prepared=row.python != UNPREPARED,
            cpus=_as_integer(facts.get("cpus")),
            ram_mb=_as_integer(facts.get("ram_mb")),
            disk_free_mb=_as_integer(facts.get("disk_free_mb")),
            promised_cpus=in_use.cpus.get(row.vm_id, 0),
            promised_ram_mb=in_use.ram_mb.get(row.vm_id, 0),
            engine=engine,
        )
    return by_name


def _without_untracked(gpu: MachineGPU, strays: untracked_processes.Holding) -> MachineGPU:
    """The GPU without the part that untracked attempts hold."""
    share = strays.shares_mb.get(gpu.uuid, 0)
    if not share and gpu.uuid not in strays.whole:
        return gpu
    is_whole = gpu.whole or gpu.uuid in strays.whole
    return replace(gpu, whole=is_whole, shares_mb=gpu.shares_mb + share)


_VM_COLUMNS = (
    VM.vm_id,
    VM.labels,
    VM.python,
    VM.facts,
    VM.cpu_slots,
    VM.engine,
    VM.projects,
    VM.lost_at,
    VM.contact,
    VM.problem,
    VM.draining,
    VM.drain_reason,
    VM.degraded,
    VM.observed_round,
)


def kept_for(column: Any) -> frozenset[str] | None:
    """The projects whose jobs a machine accepts; None: any. Users may write this column by hand: a value that is not a list allows none."""
    if column is None:
        return None
    projects = cast("list[Any]", column) if isinstance(column, list) else []
    return frozenset(map(str, projects))


def _machine_problems(row: Any, now: float) -> tuple[str | None, str | None]:
    """The reason why nothing can start on a machine, and the reason why only commands of `fleet exec` can; None: there is none."""
    problem = f": {row.problem}" if row.problem else ""
    cause = f": {row.drain_reason}" if row.drain_reason else ""
    age, stale = now - row.observed_round, stale_after(row.facts)
    minutes = "two minutes" if stale == STALE_SECONDS else f"{stale / 60:.0f} minutes"
    unreachable_reasons = (
        (row.lost_at is not None, "given up as lost"),
        (row.contact == Contact.NEW, f"not observed yet{problem or ' (is a poller running?)'}"),
        (
            row.contact == Contact.UNTRUSTED,
            row.problem or f"its host key is not trusted: `groupwise fleet vm trust {row.vm_id}`",
        ),
        (row.contact != Contact.OK, "unreachable"),
        (age > stale, f"not observed for over {minutes} (is a poller running?)"),
    )
    other_reasons = (
        (
            row.draining or row.drain_reason is not None,
            f"draining{cause}; `groupwise fleet vm undrain` ends that",
        ),
        (row.degraded, f"its GPUs cannot be read{problem}"),
    )
    unreachable, other = (
        next((reason for applies, reason in reasons if applies), None)
        for reasons in (unreachable_reasons, other_reasons)
    )
    return unreachable, other


def stale_after(facts: Mapping[str, Any] | None) -> float:
    """Seconds after which an observation of a machine is too old to place jobs on it."""
    looks = (facts or {}).get(LOOK_SECONDS)
    rarely = STALE_LOOKS * looks if isinstance(looks, int | float) else 0.0
    return max(STALE_SECONDS, rarely)


@dataclass(frozen=True, slots=True)
class _Usage:
    """Capacity that open reservations hold: GPUs by gpu_id, slots and promises by vm_id."""

    whole: set[int] = field(default_factory=set[int])
    shares: dict[int, int] = field(default_factory=dict[int, int])
    slots: dict[str, set[int]] = field(default_factory=dict[str, set[int]])
    cpus: dict[str, int] = field(default_factory=dict[str, int])
    ram_mb: dict[str, int] = field(default_factory=dict[str, int])
    """RAM of jobs that requested some, by machine; `cpus` likewise."""
    of_project: dict[str, set[int]] = field(default_factory=dict[str, set[int]])
    """GPUs, whole or shared, that count for a project's quota."""
    of_engines: dict[str, int] = field(default_factory=dict[str, int])
    """GPUs requested from engines, in addition, by project."""


_COUNTS = or_(Attempt.state != AttemptState.ENDED, VM.contact != Contact.UNREACHABLE)
"""The condition for a reservation to count towards a quota. That of an ended attempt on an unreachable machine stays open until the
machine answers, but does not count: its project can use other GPUs meanwhile.
"""
GPUS_OF_ENGINE = case(
    (Reservation.gpu_id.is_(None), func.coalesce(Job.resources["gpus"].as_integer(), 0)), else_=0
)
"""The GPUs requested from an engine, for the reservation of a slot. A job in a CPU slot of a machine has requested none."""


def _sum_reservations(
    session: Session, vm_ids: Collection[str] | None, apart_from: str | None = None
) -> _Usage:
    """Sum up the open reservations of the fleet, or of these machines, without those of the job `apart_from`."""
    # Outer joins keep PostgreSQL from starting with the jobs table, which has many more rows than reservations.
    query = (
        select(
            Reservation.vm_id,
            Reservation.gpu_id,
            Reservation.slot,
            Reservation.share_mb,
            Reservation.epoch,
            _COUNTS.label("counts"),
            Job.project,
            GPUS_OF_ENGINE.label("of_engine"),
            Job.resources["cpus"].as_integer().label("cpus"),
            Job.resources["ram_mb"].as_integer().label("ram_mb"),
        )
        .outerjoin(Attempt, Attempt.epoch == Reservation.epoch)
        .outerjoin(Job, Job.job_id == Attempt.job_id)
        .outerjoin(VM, VM.vm_id == Reservation.vm_id)
        .where(Reservation.released_at.is_(None))
    )
    if vm_ids is not None:
        query = query.where(Reservation.vm_id.in_(vm_ids))
    if apart_from is not None:
        query = query.where(Attempt.job_id.is_distinct_from(apart_from))
    totals, members = _Usage(), set[tuple[str, int]]()
    for row in session.execute(query):
        if row.gpu_id is None:
            totals.slots.setdefault(row.vm_id, set()).add(row.slot)
            if row.counts:
                engine_gpus = totals.of_engines.get(row.project, 0)
                totals.of_engines[row.project] = engine_gpus + row.of_engine
        elif row.share_mb is None:
            totals.whole.add(row.gpu_id)
        else:
            totals.shares[row.gpu_id] = totals.shares.get(row.gpu_id, 0) + row.share_mb
        if row.gpu_id is not None and row.counts:
            totals.of_project.setdefault(row.project, set()).add(row.gpu_id)
        if (row.vm_id, row.epoch) not in members:
            members.add((row.vm_id, row.epoch))
            totals.cpus[row.vm_id] = totals.cpus.get(row.vm_id, 0) + (row.cpus or 0)
            totals.ram_mb[row.vm_id] = totals.ram_mb.get(row.vm_id, 0) + (row.ram_mb or 0)
    return totals


def _read_gpus(
    session: Session, vm_ids: Collection[str] | None, in_use: _Usage
) -> dict[str, list[MachineGPU]]:
    """The GPUs of each machine, by index."""
    query = select(
        GPU.vm_id,
        GPU.gpu_id,
        GPU.index,
        GPU.uuid,
        GPU.model,
        GPU.memory_mb,
        GPU.observed,
        GPU.detail,
        GPU.quarantine_reason,
    ).order_by(GPU.vm_id, GPU.index, GPU.gpu_id)
    if vm_ids is not None:
        query = query.where(GPU.vm_id.in_(vm_ids))
    by_machine: dict[str, list[MachineGPU]] = {}
    for row in session.execute(query):
        vm_id, gpu_id, index, uuid, model, memory_mb, observed, detail, quarantine_reason = row
        by_machine.setdefault(vm_id, []).append(
            MachineGPU(
                gpu_id,
                index,
                uuid,
                model,
                memory_mb,
                trouble=_gpu_problem(observed, detail, quarantine_reason),
                whole=gpu_id in in_use.whole,
                shares_mb=in_use.shares.get(gpu_id, 0),
                vendor=vendor_of(uuid),
            )
        )
    return by_machine


_OBSERVED: Mapping[str, str] = {
    Observed.FOREIGN_BUSY: "is in use by somebody outside of the fleet",
    Observed.MISSING: "is not there any more",
    Observed.DEGRADED: "does not answer as it should",
    Observed.MIG: "is split into MIG devices, which are GPUs of their own, named by their UUIDs",
}


def _gpu_problem(observed: str, detail: str | None, quarantine_reason: str | None) -> str | None:
    """The reason why a GPU is given to no new job; None: there is none."""
    if quarantine_reason is not None:
        return f"is quarantined: {quarantine_reason}"
    if observed == Observed.OK:
        return None
    state = _OBSERVED.get(observed, f"is {observed}")
    return f"{state} ({detail})" if detail else state


def _as_integer(value: Any) -> int | None:
    """A number that a runner reported, as an integer; None for anything else."""
    return int(value) if isinstance(value, int | float) else None


def lock_quotas(session: Session, projects: Collection[str], *, waiting: bool = True) -> set[str]:
    """Lock the quotas of these projects until the transaction ends; returns the projects that have one and are locked.

    `waiting` False: skip those that another transaction has locked. A transaction that already holds quota locks must not wait for more,
    or two could wait for each other.
    """
    if not projects:
        return set()
    query = select(Project.name).where(Project.name.in_(projects), Project.max_gpus.is_not(None))
    locked_query = query.order_by(Project.name).with_for_update(
        key_share=True, skip_locked=not waiting
    )
    return set(session.scalars(locked_query))


def quotas(session: Session, projects: Collection[str]) -> dict[str, Quota]:
    """The quotas of those of these projects that have one."""
    limits = _read_quotas(session, projects)
    if not limits:
        return {}
    reserved = (
        select(Job.project, Reservation.gpu_id, GPUS_OF_ENGINE)
        .select_from(Reservation)
        .join(Attempt, Attempt.epoch == Reservation.epoch)
        .join(Job, Job.job_id == Attempt.job_id)
        .join(VM, VM.vm_id == Reservation.vm_id)
        .where(Reservation.released_at.is_(None), Job.project.in_(limits), _COUNTS)
    )
    held_gpus: dict[str, set[int]] = {}
    engine_gpus: dict[str, int] = {}
    for project, gpu_id, count in session.execute(reserved):
        if gpu_id is not None:
            held_gpus.setdefault(project, set()).add(gpu_id)
        engine_gpus[project] = engine_gpus.get(project, 0) + count
    return {
        name: Quota(max_gpus, frozenset(held_gpus.get(name, ())), engine_gpus.get(name, 0))
        for name, max_gpus in limits.items()
    }


def _read_quotas(session: Session, projects: Collection[str]) -> dict[str, int]:
    """The maximum of GPUs for each of these projects that has a limit."""
    query = select(Project.name, Project.max_gpus).where(Project.name.in_(projects))
    rows = session.execute(query).all() if projects else ()
    return {name: most for name, most in rows if most is not None}


def _long_waiting_jobs(session: Session, now: float) -> list[tuple[RankKey, Resources, str]]:
    """Long-waiting jobs to withhold capacity for: the best of each pending shape, and those that were woken but not placed yet.

    Queued jobs that need only one GPU or slot are left out: they simply get the next one that becomes free.
    """
    waiting_before = now - LONG_WAIT_SECONDS
    by_job: dict[str, tuple[RankKey, Resources, str]] = {}
    for best in best_of_shapes(session):
        is_held_back = best.not_before > now
        if (
            not is_held_back
            and best.waiting_since is not None
            and best.waiting_since <= waiting_before
        ):
            by_job[best.key[1]] = (best.key, best.resources, best.project)
    queued_jobs = (
        select(Job.job_id, Job.rank, Job.resources, Job.project)
        .where(
            QUEUED,
            Job.waiting_since <= waiting_before,
            Job.not_before <= now,
            Job.rank.is_not(None),
        )
        .order_by(Job.waiting_since)
        .limit(MAX_ASKED)
    )
    for job_id, rank, document, project in session.execute(queued_jobs):
        assert rank is not None
        resources = Resources.model_validate(document or {})
        if _gpu_total(resources) > 1 or resources.machines > 1:
            by_job[job_id] = ((rank, job_id), resources, project)
    return sorted(by_job.values(), key=lambda entry: entry[0])[:MAX_ASKED]
