"""What the fleet has free, and who is woken when that changes.

`view` reads machines, GPUs and open reservations into the views of `placement.py`, together with what is withheld for jobs that have
waited for long and how much each project uses of its quota. `claim.py` places jobs on it and marks those that find no room as pending.

A pending job is looked at again only when something has changed for it: whoever closes reservations, takes a machine back or ends a job
calls `wake` in the same transaction. It asks for each shape that waits, not for each job, whether one more would fit now, and puts the
best-ranked jobs back into the queue, as many as there is room for.

Marking and waking must not pass each other: a claim that has seen a GPU taken, and marks a job as pending after the GPU was released and
the waiting jobs were asked, would leave it waiting beside a free GPU. So both take one lock until they commit (`lock_marking` shared,
`wake` alone), and whoever has got it reads anew. On SQLite there is one writer at a time anyway.

A job that was woken may leave the queue without using what woke it (cancelled, held, placed elsewhere). `claim` therefore calls
`wake_unnoticed` whenever it finds the queue empty.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

from sqlalchemy import (
    CTE,
    ColumnElement,
    and_,
    func,
    literal_column,
    or_,
    select,
    tuple_,
    update,
)
from sqlalchemy.orm import InstrumentedAttribute, Session

from groupwise.fleet.queue import unknown
from groupwise.fleet.queue.placement import (
    NOTHING_AVOIDED,
    NOTHING_HELD,
    PATIENCE_SECONDS,
    Avoid,
    Blocked,
    Held,
    Machine,
    MachineGPU,
    Placement,
    apply,
    has_room,
    place,
    room,
    withhold,
)
from groupwise.fleet.queue.request import dependency
from groupwise.fleet.queue.resources import Resources
from groupwise.fleet.states import FINAL, AttemptState, Contact, JobStatus, Observed
from groupwise.fleet.store import events
from groupwise.fleet.store.database import seconds
from groupwise.fleet.store.tables import GPU, VM, Attempt, Job, Project, Reservation
from groupwise.wire.fleet import UNPREPARED

STALE_SECONDS = 120.0
"""A machine that was not observed for longer gets nothing new; it is polled every 15, unless told otherwise."""
STALE_LOOKS = 4
"""Nor one that is looked at more rarely, and was not for so many times as long as between two looks."""
LOOK_SECONDS = "look_seconds"
"""Beside the facts of a machine: how often its poller looks at it."""
MOST_PATIENT = 16
"""Jobs for which something is withheld at once; those for which nothing could be are not counted."""
MOST_ASKED = 256
"""Jobs that have waited for long, of which those are."""
MOST_WOKEN = 64
"""At once; when they are placed, claims that find the queue empty wake the next."""
_READ_AT_ONCE = 16
_LATER = "groupwise_wake_later"
_LOCK = 0x67726F75
"""For advisory locks: the marking and waking of pending jobs."""

QUEUED = Job.status == literal_column("'queued'")
PENDING = Job.status == literal_column("'pending'")
"""Written out, not as parameters: only so do both databases see that their partial indexes serve."""

RankKey = tuple[float, str]
"""Rank and id of a job: its place in the queue."""


# --- the view -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Quota:
    """GPUs of a project. One of which it holds several shares is one."""

    most: int
    held: frozenset[int] = frozenset()
    """gpu_id of each."""

    def has_room_for(self, resources: Resources) -> bool:
        """On whichever GPUs."""
        wanted = _gpus_of(resources)
        return not wanted or len(self.held) + wanted <= self.most


@dataclass(slots=True)
class View:
    """What is free at one moment, less what was placed on it since."""

    now: float
    machines: dict[str, Machine]
    patient: deque[tuple[RankKey, Resources, str]] = field(
        default_factory=deque[tuple[RankKey, Resources, str]]
    )
    """Jobs, of projects, that have waited for long, in their order, and for which it has not been found out yet what to withhold: that is
    done when somebody behind them looks."""
    held: list[tuple[RankKey, Held]] = field(default_factory=list[tuple[RankKey, Held]])
    """What is withheld for others of them, in their order."""
    quotas: dict[str, Quota] = field(default_factory=dict[str, Quota])
    """Of projects that have one."""
    roomy: list[str] | None = None
    """Machines that have anything free; fewer and fewer. None: nobody has looked yet."""

    def look(
        self,
        resources: Resources,
        project: str,
        key: RankKey,
        avoid: Avoid = NOTHING_AVOIDED,
    ) -> Placement | Blocked:
        """Room for a job, or why there is none."""
        if (why := self.over_quota(resources, project)) is not None:
            return why
        open_to_it = self._open_to(resources, project, self.machines.values())
        held = self.held_before(key)
        found = place(resources, open_to_it, held_for_others=held, avoid=avoid)
        if isinstance(found, Blocked) and self._may_take_no_more(resources, project):
            uses, share = _uses(project, self.quotas[project]), resources.share_mb
            return Blocked((f"{uses}, and those have no room for a share of {share} MB",))
        return found

    def room_for(
        self, resources: Resources, project: str, key: RankKey, avoid: Avoid = NOTHING_AVOIDED
    ) -> Placement | None:
        """The same placement without reasons: machines that have nothing free for anybody, most of a full fleet, are passed over."""
        if self.over_quota(resources, project):
            return None
        open_to_it = self._open_to(resources, project, self._with_room())
        return room(resources, open_to_it, self.held_before(key), avoid)

    def take(self, placement: Placement, resources: Resources, project: str) -> None:
        """Book it, so that what is looked at next sees what is left."""
        apply(placement, resources, self.machines)
        if quota := self.quotas.get(project):
            taken = {gpu.gpu_id for seat in placement.seats for gpu in seat.gpus}
            self.quotas[project] = replace(quota, held=quota.held | taken)

    def is_full(self, after: RankKey | None = None) -> bool:
        """Nothing whatever is free, or nothing for who stands behind this job, so that none need be looked at."""
        held = NOTHING_HELD if after is None else self.held_before(after)
        return not any(has_room(machine, held) for machine in self._with_room())

    def _with_room(self) -> list[Machine]:
        names = self.machines if self.roomy is None else self.roomy
        self.roomy = [name for name in names if has_room(self.machines[name])]
        return [self.machines[name] for name in self.roomy]

    def over_quota(self, resources: Resources, project: str) -> Blocked | None:
        """Why the project may not have that much more, wherever it were; a share may be one of a GPU that it has already."""
        quota, wanted = self.quotas.get(project), _gpus_of(resources)
        if quota is None or quota.has_room_for(resources):
            return None
        if resources.share_mb is not None and self._shared_by(project):
            return None
        return Blocked(
            (f"{_uses(project, quota)}, {wanted} wanted",),
            never=wanted > quota.most,
        )

    def _may_take_no_more(self, resources: Resources, project: str) -> bool:
        quota = self.quotas.get(project)
        return quota is not None and not quota.has_room_for(resources)

    def _shared_by(self, project: str) -> frozenset[int]:
        """GPUs of which the project holds shares."""
        held = self.quotas[project].held
        return frozenset(
            gpu.gpu_id
            for machine in self.machines.values()
            for gpu in machine.gpus
            if gpu.gpu_id in held and not gpu.whole
        )

    def _open_to(
        self, resources: Resources, project: str, among: Iterable[Machine]
    ) -> Iterable[Machine]:
        """Where a job may go at all: to no machine that is kept for others, and one whose project may have no more GPUs, to those that it
        has."""
        among = [
            each
            if each.projects is None or project in each.projects
            else replace(each, closed=True)
            for each in among
        ]
        if not self._may_take_no_more(resources, project):
            return among
        own = self._shared_by(project)
        kept = ((each, tuple(g for g in each.gpus if g.gpu_id in own)) for each in among)
        return [replace(each, gpus=gpus) for each, gpus in kept if gpus]

    def held_before(self, key: RankKey) -> Held:
        """What is withheld for others: those that stand before it in the queue."""
        while self.patient and self.patient[0][0] < key:
            other, resources, project = self.patient.popleft()
            if len(self.held) < MOST_PATIENT and self.over_quota(resources, project) is None:
                self.withhold_for(resources, project, other)
        together = NOTHING_HELD
        for other, held in self.held:
            if other < key:
                together = together.and_also(held)
        return together

    def withhold_for(self, resources: Resources, project: str, key: RankKey) -> None:
        """Keep for this job what it will need, unless others before it do."""
        if all(other != key for other, _ in self.held):
            before = self.held_before(key)
            open_to_it = self._open_to(resources, project, self.machines.values())
            kept = withhold(resources, open_to_it, job_id=key[1], held=before)
            if kept.gpus or kept.slots:
                self.held.append((key, kept))
                self.held.sort(key=lambda entry: entry[0])


def _uses(project: str, quota: Quota) -> str:
    return f"project {project} uses {len(quota.held)} of its {quota.most} GPUs"


def _gpus_of(resources: Resources) -> int:
    return resources.gpu_count * resources.machines


def view(session: Session, projects: Collection[str]) -> View:
    """What is free now, what is withheld, and the quotas of these projects."""
    now = seconds(session)
    patient = _patient(session, now)
    counted = {*projects, *(project for _, _, project in patient)}
    taken = _taken(session, None)
    limits = {
        name: Quota(most, frozenset(taken.of_project.get(name, ())))
        for name, most in _limits(session, counted).items()
    }
    return View(now, _machines(session, now, None, taken), deque(patient), quotas=limits)


def machines(
    session: Session, now: float, vm_ids: Collection[str] | None = None
) -> dict[str, Machine]:
    """The machines of the fleet, or these of them, as placement sees them."""
    return _machines(session, now, vm_ids, _taken(session, vm_ids))


def _machines(
    session: Session, now: float, vm_ids: Collection[str] | None, taken: _Taken
) -> dict[str, Machine]:
    of_these = VM.active if vm_ids is None else VM.active & VM.vm_id.in_(vm_ids)
    rows = session.execute(select(*_VM_COLUMNS).where(of_these)).all()
    gpus = _gpus(session, vm_ids, taken)
    found: dict[str, Machine] = {}
    for row in rows:
        facts: Mapping[str, Any] = row.facts or {}
        strays = unknown.holding(facts)
        own = tuple(_beside(gpu, strays) for gpu in gpus.get(row.vm_id, ()))
        slots = row.cpu_slots if row.cpu_slots is not None else int(not own)
        labels: Mapping[str, Any] = row.labels or {}
        found[row.vm_id] = Machine(
            vm_id=row.vm_id,
            gpus=own,
            trouble=_trouble(row, now),
            projects=kept_for(row.projects),
            slots=slots,
            taken_slots=strays.slots.intersection(range(slots)).union(
                taken.slots.get(row.vm_id, ())
            ),
            labels={name: str(value) for name, value in labels.items()},
            prepared=row.python != UNPREPARED,
            cpus=_whole(facts.get("cpus")),
            ram_mb=_whole(facts.get("ram_mb")),
            disk_free_mb=_whole(facts.get("disk_free_mb")),
            promised_cpus=taken.cpus.get(row.vm_id, 0),
            promised_ram_mb=taken.ram_mb.get(row.vm_id, 0),
        )
    return found


def _beside(gpu: MachineGPU, strays: unknown.Holding) -> MachineGPU:
    """What is left of it by attempts that stand in no table."""
    share = strays.shares_mb.get(gpu.uuid, 0)
    if not share and gpu.uuid not in strays.whole:
        return gpu
    whole = gpu.whole or gpu.uuid in strays.whole
    return replace(gpu, whole=whole, shares_mb=gpu.shares_mb + share)


_VM_COLUMNS = (
    VM.vm_id,
    VM.labels,
    VM.python,
    VM.facts,
    VM.cpu_slots,
    VM.projects,
    VM.lost_at,
    VM.contact,
    VM.problem,
    VM.draining,
    VM.cordoned,
    VM.degraded,
    VM.observed_round,
)


def kept_for(column: Any) -> frozenset[str] | None:
    """Whose jobs alone a machine takes; None: any project's. What is no list, in a column that anybody may write, names none."""
    if column is None:
        return None
    named = cast("list[Any]", column) if isinstance(column, list) else []
    return frozenset(map(str, named))


