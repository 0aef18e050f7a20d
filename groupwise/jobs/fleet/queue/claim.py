"""Claiming jobs from the queue: one transaction creates attempts and books machines, another marks the jobs that found no room.

A dispatcher calls `claim`. It takes the best-ranked jobs that may start, locked so that no other dispatcher takes them too, reads the
machines with room once (`capacity.view_of_room`) and plans where each would go. Then it locks the machines of that plan, in the order of
their names, reads them again and books the capacity that is still free: attempt, members, reservations and the job's change to running. A
job whose place was taken meanwhile stays queued for the next round. The database itself refuses a second reservation of a GPU, and then
only that job is rolled back.

Jobs that found no room become pending, with all queued ones of the same shape, so that the head of the queue never fills up with jobs that
cannot start. First `explain` reads why they cannot start. The reasons name machines, so it reads all of them, which takes long in a large
fleet; it therefore takes no lock. Then `mark`, a transaction of its own, takes the marking lock and checks again whether there is room, for
which the machines with room are enough. Releases of capacity wait for that lock, so `mark` must be short. A job that was not marked because
its dispatcher died is found again by the next claim. `requeue_pending.py` explains how pending jobs come back and why none is forgotten.

Locks are taken in one order everywhere: jobs, projects, machines, their GPUs, marking; several of one kind by their names or numbers. A
transaction that holds the marking lock waits for no row.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy import (
    Select,
    Table,
    and_,
    bindparam,
    func,
    insert,
    null,
    or_,
    select,
    tuple_,
    update,
)
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from groupwise.core.errors import UsageError
from groupwise.core.loopback import is_loopback
from groupwise.jobs.fleet.queue import capacity, kinds, pending_reasons, requeue_pending
from groupwise.jobs.fleet.queue.capacity import FreeCapacity, Quota
from groupwise.jobs.fleet.queue.placement import (
    LONG_WAIT_SECONDS,
    Avoid,
    Blocked,
    Machine,
    Placement,
    Seat,
)
from groupwise.jobs.fleet.queue.request import Columns
from groupwise.jobs.fleet.queue.resource_shapes import QUEUED, RankKey
from groupwise.jobs.fleet.queue.resources import Resources
from groupwise.jobs.fleet.states import AttemptState, JobStatus, Outcome
from groupwise.jobs.fleet.store import events
from groupwise.jobs.fleet.store.database import database_time
from groupwise.jobs.fleet.store.tables import (
    GPU,
    NEWEST_FIRST,
    VM,
    Attempt,
    Checkpoint,
    Job,
    Member,
    Reservation,
    this_moment,
)
from groupwise.jobs.hosts.failures import FailureClass
from groupwise.jobs.hosts.spec import as_json

log = logging.getLogger(__name__)

MAX_MARKED = 100
"""Maximum jobs that become pending in one transaction; the rest follow in the next."""
MAX_QUEUE_QUERIES = 8
"""Queries of the queue in one transaction, each starting after the last job of the previous one."""
AVOID_MACHINE_AFTER = frozenset(
    {
        FailureClass.LAUNCH_FAILURE,
        FailureClass.GPU_FAULT,
        FailureClass.HOST_LOST,
        FailureClass.REBOOT,
        FailureClass.SUPERVISOR_LOST,
    }
)
"""After these failures the next attempt goes to another machine if there is one."""


@dataclass(frozen=True, slots=True)
class Claimed:
    """A new attempt: reserved, and leased by the dispatcher that claimed it."""

    job_id: str
    epoch: int
    placement: Placement


@dataclass(frozen=True, slots=True)
class ClaimResult:
    """The result of one `claim`."""

    claimed: Sequence[Claimed] = ()
    unplaced: Unplaced | None = None
    """Jobs that `mark` is to make pending, if any."""
    has_more: bool = False
    """Attempts were made, and more jobs may be able to start now."""


@dataclass(frozen=True, slots=True)
class Unplaced:
    """Queued jobs that could not start."""

    dependent: Sequence[_Candidate]
    """Jobs that must run after others which have not ended yet."""
    blocked: Sequence[_Candidate]
    """The first job of each shape that found no room."""
    drained: bool
    """The queue held no other job that may start."""


@dataclass(frozen=True, slots=True)
class Explained:
    """Why jobs cannot start, by job id, and all machines as they were then."""

    reasons: Mapping[str, Blocked] = field(default_factory=dict[str, Blocked])
    machines: Mapping[str, Machine] | None = None


def claim(session: Session, *, owner: str, lease_seconds: float, limit: int) -> ClaimResult:
    """Make attempts for up to `limit` queued jobs, leased to `owner`."""
    now = database_time(session)
    jobs = _candidates(session, now, limit)
    if not jobs:
        requeue_pending.requeue_unnoticed(session, None)
        return ClaimResult()
    plan = _Plan()
    projects = {job.project for job in jobs}
    # The bookings below count against them.
    locked_projects = capacity.lock_quotas(session, projects)
    view = capacity.view_of_room(session, projects)
    plan.projects.update(projects)
    plan.quotas.update({name: view.quotas[name] for name in locked_projects})
    is_drained = _place_all(session, view, plan, jobs, limit)
    claimed = _book_capacity(session, view, plan, Lease(owner, lease_seconds))
    has_more = len(claimed) < len(plan.placed) or not (is_drained or plan.full)
    if plan.dependent or plan.blocked:
        blocked_jobs = sorted(plan.blocked.values(), key=lambda blocked_job: blocked_job.key)
        unplaced = Unplaced(plan.dependent, blocked_jobs, is_drained)
        return ClaimResult(claimed, unplaced, has_more=bool(claimed) and has_more)
    woken_count = requeue_pending.requeue_unnoticed(session, view) if is_drained else 0
    return ClaimResult(claimed, has_more=bool(claimed) and (has_more or bool(woken_count)))


def explain(session: Session, unplaced: Unplaced) -> Explained:
    """Why the blocked jobs cannot start, but for those that can start now; only of as many as one `mark` makes pending. For a transaction
    that only reads."""
    if not unplaced.blocked:
        return Explained()
    view = capacity.view(session, {job.project for job in unplaced.blocked})
    reasons: dict[str, Blocked] = {}
    remaining = MAX_MARKED
    for job in unplaced.blocked:
        placement = view.find_placement(job.resources, job.project, job.key)
        if isinstance(placement, Blocked):
            reasons[job.job_id] = placement
            alike = _queued_of_shape(job, view.now).limit(remaining).subquery()
            remaining -= session.scalar(select(func.count()).select_from(alike)) or 0
            if not remaining:
                break
    return Explained(reasons, view.machines)


def mark(session: Session, unplaced: Unplaced, explained: Explained, owner: str) -> bool:
    """Make jobs pending that still cannot start, for the reasons that `explain` found. Takes the marking lock, which releases of capacity
    take too, so none is missed.

    Returns whether other jobs were woken instead.
    """
    actor = f"dispatcher:{owner}"
    requeue_pending.lock_marking(session)
    with events.batch(session):
        _mark_dependent(session, unplaced.dependent, actor)
        if not unplaced.blocked and not unplaced.drained:
            return False
        projects = {job.project for job in unplaced.blocked}
        view = capacity.view_of_room(session, projects, explained.machines)
        remaining = MAX_MARKED
        unmet = pending_reasons.unmet(session, {job.job_id: job.after for job in unplaced.blocked})
        for job in unplaced.blocked:
            if not remaining:
                break
            if job.job_id in unmet:
                continue  # the job that it follows was retried meanwhile
            blocked = explained.reasons.get(job.job_id)
            if blocked and view.room_for(job.resources, job.project, job.key) is None:
                remaining -= _mark_shape_pending(session, job, blocked, view, actor, remaining)
    return unplaced.drained and bool(requeue_pending.requeue_unnoticed(session, view))


# --- candidates -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Candidate:
    """The fields of a queued job that a claim needs."""

    job_id: str
    project: str
    shape: str
    rank: float
    resources: Resources
    generation: int
    spent: Mapping[str, Any]
    waiting_since: float | None
    after: Sequence[str]
    smaller: bool

    @property
    def key(self) -> tuple[float, str]:
        return (self.rank, self.job_id)


def _candidates(
    session: Session,
    now: float,
    limit: int,
    passed_over: Collection[str] = (),
    after: RankKey | None = None,
) -> list[_Candidate]:
    """The best-ranked jobs that may start and that no other dispatcher is claiming; locked until the transaction ends.

    Leaves out shapes in `passed_over` and jobs up to `after`.
    """
    chosen_jobs = (
        select(Job.job_id)
        .where(
            QUEUED,
            Job.rank.is_not(None),
            Job.not_before <= now,
            Job.cancel_requested_at.is_(None),
            Job.shape.not_in(passed_over),
            *([] if after is None else [tuple_(Job.rank, Job.job_id) > after]),
        )
        .order_by(Job.rank, Job.job_id)
        .limit(limit)
        .with_for_update(skip_locked=True, key_share=True)
        .cte("chosen")
        .prefix_with("MATERIALIZED", dialect="postgresql")
    )
    rows = session.execute(
        select(
            Job.job_id,
            Job.project,
            Job.shape,
            Job.rank,
            Job.resources,
            Job.generation,
            Job.spent,
            Job.waiting_since,
            Job.request["after"].label("follows"),
            Job.request["allow_smaller_batch"].label("smaller"),
        )
        .join(chosen_jobs, chosen_jobs.c.job_id == Job.job_id)
        .order_by(Job.rank, Job.job_id)
    ).all()
    return [
        _Candidate(
            row.job_id,
            row.project,
            row.shape,
            row.rank,
            Resources.model_validate(row.resources or {}),
            row.generation,
            row.spent or {},
            row.waiting_since,
            row.follows or (),
            bool(row.smaller),
        )
        for row in rows
    ]


@dataclass(slots=True)
class _EarlierAttempts:
    """Earlier attempts of a job in its present generation."""

    number: int = 0
    """The number of the next attempt."""
    previous_failure: str | None = None
    machines: set[str] = field(default_factory=set[str])
    """Machines on which it failed through no fault of its own."""
    gpus: set[int] = field(default_factory=set[int])
    """gpu_id of GPUs that it reported as broken, or was given but could not use."""
    slots: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])
    """CPU slots (vm_id, slot) that it was given but could not use."""

    @property
    def avoid(self) -> Avoid:
        """Machines and GPUs that the next attempt gets only if nothing else is free."""
        return Avoid(frozenset(self.machines), frozenset(self.gpus), frozenset(self.slots))


def _earlier_attempts(session: Session, jobs: Sequence[_Candidate]) -> dict[str, _EarlierAttempts]:
    """The earlier attempts of these jobs; without an entry there are none."""
    generations = {job.job_id: job.generation for job in jobs}
    rows = session.execute(
        select(
            Attempt.job_id,
            Attempt.generation,
            Attempt.number,
            Attempt.outcome,
            Attempt.failure_class,
            Attempt.epoch,
            Member.vm_id,
        )
        .join(Member, Member.epoch == Attempt.epoch)
        .where(Attempt.job_id.in_(generations))
        .order_by(Attempt.epoch, Member.rank)
    ).all()
    by_job: dict[str, _EarlierAttempts] = {}
    blamed_attempts: dict[int, _EarlierAttempts] = {}
    for row in rows:
        if row.generation != generations[row.job_id]:
            continue
        earlier = by_job.setdefault(row.job_id, _EarlierAttempts())
        # A void attempt never ran, so its number is used again.
        earlier.number = row.number + (row.outcome != Outcome.VOID)
        earlier.previous_failure = row.failure_class or earlier.previous_failure
        if row.failure_class in AVOID_MACHINE_AFTER:
            earlier.machines.add(row.vm_id)
        if row.failure_class in (FailureClass.GPU_FAULT, FailureClass.LAUNCH_FAILURE):
            blamed_attempts[row.epoch] = earlier
    if blamed_attempts:
        _note_blamed_gpus(session, blamed_attempts)
    return by_job


def _note_blamed_gpus(session: Session, blamed: Mapping[int, _EarlierAttempts]) -> None:
    """Note GPUs and slots that may have made attempts fail, by epoch: the GPUs that the failure's reason names, else all GPUs and slots of
    the attempt."""
    reservations = session.execute(
        select(
            Reservation.epoch,
            Reservation.vm_id,
            Reservation.gpu_id,
            Reservation.slot,
            GPU.uuid,
            Attempt.evidence["because"].as_string().label("because"),
        )
        .join(Attempt, Attempt.epoch == Reservation.epoch)
        .outerjoin(GPU, GPU.gpu_id == Reservation.gpu_id)
        .where(Reservation.epoch.in_(blamed))
    ).all()
    named_gpus = {
        (row.epoch, row.gpu_id)
        for row in reservations
        if row.uuid and row.uuid in (row.because or "")
    }
    naming_epochs = {epoch for epoch, _ in named_gpus}
    for row in reservations:
        earlier = blamed[row.epoch]
        if row.gpu_id is None:
            earlier.slots.add((row.vm_id, row.slot))
        elif row.epoch not in naming_epochs or (row.epoch, row.gpu_id) in named_gpus:
            earlier.gpus.add(row.gpu_id)


# --- planning -------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Plan:
    """A plan of where candidates would go, made without locks on machines."""

    earlier_attempts: dict[str, _EarlierAttempts] = field(
        default_factory=dict[str, _EarlierAttempts]
    )
    placed: list[tuple[_Candidate, Placement]] = field(
        default_factory=list[tuple[_Candidate, Placement]]
    )
    dependent: list[_Candidate] = field(default_factory=list[_Candidate])
    blocked: dict[str, _Candidate] = field(default_factory=dict[str, _Candidate])
    """The first candidate without room, by shape."""
    projects: set[str] = field(default_factory=set[str])
    """Projects of all candidates so far."""
    quotas: dict[str, Quota] = field(default_factory=dict[str, Quota])
    """Quotas that this transaction has locked, as they were before anything was planned."""
    full: bool = False
    """The fleet has nothing left for jobs after the candidates."""
    busy: set[str] = field(default_factory=set[str])
    """Projects whose quota another transaction has locked."""

    def earlier(self, job: _Candidate) -> _EarlierAttempts:
        """Earlier attempts of the job."""
        return self.earlier_attempts.get(job.job_id) or _EarlierAttempts()


def _place_all(
    session: Session, view: FreeCapacity, plan: _Plan, jobs: Sequence[_Candidate], limit: int
) -> bool:
    """Plan these candidates, then the jobs after them until `limit` are placed. Returns whether the end of the queue was reached.

    Jobs at the head of the queue that cannot start therefore do not hide those after them.
    """
    remaining = limit
    for _ in range(MAX_QUEUE_QUERIES):
        plan.earlier_attempts.update(_earlier_attempts(session, jobs))
        unmet = pending_reasons.unmet(session, {job.job_id: job.after for job in jobs})
        plan.dependent.extend(job for job in jobs if job.job_id in unmet)
        startable = [job for job in jobs if job.job_id not in unmet]
        _place_jobs(view, plan, [job for job in startable if job.project not in plan.busy])
        if len(jobs) < remaining:
            return True
        remaining = limit - len(plan.placed)
        plan.full = view.is_full(jobs[-1].key)
        if not remaining or plan.full:
            return False
        jobs = _candidates(session, view.now, remaining, plan.blocked, jobs[-1].key)
        _lock_more_quotas(session, view, plan, {job.project for job in jobs})
    return False


def _lock_more_quotas(
    session: Session, view: FreeCapacity, plan: _Plan, projects: Collection[str]
) -> None:
    """Lock the quotas of further projects. If another transaction has locked one, its jobs are left for the next round."""
    new_projects = set(projects) - plan.projects
    locked_projects = capacity.lock_quotas(session, new_projects, waiting=False)
    limits = capacity.quotas(session, new_projects)
    quotas = {name: quota for name, quota in limits.items() if name in locked_projects}
    view.quotas.update(quotas)
    plan.projects.update(new_projects)
    plan.quotas.update(quotas)
    plan.busy.update(set(limits) - locked_projects)


def _place_jobs(view: FreeCapacity, plan: _Plan, jobs: Sequence[_Candidate]) -> None:
    """Place each job in the view, or note its shape as blocked; for one that has waited long, withhold the capacity that it needs."""
    for job in jobs:
        if job.shape in plan.blocked:
            continue
        avoid = plan.earlier(job).avoid
        placement = view.room_for(job.resources, job.project, job.key, avoid)
        if placement is not None:
            view.take(placement, job.resources, job.project)
            plan.placed.append((job, placement))
            continue
        plan.blocked[job.shape] = job
        waits_long = (
            job.waiting_since is not None and view.now - job.waiting_since >= LONG_WAIT_SECONDS
        )
        if waits_long and not view.over_quota(job.resources, job.project):
            view.withhold_for(job.resources, job.project, job.key)


# --- booking --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lease:
    """The dispatcher that owns an attempt, and the seconds until its ownership ends unless it renews the lease."""

    owner: str
    seconds: float


def _book_capacity(
    session: Session, view: FreeCapacity, plan: _Plan, lease: Lease
) -> list[Claimed]:
    """Lock the planned machines, read them again, and book the capacity that is still free there."""
    if not plan.placed:
        return []
    names = sorted({seat.vm_id for _, placement in plan.placed for seat in placement.seats})
    rows = session.execute(
        select(VM.vm_id, VM.ip_address)
        .where(VM.vm_id.in_(names))
        .order_by(VM.vm_id)
        .with_for_update(key_share=True)
    )
    addresses = {row.vm_id: row.ip_address for row in rows}
    fresh_view = FreeCapacity(
        view.now, capacity.machines(session, view.now, names), held=view.held, quotas=plan.quotas
    )
    # Read after the locks: no attempt starts before a job that it follows has ended.
    now = database_time(session)
    resume = _resume_checkpoints(session, [job for job, _ in plan.placed])
    bookings: list[_Booking] = []
    for job, planned_placement in plan.placed:
        earlier = plan.earlier(job)
        placement = fresh_view.find_placement(job.resources, job.project, job.key, earlier.avoid)
        if isinstance(placement, Blocked):
            continue  # another dispatcher was faster; the next round reads the whole fleet again
        assert len(placement.seats) == len(planned_placement.seats)
        placement = _choose_leader(placement, addresses)
        fresh_view.take(placement, job.resources, job.project)
        bookings.append(_Booking(job, placement, earlier, resume.get(job.job_id)))
    claimed = _make_or_split(session, bookings, lease, now)
    actor = f"dispatcher:{lease.owner}"
    events.append_many(
        session, [event for attempt in claimed for event in _claim_events(attempt, actor)]
    )
    return claimed


def _choose_leader(placement: Placement, addresses: Mapping[str, str]) -> Placement:
    """Sort machines with a loopback address last: rank 0 must be reachable, as all other ranks connect to it."""
    seats = sorted(placement.seats, key=lambda seat: is_loopback(addresses[seat.vm_id]))
    return replace(placement, seats=tuple(seats))


@dataclass(frozen=True, slots=True)
class _Booking:
    """A job that is about to become an attempt."""

    job: _Candidate
    placement: Placement
    earlier: _EarlierAttempts
    resume: dict[str, Any] | None


def _make_or_split(
    session: Session, bookings: Sequence[_Booking], lease: Lease, now: float
) -> list[Claimed]:
    """Create all attempts at once; if the database refuses that, one by one, leaving out those that it refuses."""
    if not bookings:
        return []
    try:
        with session.begin_nested():
            return _make_attempts(session, bookings, lease, now)
    except IntegrityError:
        # another process has reserved a GPU or made an attempt without holding the lock
        if len(bookings) == 1:
            return []
    return [
        attempt
        for booking in bookings
        for attempt in _make_or_split(session, [booking], lease, now)
    ]


def _make_attempts(
    session: Session, bookings: Sequence[_Booking], lease: Lease, now: float
) -> list[Claimed]:
    """Insert attempts, members and reservations and set the jobs running, with one statement for each table."""
    rows = [
        {
            "job_id": booking.job.job_id,
            "generation": booking.job.generation,
            "number": booking.earlier.number,
            "state": AttemptState.RESERVED,
            "owner": lease.owner,
            "lease_until": now + lease.seconds,
            "previous_failure": booking.earlier.previous_failure,
            "created_at": now,
            "resume_from": booking.resume,
            "spec": _smaller_spec(session, booking.job),
        }
        for booking in bookings
    ]
    insert_attempts = insert(Attempt).returning(Attempt.epoch, sort_by_parameter_order=True)
    epochs = session.scalars(insert_attempts, rows).all()
    numbered = list(zip(epochs, bookings, strict=True))
    seats = [
        (epoch, rank, seat, booking.job)
        for epoch, booking in numbered
        for rank, seat in enumerate(booking.placement.seats)
    ]
    session.execute(
        insert(Member),
        [{"epoch": epoch, "rank": rank, "vm_id": seat.vm_id} for epoch, rank, seat, _ in seats],
    )
    session.execute(
        insert(Reservation),
        [
            row
            for epoch, rank, seat, job in seats
            for row in _reservation_rows(job, epoch, rank, seat, now)
        ],
    )
    first_seats = [(booking.job.job_id, booking.placement.seats[0]) for booking in bookings]
    session.connection().execute(
        _RUNNING,
        [
            {
                "job": job_id,
                "log": f"logs/{job_id}.log",
                "vm": seat.vm_id,
                "gpu": seat.gpus[0].index if seat.gpus else None,
            }
            for job_id, seat in first_seats
        ],
    )
    return [Claimed(booking.job.job_id, epoch, booking.placement) for epoch, booking in numbered]


def _reservation_rows(
    job: _Candidate, epoch: int, rank: int, seat: Seat, now: float
) -> Iterable[dict[str, Any]]:
    """The rows for the slot or the GPUs that one member holds."""
    common = {"vm_id": seat.vm_id, "epoch": epoch, "rank": rank, "reserved_at": now}
    if seat.slot is not None:
        yield {**common, "gpu_id": None, "slot": seat.slot, "share_mb": None}
    for gpu in seat.gpus:
        yield {**common, "gpu_id": gpu.gpu_id, "slot": None, "share_mb": job.resources.share_mb}


_JOBS: Table = Job.__table__  # pyright: ignore[reportAssignmentType] — a mapped class's table is a Table
_RUNNING = (
    update(_JOBS)
    .where(_JOBS.c.job_id == bindparam("job"))
    .values(
        status=JobStatus.RUNNING,
        assigned_vm=bindparam("vm"),
        log_path=bindparam("log"),
        gpu_index=bindparam("gpu"),
        start_time=this_moment(),
        waiting_since=None,
        blocked_reasons=null(),
        blocked_on=None,
    )
)


def _claim_events(claimed: Claimed, actor: str) -> list[dict[str, Any]]:
    """The two events of a new attempt."""
    seats = [
        {"vm": seat.vm_id, "gpus": [gpu.uuid for gpu in seat.gpus], "slot": seat.slot}
        for seat in claimed.placement.seats
    ]
    common = {
        "actor": actor,
        "job_id": claimed.job_id,
        "epoch": claimed.epoch,
        "vm_id": claimed.placement.seats[0].vm_id,
    }
    return [
        {
            **common,
            "kind": events.JOB_RUNNING,
            "before": {"status": JobStatus.QUEUED},
            "after": {"status": JobStatus.RUNNING},
        },
        {
            **common,
            "kind": events.ATTEMPT_RESERVED,
            "after": {"state": AttemptState.RESERVED},
            "detail": {"seats": seats},
        },
    ]


def _resume_checkpoints(session: Session, jobs: Sequence[_Candidate]) -> dict[str, dict[str, Any]]:
    """The newest intact checkpoint of each job, from which it resumes; also one of an earlier generation, before a `retry`."""
    rows = session.scalars(
        select(Checkpoint)
        .where(Checkpoint.job_id.in_([job.job_id for job in jobs]), Checkpoint.damaged_at.is_(None))
        .order_by(*NEWEST_FIRST)
    )
    newest: dict[str, Checkpoint] = {}
    for row in rows:
        newest.setdefault(row.job_id, row)
    return {
        job_id: {
            "step": row.step,
            "path": row.path,
            "epoch": row.epoch,
            "manifest": row.manifest,
        }
        for job_id, row in newest.items()
    }


def _smaller_spec(session: Session, job: _Candidate) -> dict[str, Any] | None:
    """After the GPU ran out of memory: the spec with a smaller batch, if the job allows it and its kind has one."""
    times = job.spent.get(FailureClass.GPU_OOM, 0)
    if not times or not job.smaller:
        return None
    row = session.get_one(Job, job.job_id)
    columns = {name: getattr(row, name) for name in Columns.model_fields}
    try:
        spec = kinds.smaller({**columns, "job_id": row.job_id, "request": row.request}, times)
    except UsageError as error:
        # Its kind was uninstalled or has changed since admission; the frozen command still works.
        log.warning("%s is tried again with the batch that it had: %s", job.job_id, error)
        return None
    return None if spec is None else as_json(spec)


# --- jobs that do not start -----------------------------------------------------------------------


def _mark_dependent(session: Session, jobs: Sequence[_Candidate], actor: str) -> None:
    """Make jobs pending that follow an unfinished job; fail those whose predecessor ended other than they require."""
    unmet = pending_reasons.unmet(session, {job.job_id: job.after for job in jobs})
    still_queued = (
        select(Job.job_id)
        .where(QUEUED, Job.cancel_requested_at.is_(None), Job.job_id.in_(unmet))
        .order_by(Job.job_id)
        .with_for_update(skip_locked=True, key_share=True)
    )
    for job_id in session.scalars(still_queued).all() if unmet else ():
        dependency = unmet[job_id]
        if dependency.unsatisfiable:
            values: dict[str, Any] = {
                "status": JobStatus.FAILED,
                "failure_reason": dependency.reason,
                "end_time": this_moment(),
            }
        else:
            values = {
                "status": JobStatus.PENDING,
                "blocked_reasons": [dependency.reason],
                "blocked_on": dependency.job_id,
            }
        session.execute(
            update(Job)
            .where(Job.job_id == job_id)
            .values(waiting_since=None, **values)
            .execution_options(synchronize_session=False)
        )
        detail = {"reason": dependency.reason}
        status = values["status"]
        events.append_of_jobs(session, [job_id], JobStatus.QUEUED, status, actor, detail)


def _queued_of_shape(job: _Candidate, now: float) -> Select[str]:
    """The job and later ones of the same shape that may start. Not those that wait for a job or a time: they are checked at their turn."""
    dependencies = Job.request["after"].as_string()
    has_dependencies = and_(dependencies.is_not(None), dependencies.not_in(("[]", "null")))
    return select(Job.job_id).where(
        QUEUED,
        Job.shape == job.shape,
        Job.rank >= job.rank,
        Job.cancel_requested_at.is_(None),
        Job.not_before <= now,
        or_(~has_dependencies, Job.job_id == job.job_id),  # the first job has been checked
    )


def _mark_shape_pending(
    session: Session, job: _Candidate, blocked: Blocked, view: FreeCapacity, actor: str, most: int
) -> int:
    """Make the job and later ones of the same shape pending, up to `most` in all; returns how many."""
    query = _queued_of_shape(job, view.now).order_by(Job.rank, Job.job_id).limit(most)
    ids = session.scalars(query.with_for_update(skip_locked=True, key_share=True)).all()
    # A job that waits for its project's quota does not wait for room, so none is withheld for it.
    waits_for_room = view.over_quota(job.resources, job.project) is None
    session.execute(
        update(Job)
        .where(Job.job_id.in_(ids))
        .values(
            status=JobStatus.PENDING,
            blocked_reasons=list(blocked.reasons),
            blocked_on=None,
            waiting_since=func.coalesce(Job.waiting_since, view.now) if waits_for_room else None,
        )
        .execution_options(synchronize_session=False)
    )
    detail = {"reasons": list(blocked.reasons)}
    events.append_of_jobs(session, ids, JobStatus.QUEUED, JobStatus.PENDING, actor, detail)
    return len(ids)