def _trouble(row: Any, now: float) -> str | None:
    """Why nothing new is placed on a machine."""
    problem = f": {row.problem}" if row.problem else ""
    age, stale = now - row.observed_round, stale_after(row.facts)
    reasons = (
        (row.lost_at is not None, "given up as lost"),
        (row.contact == Contact.NEW, "not observed yet (is a poller running?)"),
        (
            row.contact == Contact.UNTRUSTED,
            f"its host key is not trusted: `groupwise fleet vm trust {row.vm_id}`",
        ),
        (row.contact != Contact.OK, f"unreachable{problem}"),
        (row.draining, "draining"),
        (row.cordoned is not None, f"cordoned: {row.cordoned}"),
        (row.degraded, f"its GPUs cannot be read{problem}"),
        (age > stale, f"not observed for over {_minutes(stale)} (is a poller running?)"),
    )
    return next((why for applies, why in reasons if applies), None)


def stale_after(facts: Mapping[str, Any] | None) -> float:
    """Seconds after which what was seen of a machine says nothing any more."""
    looks = (facts or {}).get(LOOK_SECONDS)
    rarely = STALE_LOOKS * looks if isinstance(looks, int | float) else 0.0
    return max(STALE_SECONDS, rarely)


def _minutes(seconds: float) -> str:
    return "two minutes" if seconds == STALE_SECONDS else f"{seconds / 60:.0f} minutes"


@dataclass(frozen=True, slots=True)
class _Taken:
    """What open reservations hold."""

    whole: set[int] = field(default_factory=set[int])
    shares: dict[int, int] = field(default_factory=dict[int, int])
    slots: dict[str, set[int]] = field(default_factory=dict[str, set[int]])
    cpus: dict[str, int] = field(default_factory=dict[str, int])
    ram_mb: dict[str, int] = field(default_factory=dict[str, int])
    """By machine, of the jobs that asked for some."""
    of_project: dict[str, set[int]] = field(default_factory=dict[str, set[int]])
    """GPUs, whole or shared, that count for its quota."""


_COUNTS = or_(Attempt.state != AttemptState.ENDED, VM.contact != Contact.UNREACHABLE)
"""For a quota. What is over, on a machine that has fallen silent, stays reserved there until it answers; its project goes on elsewhere."""


def _taken(session: Session, vm_ids: Collection[str] | None) -> _Taken:
    # Outer joins keep PostgreSQL from beginning with all jobs, of which there are many more than reservations.
    query = (
        select(
            Reservation.vm_id,
            Reservation.gpu_id,
            Reservation.slot,
            Reservation.share_mb,
            Reservation.epoch,
            _COUNTS.label("counts"),
            Job.project,
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
    found, members = _Taken(), set[tuple[str, int]]()
    for row in session.execute(query):
        if row.gpu_id is None:
            found.slots.setdefault(row.vm_id, set()).add(row.slot)
        elif row.share_mb is None:
            found.whole.add(row.gpu_id)
        else:
            found.shares[row.gpu_id] = found.shares.get(row.gpu_id, 0) + row.share_mb
        if row.gpu_id is not None and row.counts:
            found.of_project.setdefault(row.project, set()).add(row.gpu_id)
        if (row.vm_id, row.epoch) not in members:
            members.add((row.vm_id, row.epoch))
            found.cpus[row.vm_id] = found.cpus.get(row.vm_id, 0) + (row.cpus or 0)
            found.ram_mb[row.vm_id] = found.ram_mb.get(row.vm_id, 0) + (row.ram_mb or 0)
    return found


def _gpus(
    session: Session, vm_ids: Collection[str] | None, taken: _Taken
) -> dict[str, list[MachineGPU]]:
    query = select(
        GPU.vm_id,
        GPU.gpu_id,
        GPU.index,
        GPU.uuid,
        GPU.model,
        GPU.memory_mb,
        GPU.observed,
        GPU.detail,
        GPU.quarantined,
    ).order_by(GPU.vm_id, GPU.index, GPU.gpu_id)
    if vm_ids is not None:
        query = query.where(GPU.vm_id.in_(vm_ids))
    found: dict[str, list[MachineGPU]] = {}
    for row in session.execute(query):
        vm_id, gpu_id, index, uuid, model, memory_mb, observed, detail, quarantined = row
        found.setdefault(vm_id, []).append(
            MachineGPU(
                gpu_id,
                index,
                uuid,
                model,
                memory_mb,
                trouble=_gpu_trouble(observed, detail, quarantined),
                whole=gpu_id in taken.whole,
                shares_mb=taken.shares.get(gpu_id, 0),
            )
        )
    return found


_OBSERVED: Mapping[str, str] = {
    Observed.FOREIGN_BUSY: "is in use by somebody outside of the fleet",
    Observed.MISSING: "is not there any more",
    Observed.DEGRADED: "does not answer as it should",
    Observed.MIG: "is split by MIG, which is not placed on",
}


def _gpu_trouble(observed: str, detail: str | None, quarantined: str | None) -> str | None:
    if quarantined is not None:
        return f"is quarantined: {quarantined}"
    if observed == Observed.OK:
        return None
    words = _OBSERVED.get(observed, f"is {observed}")
    return f"{words} ({detail})" if detail else words


def _whole(value: Any) -> int | None:
    """What a runner said of itself, if it is a number."""
    return int(value) if isinstance(value, int | float) else None


def lock_quotas(session: Session, projects: Collection[str], *, waiting: bool = True) -> set[str]:
    """Nobody else books on these projects until the end; those without a quota are not locked. The names of those that are.

    Who holds some already does not wait for more, since somebody else may hold those and wait for these: `waiting` False.
    """
    if not projects:
        return set()
    query = select(Project.name).where(Project.name.in_(projects), Project.max_gpus.is_not(None))
    locked = query.order_by(Project.name).with_for_update(key_share=True, skip_locked=not waiting)
    return set(session.scalars(locked))


def quotas(session: Session, projects: Collection[str]) -> dict[str, Quota]:
    """What these projects may have and use, where they have a quota."""
    limits = _limits(session, projects)
    if not limits:
        return {}
    used = (
        select(Job.project, Reservation.gpu_id)
        .select_from(Reservation)
        .join(Attempt, Attempt.epoch == Reservation.epoch)
        .join(Job, Job.job_id == Attempt.job_id)
        .join(VM, VM.vm_id == Reservation.vm_id)
        .where(Reservation.released_at.is_(None), Job.project.in_(limits), _COUNTS)
    )
    held: dict[str, set[int]] = {}
    for project, gpu_id in session.execute(used):
        if gpu_id is not None:
            held.setdefault(project, set()).add(gpu_id)
    return {name: Quota(most, frozenset(held.get(name, ()))) for name, most in limits.items()}


def _limits(session: Session, projects: Collection[str]) -> dict[str, int]:
    """GPUs that these may have at once, where that is limited."""
    query = select(Project.name, Project.max_gpus).where(Project.name.in_(projects))
    rows = session.execute(query).all() if projects else ()
    return {name: most for name, most in rows if most is not None}


def _patient(session: Session, now: float) -> list[tuple[RankKey, Resources, str]]:
    """Jobs that something is withheld for: the best of each pending shape, and those that were woken but not placed yet.

    A job that takes one unit alone needs no help while it stands in the queue: it is simply the next.
    """
    since = now - PATIENCE_SECONDS
    found: dict[str, tuple[RankKey, Resources, str]] = {}
    for best in best_of_shapes(session):
        held_back = best.not_before > now
        if not held_back and best.waiting_since is not None and best.waiting_since <= since:
            found[best.key[1]] = (best.key, best.resources, best.project)
    queued = (
        select(Job.job_id, Job.rank, Job.resources, Job.project)
        .where(QUEUED, Job.waiting_since <= since, Job.not_before <= now, Job.rank.is_not(None))
        .order_by(Job.waiting_since)
        .limit(MOST_ASKED)
    )
    for job_id, rank, document, project in session.execute(queued):
        assert rank is not None
        resources = Resources.model_validate(document or {})
        if _gpus_of(resources) > 1 or resources.machines > 1:
            found[job_id] = ((rank, job_id), resources, project)
    return sorted(found.values(), key=lambda entry: entry[0])[:MOST_ASKED]


# --- shapes that wait -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Waiting:
    """The best-ranked pending job of a shape that waits for room."""

    shape: str
    key: RankKey
    resources: Resources
    project: str
    waiting_since: float | None
    not_before: float


def best_of_shapes(session: Session) -> list[Waiting]:
    """One for each shape, in the order of the queue. It reads as many rows as there are shapes, however many jobs wait."""
    waiting = (PENDING, Job.blocked_on.is_(None))
    shapes = _distinct(Job.shape, *waiting)
    first = (
        select(Job.job_id)
        .where(*waiting, Job.shape == shapes.c.value)
        .order_by(Job.rank, Job.job_id)
        .limit(1)
        .correlate(shapes)
        .scalar_subquery()
    )
    # Found by its index first, whatever the statistics say of how many there are.
    best = select(first.label("job_id")).select_from(shapes).cte("best")
    best = best.prefix_with("MATERIALIZED", dialect="postgresql")
    query = select(
        Job.job_id,
        Job.shape,
        Job.rank,
        Job.resources,
        Job.project,
        Job.waiting_since,
        Job.not_before,
    ).join(best, best.c.job_id == Job.job_id)
    found = [
        Waiting(
            row.shape,
            (row.rank, row.job_id),
            Resources.model_validate(row.resources or {}),
            row.project,
            row.waiting_since,
            row.not_before,
        )
        for row in session.execute(query)
    ]
    return sorted(found, key=lambda each: each.key)


# --- waking ---------------------------------------------------------------------------------------


def lock_marking(session: Session) -> None:
    """Taken by who marks jobs as pending, before it looks for the last time whether there is room; others may do so as well.

    It is the last lock of a transaction: who holds it waits for no row.
    """
    if session.get_bind().dialect.name == "postgresql":
        session.execute(select(func.pg_advisory_xact_lock_shared(_LOCK)))


def _lock_waking(session: Session) -> None:
    if session.get_bind().dialect.name == "postgresql":
        session.execute(select(func.pg_advisory_xact_lock(_LOCK)))


def wake(
    session: Session,
    *,
    vm_ids: Collection[str] | None = None,
    actor: str = "capacity",
) -> int:
    """Put pending jobs back into the queue that can begin now; how many.

    To be called last in the transaction that closes reservations, takes a machine back, adds or changes one, raises a quota, or ends a
    job, since others may wait for it. `vm_ids`: there is more room on these machines and nowhere else. To call it too often is harmless.
    Within `woken_once` it is done at the end of that.
    """
    if (later := session.info.get(_LATER)) is not None:
        later.append((vm_ids, actor))
        return 0
    session.flush()
    _lock_waking(session)
    ended = _ended(session)
    return _wake_dependents(session, ended, actor) + _wake_shapes(session, vm_ids, actor)


@contextmanager
def woken_once(session: Session) -> Generator[None, None, None]:
    """What frees capacity several times in one transaction wakes once, at its end: the lock of waking has to be its last."""
    later: list[tuple[Collection[str] | None, str]] = []
    session.info[_LATER] = later
    try:
        yield
    finally:
        del session.info[_LATER]
    if later:
        places = [vm_ids for vm_ids, _ in later]
        known = [vm_ids for vm_ids in places if vm_ids is not None]
        together = {vm_id for vm_ids in known for vm_id in vm_ids}
        wake(session, vm_ids=together if len(known) == len(places) else None, actor=later[-1][1])


def wake_unnoticed(session: Session, found: View | None) -> int:
    """The same for capacity of which nobody told, by who has a view already or needs none."""
    woken = _wake_dependents(session, _ended(session), "capacity")
    if found is not None and found.is_full():
        return woken
    waiting = best_of_shapes(session)
    if not waiting:
        return woken
    projects = {each.project for each in waiting}
    if found is None:
        found = view(session, projects)
    else:
        found = replace(found, quotas=quotas(session, projects))
    return woken + _wake_in_order(session, found, waiting, "capacity")


def _ended(session: Session) -> list[str]:
    """Jobs that have ended, or are not there any more, and that others still wait for."""
    waited_for = _distinct(Job.blocked_on, PENDING, Job.blocked_on.is_not(None))
    status = select(Job.status).where(Job.job_id == waited_for.c.value).correlate(waited_for)
    query = select(waited_for.c.value, status.scalar_subquery().label("status"))
    return [
        row.value
        for row in session.execute(query)
        if row.value is not None and row.status in (None, *FINAL)
    ]


def _distinct(column: InstrumentedAttribute[str | None], *where: ColumnElement[bool]) -> CTE:
    """The values of an indexed column, as `value`, by as many steps in its index as there are; the last one is NULL."""
    # By ORDER BY and LIMIT, not by min(): for that PostgreSQL reads all that is greater.
    first = select(column.label("value")).where(*where).order_by(column).limit(1)
    values = select(first.subquery().c.value).cte(recursive=True)
    following = select(column).where(*where, column > values.c.value).order_by(column).limit(1)
    return values.union_all(
        select(following.correlate(values).scalar_subquery()).where(values.c.value.is_not(None))
    )


def _wake_dependents(session: Session, ended: Sequence[str], actor: str) -> int:
    if not ended:
        return 0
    query = select(Job.job_id).where(PENDING, Job.blocked_on.in_(ended))
    ids = session.scalars(query.with_for_update(skip_locked=True, key_share=True)).all()
    return _to_queue(session, ids, actor)


def _wake_shapes(session: Session, vm_ids: Collection[str] | None, actor: str) -> int:
    waiting = best_of_shapes(session)
    if not waiting:
        return 0
    now = seconds(session)
    limits = quotas(session, {each.project for each in waiting})
    if vm_ids is not None and not limits and all(_is_local(each, now) for each in waiting):
        found = View(now, machines(session, now, vm_ids))
    else:
        found = view(session, {each.project for each in waiting})
    return _wake_in_order(session, found, waiting, actor)


def _is_local(waiting: Waiting, now: float) -> bool:
    """Whether it is enough to look at the machines where something changed."""
    since = waiting.waiting_since
    return waiting.resources.machines == 1 and (since is None or now - since < PATIENCE_SECONDS)


def _wake_in_order(session: Session, found: View, waiting: Sequence[Waiting], actor: str) -> int:
    """The best-ranked of all shapes together, each placed on what those before it leave; a shape that finds no room is done with."""
    trial = replace(found, machines=dict(found.machines), quotas=dict(found.quotas))
    best = [(each.key, each) for each in waiting]
    behind = {each.shape: _behind(session, each) for each in waiting}
    heapq.heapify(best)
    woken: list[str] = []
    while best and len(woken) < MOST_WOKEN:
        key, each = heapq.heappop(best)
        placement = trial.room_for(each.resources, each.project, key)
        if placement is None:
            continue
        trial.take(placement, each.resources, each.project)
        woken.append(key[1])
        if (following := next(behind[each.shape], None)) is not None:
            heapq.heappush(best, (following, each))
    query = select(Job.job_id).where(PENDING, Job.job_id.in_(woken)).order_by(Job.job_id)
    if woken:
        woken = list(session.scalars(query.with_for_update(skip_locked=True, key_share=True)))
    return _to_queue(session, woken, actor)


def _behind(session: Session, waiting: Waiting) -> Iterator[RankKey]:
    """The pending jobs of the same shape that stand behind it, as far as somebody asks."""
    key = waiting.key
    while True:
        rows = session.execute(
            select(Job.rank, Job.job_id)
            .where(
                PENDING,
                Job.blocked_on.is_(None),
                Job.shape == waiting.shape,
                tuple_(Job.rank, Job.job_id) > key,
            )
            .order_by(Job.rank, Job.job_id)
            .limit(_READ_AT_ONCE)
        ).all()
        for row in rows:
            key = (row.rank, row.job_id)
            yield key
        if len(rows) < _READ_AT_ONCE:
            return


def _to_queue(session: Session, ids: Sequence[str], actor: str) -> int:
    """`blocked_reasons` stay until it runs: they are still the last thing that is known of it."""
    if not ids:
        return 0
    now = seconds(session)
    session.execute(
        update(Job)
        .where(Job.job_id.in_(ids))
        .values(
            status=JobStatus.QUEUED,
            blocked_on=None,
            waiting_since=func.coalesce(Job.waiting_since, now),
        )
        .execution_options(synchronize_session=False)
    )
    tell_of_jobs(session, ids, JobStatus.PENDING, JobStatus.QUEUED, actor)
    return len(ids)


def tell_of_jobs(
    session: Session,
    ids: Iterable[str],
    before: JobStatus,
    after: JobStatus,
    actor: str,
    detail: Mapping[str, Any] | None = None,
) -> None:
    """An event for each of these jobs."""
    common = {
        "actor": actor,
        "kind": f"job.{after}",
        "before": {"status": before},
        "after": {"status": after},
        "detail": detail,
    }
    events.append_many(session, [{**common, "job_id": job_id} for job_id in ids])


# --- what else a job waits for --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Unmet:
    """A job that another one waits for."""

    job_id: str
    reason: str
    hopeless: bool = False
    """What was waited for will not come any more."""


def unmet(session: Session, after: Mapping[str, Sequence[str]]) -> dict[str, Unmet]:
    """Of jobs and what they are to come after (`JOB`, `JOB:ok`): those that cannot begin yet, or never."""
    ids = {dependency(word)[0] for words in after.values() for word in words}
    if not ids:
        return {}
    query = select(Job.job_id, Job.status).where(Job.job_id.in_(ids))
    statuses = dict(session.execute(query).all())
    found: dict[str, Unmet] = {}
    for job_id, words in after.items():
        reasons = [why for word in words if (why := _unmet(word, statuses))]
        if reasons:
            found[job_id] = next((why for why in reasons if why.hopeless), reasons[0])
    return found


def _unmet(word: str, statuses: Mapping[str, str]) -> Unmet | None:
    job_id, must_complete = dependency(word)
    status = statuses.get(job_id)
    if status in (None, *FINAL):
        if not must_complete or status == JobStatus.COMPLETED:
            return None
        became = "is not there any more" if status is None else f"has {status}"
        if status == JobStatus.CANCELLED:
            became = "was cancelled"
        return Unmet(job_id, f"job {job_id}, which it was to come after, {became}", hopeless=True)
    until = "completed" if must_complete else "ended"
    return Unmet(job_id, f"waits until job {job_id} has {until}; that one is {status}")


# --- words for people -----------------------------------------------------------------------------


def outlook(session: Session, job: Job) -> Placement | Blocked:
    """Where an admitted job would begin now, were it the next, or why it would not."""
    resources = Resources.model_validate(job.resources or {})
    found = view(session, {job.project})
    return found.look(resources, job.project, (job.rank or 0.0, job.job_id))


def explain(session: Session, job: Job) -> list[str]:
    """Why a job waits, as of now, in words; empty where it does not wait."""
    if job.status == JobStatus.HELD:
        return [f"it is held: `groupwise fleet release {job.job_id}` lets it go on"]
    if job.status not in (JobStatus.QUEUED, JobStatus.PENDING):
        return []
    if job.admitted_at is None:
        return ["it is not admitted yet: a dispatcher does that, once a machine has been observed"]
    reasons: list[str] = []
    if missing := unmet(session, {job.job_id: job.request.get("after", [])}):
        reasons += [each.reason for each in missing.values()]
    held_back = unknown.held_back_by(session, job.job_id)
    reasons += held_back
    pause = job.not_before - seconds(session)
    if pause > 0 and not held_back:
        reasons.append(f"it is tried again in {pause:.0f} s")
    found = outlook(session, job)
    if isinstance(found, Blocked):
        return [*reasons, *found.reasons]
    return reasons or [_place_in_queue(session, job)]


def _place_in_queue(session: Session, job: Job) -> str:
    before = or_(Job.rank < job.rank, and_(Job.rank == job.rank, Job.job_id < job.job_id))
    may_begin = (QUEUED, Job.not_before <= seconds(session))
    ahead = select(Job.job_id).where(*may_begin, before).limit(_MOST_COUNTED).subquery()
    count = session.scalar(select(func.count()).select_from(ahead)) or 0
    if not count:
        return "there is room for it, and it is the next in the queue"
    more = " or more" if count == _MOST_COUNTED else ""
    return f"there is room for it; {count}{more} jobs stand before it in the queue"


_MOST_COUNTED = 1000
