"""Attempts in the database: their records, and how their owner writes them.

A dispatcher owns an attempt until its lease ends, by the clock of the database. Every write is guarded: the row is looked up by epoch
*and* owner, and locked. If there is no such row, another dispatcher has taken over: `Stale` is raised, and the controller that gets it
drops the attempt and touches nothing. An expired lease alone does not make an owner stale; being replaced does.

All functions here run inside a transaction that the caller opens and commits (`Gateway.commit`). `ending.py` ends an attempt, and its
job with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Table,
    bindparam,
    or_,
    select,
    true,
    update,
)
from sqlalchemy.orm import Session

from groupwise.jobs.fleet.attempts.decide import JobEpochs, ObservedState
from groupwise.jobs.fleet.queue import capacity, requeue_pending
from groupwise.jobs.fleet.queue.elastic import Elastic, elastic_of
from groupwise.jobs.fleet.states import AttemptState, Cleanup, Contact, Observed
from groupwise.jobs.fleet.store import events
from groupwise.jobs.fleet.store.database import clock, database_time
from groupwise.jobs.fleet.store.tables import GPU, VM, Attempt, Event, Job, Member, Reservation
from groupwise.jobs.hosts import answers
from groupwise.jobs.hosts.answers import ExitRecord, MemberState, RunnerState

LEASE = 25.0
"""Seconds without renewal after which another dispatcher takes over; including its next round, a takeover takes under half a minute."""
LONGEST_LEASE = 120.0
"""The longest lease that may be set. One that ends later than twice this from now was written before the database's clock was set back."""
AHEAD = 5.0
"""Seconds that a time may lie in the future and still count as now: two processes may write their times in either order."""
ADOPTED_AT_ONCE = 200
"""Attempts adopted at once. The rest is left to other dispatchers, or to the next round."""
NO_PROBE = ("true",)
"""The probe command of a caller that only needs the attempts: it reads no GPUs."""
WAITS = "waits"
"""Key in a member's handle: the reason why it waits in the queue of its engine."""
GONE_IN_A_ROW = 3
"""Checkpoints in a row that were deleted before they were fetched, until an operator is alerted. A single one is normal, since trainers
delete all but their newest."""


class Stale(Exception):
    """Another dispatcher owns this attempt now: drop everything, touch nothing."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The connection and the settings of a machine, from its row."""

    vm_id: str
    transport: str
    ip_address: str
    port: int
    user: str | None
    ssh_key_path: str | None
    jump: Mapping[str, Any] | None
    host_key: str | None
    workdir: str
    python: str
    deadman: float | None
    probe: tuple[str, ...] | None
    idle_memory_mb: int
    lost: bool
    takes_new: bool
    """False if the machine is draining."""
    engine: Elastic | None = None
    """The engine that starts jobs instead of the machine, if any."""


@dataclass(frozen=True, slots=True)
class MemberRow:
    """One member of an attempt, with the resources that it holds."""

    rank: int
    machine: Machine
    recorded: ObservedState | None
    """The last state that its runner reported; None: none yet."""
    handle: Mapping[str, Any]
    log_offset: int
    released: bool
    gpus: tuple[str, ...]
    """UUIDs of its GPUs."""
    share_mb: int | None
    slot: int | None
    gpu_problems: tuple[str, ...]

    @property
    def exit(self) -> ExitRecord | None:
        """The recorded exit of its command, if any."""
        document = self.handle.get("exit")
        if document is None:
            return None
        state = {"job": "", "epoch": 0, "state": ObservedState.EXITED, "exit": document}
        return answers.parse_member_state(state).exit

    @property
    def silent_since(self) -> float | None:
        """The database time since when its machine is silent; None: it answers."""
        return self.handle.get("silent_since")

    @property
    def elsewhere(self) -> bool:
        """True if the runner that answers has another root folder than the one in which the attempt started."""
        return bool(self.handle.get("elsewhere"))

    @property
    def is_abandoned(self) -> bool:
        """True if its reservations were closed without looking, because its machine was declared lost."""
        return bool(self.handle.get("abandoned"))

    @property
    def waits(self) -> str | None:
        """The reason why it waits in the queue of its engine, as last reported."""
        return self.handle.get(WAITS)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything about an attempt that its owner needs, read at one moment."""

    epoch: int
    job_id: str
    generation: int
    number: int
    state: AttemptState
    cleanup: Cleanup
    cancel_requested: bool
    spec: Mapping[str, Any]
    """A `JobSpec` as JSON."""
    resources: Mapping[str, Any]
    """`Resources` as JSON."""
    secrets: Mapping[str, str]
    """Variable → reference."""
    resume_from: Mapping[str, Any] | None
    previous_failure: str | None
    members: tuple[MemberRow, ...]
    now: float
    """Database time of the reading, in seconds."""

    @property
    def key(self) -> str:
        """`job_id.epoch`, its name on machines."""
        return f"{self.job_id}.{self.epoch}"


# ---------------------------------------------------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------------------------------------------------


def snapshots(session: Session, epochs: Sequence[int], owner: str) -> dict[int, Snapshot]:
    """A snapshot of each attempt in `epochs` that still belongs to `owner`, by epoch. All are read in one transaction."""
    rows = session.execute(_ATTEMPTS, {"epochs": epochs, "owner": owner}).all()
    epochs = [row.epoch for row in rows]
    reservations = _reservations_held(session, epochs)
    members: dict[int, list[MemberRow]] = {}
    for row in session.execute(_MEMBERS, {"epochs": epochs}):
        member_reservations = reservations.get((row.epoch, row.rank), ())
        members.setdefault(row.epoch, []).append(_member_row(row, member_reservations))
    now = database_time(session)
    return {
        row.epoch: Snapshot(
            epoch=row.epoch,
            job_id=row.job_id,
            generation=row.generation,
            number=row.number,
            state=AttemptState(row.state),
            cleanup=Cleanup(row.cleanup),
            cancel_requested=row.cancel_requested_at is not None,
            spec=row.own_spec or row.spec or {},
            resources=row.resources or {},
            secrets=row.secrets or {},
            resume_from=row.resume_from,
            previous_failure=row.previous_failure,
            members=tuple(members.get(row.epoch, ())),
            now=now,
        )
        for row in rows
    }


_GIVEN: BindParameter[Sequence[int]] = bindparam("epochs", expanding=True)
_ATTEMPTS = (
    select(
        Attempt.epoch,
        Attempt.job_id,
        Attempt.generation,
        Attempt.number,
        Attempt.state,
        Attempt.cleanup,
        Attempt.resume_from,
        Attempt.previous_failure,
        Attempt.spec.label("own_spec"),
        Job.spec,
        Job.resources,
        Job.cancel_requested_at,
        Job.request["secrets"].label("secrets"),
    )
    .join(Job, Job.job_id == Attempt.job_id)
    .where(Attempt.epoch.in_(_GIVEN), Attempt.owner == bindparam("owner"))
)
_MEMBERS = (
    select(
        Member.epoch,
        Member.rank,
        Member.state,
        Member.handle,
        Member.log_offset,
        Member.released,
        VM,
    )
    .join(VM, VM.vm_id == Member.vm_id)
    .where(Member.epoch.in_(_GIVEN))
    .order_by(Member.epoch, Member.rank)
)
_HELD = (
    select(
        Reservation.epoch,
        Reservation.rank,
        Reservation.share_mb,
        Reservation.slot,
        GPU.uuid,
        GPU.index,
        GPU.observed,
    )
    .outerjoin(GPU, GPU.gpu_id == Reservation.gpu_id)
    .where(Reservation.epoch.in_(_GIVEN))
    .order_by(Reservation.epoch, Reservation.rank, GPU.index)
)
"""Columns instead of objects, and built once: this query runs for every driven attempt, again and again."""


def _reservations_held(session: Session, epochs: Sequence[int]) -> dict[tuple[int, int], list[Any]]:
    """Reservations by epoch and rank, including released ones, since a repeated launch must be identical to the first."""
    by_member: dict[tuple[int, int], list[Any]] = {}
    for row in session.execute(_HELD, {"epochs": epochs}):
        by_member.setdefault((row.epoch, row.rank), []).append(row)
    return by_member


def _member_row(row: Any, reservations: Sequence[Any]) -> MemberRow:
    gpus = [reservation for reservation in reservations if reservation.uuid is not None]
    first_reservation = reservations[0] if reservations else None
    return MemberRow(
        rank=row.rank,
        machine=machine(row.VM),
        recorded=None if row.state is None else ObservedState(row.state),
        handle=row.handle,
        log_offset=row.log_offset,
        released=row.released,
        gpus=tuple(gpu.uuid for gpu in gpus),
        share_mb=first_reservation.share_mb if first_reservation else None,
        slot=first_reservation.slot if first_reservation else None,
        gpu_problems=tuple(
            f"GPU {gpu.index} ({gpu.uuid}) has vanished"
            for gpu in gpus
            if gpu.observed == Observed.MISSING
        ),
    )


def machine(vm: VM) -> Machine:
    """Convert a row. A machine that fronts an engine probes no GPUs and has no deadman."""
    engine = elastic_of(vm.engine)
    probe = vm.probe if engine is None else NO_PROBE
    return Machine(
        vm_id=vm.vm_id,
        transport=vm.transport,
        ip_address=vm.ip_address,
        port=vm.port,
        user=vm.user,
        ssh_key_path=vm.ssh_key_path,
        jump=vm.jump,
        host_key=vm.host_key,
        workdir=vm.workdir,
        python=vm.python,
        deadman=vm.deadman if engine is None else None,
        probe=None if probe is None else tuple(probe),
        idle_memory_mb=vm.idle_memory_mb,
        lost=vm.lost_at is not None,
        takes_new=vm.active and not vm.draining and vm.drain_reason is None and vm.lost_at is None,
        engine=engine,
    )


def machines(session: Session) -> list[Machine]:
    """All active machines of the fleet."""
    return [machine(vm) for vm in session.scalars(select(VM).where(VM.active).order_by(VM.vm_id))]


def names(session: Session) -> list[str]:
    """All machines that have a row, active or not."""
    return list(session.scalars(select(VM.vm_id)))


def pending_requests(session: Session, owner: str) -> dict[int, tuple[bool, tuple[str, ...]]]:
    """Users' requests about this owner's open attempts, by epoch: whether it is cancelled, and its machines that were declared lost."""
    requests: dict[int, tuple[bool, tuple[str, ...]]] = {
        epoch: (cancelled is not None, ())
        for epoch, cancelled in session.execute(
            select(Attempt.epoch, Job.cancel_requested_at)
            .join(Job, Job.job_id == Attempt.job_id)
            .where(Attempt.owner == owner, _is_open())
        )
    }
    for epoch, vm_id in session.execute(
        select(Member.epoch, Member.vm_id)
        .join(VM, VM.vm_id == Member.vm_id)
        .join(Attempt, Attempt.epoch == Member.epoch)
        .where(Attempt.owner == owner, _is_open(), VM.lost_at.is_not(None))
        .order_by(Member.epoch, Member.rank)
    ):
        cancelled, lost_vm_ids = requests.get(epoch, (False, ()))
        requests[epoch] = cancelled, (*lost_vm_ids, vm_id)
    return requests


def boot_observations(session: Session, owner: str) -> dict[str, tuple[Machine, str | None, bool]]:
    """The machines on which this owner has open attempts, each with the poller's observation: its boot id, and whether it answers."""
    used = (
        select(Member.vm_id)
        .join(Attempt, Attempt.epoch == Member.epoch)
        .where(Attempt.owner == owner, _is_open())
    )
    rows = session.scalars(select(VM).where(VM.vm_id.in_(used)))
    return {vm.vm_id: (machine(vm), vm.boot_id, vm.contact == Contact.OK) for vm in rows}


def known_jobs(session: Session, jobs: Iterable[str]) -> dict[str, JobEpochs]:
    """The jobs that a machine reports, as the database knows them.

    An attempt is live whichever machine reports it: two that share a home folder, and so the runner's root, report each other's.
    """
    known: dict[str, JobEpochs] = {}
    for job_id, epoch, live in session.execute(
        select(Attempt.job_id, Attempt.epoch, Attempt.state != AttemptState.ENDED)
        .where(Attempt.job_id.in_(set(jobs)))
        .order_by(Attempt.epoch)
    ):
        previous = known.get(job_id, JobEpochs(None, 0))
        known[job_id] = JobEpochs(epoch if live else previous.live_epoch, epoch)
    return known


# ---------------------------------------------------------------------------------------------------------------------------------------
# Ownership
# ---------------------------------------------------------------------------------------------------------------------------------------


def renew(session: Session, owner: str, lease: float = LEASE) -> list[int]:
    """Renew the leases of all open attempts of this owner; returns their epochs."""
    return list(
        session.scalars(
            update(Attempt)
            .where(Attempt.owner == owner, _is_open())
            .values(lease_until=clock() + lease)
            .returning(Attempt.epoch)
        )
    )


def adopt(session: Session, owner: str, lease: float = LEASE) -> list[int]:
    """Take over open attempts whose lease has run out; returns their epochs, the oldest first.

    A lease that ends too far in the future was written before the database's clock was set back. A living owner would have renewed it
    since, so it counts as run out.
    """
    now = database_time(session)
    attempts = session.scalars(
        select(Attempt)
        .where(
            _is_open(),
            or_(Attempt.lease_until < now, Attempt.lease_until > now + 2 * LONGEST_LEASE),
        )
        .order_by(Attempt.epoch)
        .limit(ADOPTED_AT_ONCE)
        .with_for_update(skip_locked=True)
    ).all()
    for attempt in attempts:
        previous_owner, attempt.owner = attempt.owner, owner
        attempt.lease_until = now + lease
        append_event(
            session, attempt, owner, "attempt.adopted", {"owner": previous_owner}, {"owner": owner}
        )
    return [attempt.epoch for attempt in attempts]


def end_leases(session: Session, owner: str | None = None) -> None:
    """End the leases of an owner that stops, or all leases if their owners are known to be gone: other dispatchers may then adopt the
    attempts at once. Running jobs continue."""
    owned = true() if owner is None else Attempt.owner == owner
    session.execute(update(Attempt).where(owned, _is_open()).values(lease_until=0.0))


def _is_open() -> ColumnElement[bool]:
    return or_(Attempt.state != AttemptState.ENDED, Attempt.cleanup != Cleanup.CLEAN)


def locked_attempt(session: Session, epoch: int, owner: str) -> Attempt:
    """Lock and return the attempt's row if it is this owner's; else raise Stale."""
    locked: dict[int, Attempt] = session.info.get(_LOCKED, {})
    attempt = locked.get(epoch) or session.scalar(_GUARDED, {"epochs": [epoch]})
    if attempt is None or attempt.owner != owner:
        raise Stale(f"epoch {epoch} is not {owner}'s any more")
    return attempt


_GUARDED = (
    select(Attempt)
    .where(Attempt.epoch.in_(_GIVEN))
    .order_by(Attempt.epoch)
    .with_for_update(key_share=True)
)
_LOCKED, _READ, _BLAMED = "groupwise_attempts", "groupwise_members", "groupwise_blamed"
_JOBS = "groupwise_jobs"


def lock(session: Session, epochs: Iterable[int], ending: Iterable[int] = ()) -> None:
    """Lock, with one query for each table, the attempts that are about to be written and the jobs of those that end, and read their
    members. `locked_attempt`, `members_of` and `job_of` then use these rows. Call it first in the transaction."""
    parameters = {"epochs": sorted(set(epochs))}
    locked = {attempt.epoch: attempt for attempt in session.scalars(_GUARDED, parameters)}
    session.info[_LOCKED] = locked
    if ended_job_ids := [locked[epoch].job_id for epoch in ending if epoch in locked]:
        jobs = (
            select(Job).where(Job.job_id.in_(ended_job_ids)).order_by(Job.job_id).with_for_update()
        )
        session.info[_JOBS] = {job.job_id: job for job in session.scalars(jobs)}
    members: dict[int, list[Member]] = {epoch: [] for epoch in parameters["epochs"]}
    blamed_epochs: set[int] = set()
    for member, failures in session.execute(_WITH_FAILURES, parameters):
        members[member.epoch].append(member)
        if failures:
            blamed_epochs.add(member.epoch)
    session.info[_READ], session.info[_BLAMED] = members, blamed_epochs


_WITH_FAILURES = (
    select(Member, VM.launch_failures)
    .join(VM, VM.vm_id == Member.vm_id)
    .where(Member.epoch.in_(_GIVEN))
    .order_by(Member.epoch, Member.rank)
)


def job_of(session: Session, attempt: Attempt) -> Job:
    """The attempt's job, locked."""
    jobs: dict[str, Job] = session.info.get(_JOBS, {})
    return jobs.get(attempt.job_id) or session.get_one(
        Job, attempt.job_id, with_for_update=True, populate_existing=True
    )


def members_of(session: Session, epoch: int) -> Sequence[Member]:
    """The members of an attempt, by rank."""
    members_by_epoch: dict[int, list[Member]] = session.info.get(_READ, {})
    if epoch in members_by_epoch:
        return members_by_epoch[epoch]
    return session.scalars(select(Member).where(Member.epoch == epoch).order_by(Member.rank)).all()


# ---------------------------------------------------------------------------------------------------------------------------------------
# Recording observations
# ---------------------------------------------------------------------------------------------------------------------------------------


def move(session: Session, epoch: int, owner: str, to: AttemptState) -> None:
    """Write the next state, except the last (`ending.end`). Safe to repeat."""
    attempt = locked_attempt(session, epoch, owner)
    if attempt.state == to:
        return
    state_before, attempt.state = attempt.state, to
    if to is AttemptState.RUNNING:
        # All members run, so their machines can launch: reset their counts of failed launches.
        attempt.running_at = database_time(session)
        blamed: set[int] | None = session.info.get(_BLAMED)
        if blamed is None or attempt.epoch in blamed:
            session.execute(_LAUNCHES, {"epoch": attempt.epoch})
    append_event(session, attempt, owner, f"attempt.{to}", {"state": state_before}, {"state": to})


_MACHINES: Table = VM.__table__  # pyright: ignore[reportAssignmentType] — a mapped class's table is a Table
_LAUNCHES = (
    update(_MACHINES)
    .where(
        _MACHINES.c.vm_id.in_(select(Member.vm_id).where(Member.epoch == bindparam("epoch"))),
        _MACHINES.c.launch_failures > 0,
    )
    .values(launch_failures=0)
)


def record_state(session: Session, epoch: int, owner: str, state: MemberState, rank: int) -> None:
    """Record a runner's report about a member."""
    locked_attempt(session, epoch, owner)
    member = session.get_one(Member, (epoch, rank))
    member.state = str(state.state)
    wait_reason = engine_wait_reason(state)
    member.handle = {
        **{name: value for name, value in member.handle.items() if name != WAITS},
        **({} if wait_reason is None else {WAITS: wait_reason}),
        **{name: value for name, value in state.handle.items() if value is not None},
        **({} if state.exit is None else {"exit": asdict(state.exit)}),
    }


def engine_wait_reason(state: MemberState) -> str | None:
    """The reason why a member waits in the queue of its engine, in words; None: it does not wait."""
    return state.engine_says or None if state.state is RunnerState.QUEUED else None


def record_deadman(session: Session, epoch: int, owner: str, rank: int, deadman: float) -> None:
    """Record the deadman timeout before the first launch request is sent."""
    locked_attempt(session, epoch, owner)
    member = session.get_one(Member, (epoch, rank))
    member.handle = {**member.handle, "deadman": deadman}


def record_contact(
    session: Session, epoch: int, owner: str, rank: int, *, silent: bool, elsewhere: bool = False
) -> None:
    """Record that the machine fell silent, or answers again. The time of falling silent is written once, by the database's clock.

    `elsewhere`: a runner answers, but from another root folder than the one in which the attempt started, so nothing is known about it
    either. An attempt is unreachable from the moment when the first of its members is.
    """
    attempt = locked_attempt(session, epoch, owner)
    member = session.get_one(Member, (epoch, rank))
    if (silent, elsewhere) == ("silent_since" in member.handle, "elsewhere" in member.handle):
        return
    since = member.handle.get("silent_since")
    handle = {k: v for k, v in member.handle.items() if k not in ("silent_since", "elsewhere")}
    if silent:
        handle["silent_since"] = database_time(session) if since is None else since
    if elsewhere:
        handle["elsewhere"] = True
    member.handle = handle
    session.flush()
    members = members_of(session, attempt.epoch)
    since = [m.handle["silent_since"] for m in members if "silent_since" in m.handle]
    contact_before = attempt.contact
    attempt.contact = Contact.UNREACHABLE if since else Contact.OK
    attempt.unreachable_since = min(since, default=None)
    if contact_before != attempt.contact:
        kind = events.ATTEMPT_UNREACHABLE if since else events.ATTEMPT_REACHABLE
        append_event(
            session, attempt, owner, kind,
            {"contact": contact_before}, {"contact": attempt.contact}, vm_id=member.vm_id,
        )  # fmt: skip


def record_stuck(session: Session, epoch: int, owner: str, rank: int, reason: str) -> None:
    """Mark an attempt as stuck for a reason that is not the job's; the operator is alerted once for each reason."""
    attempt = locked_attempt(session, epoch, owner)
    member = session.get_one(Member, (epoch, rank))
    if member.handle.get("stuck") == reason:
        return
    member.handle = {**member.handle, "stuck": reason}
    append_event(
        session, attempt, owner, events.ATTEMPT_STUCK, {}, {},
        vm_id=member.vm_id, detail={"rank": rank, "why": reason},
    )  # fmt: skip


def record_not_mirrored(
    session: Session, epoch: int, owner: str, rank: int, reason: str, *, gone: bool
) -> None:
    """Record that a checkpoint could not be fetched. The operator is alerted once, until one arrives again: at once if it can never be
    fetched, but if it was deleted before it was fetched (`gone`), only after GONE_IN_A_ROW failures in a row."""
    attempt = locked_attempt(session, epoch, owner)
    member = session.get_one(Member, (epoch, rank))
    handle_before, in_a_row = member.handle, member.handle.get("missed", 0) + 1
    should_alert = not gone or in_a_row >= GONE_IN_A_ROW
    member.handle = {
        **handle_before,
        "missed": in_a_row,
        **({"not_mirrored": reason} if should_alert else {}),
    }
    if should_alert and "not_mirrored" not in handle_before:
        append_event(
            session, attempt, owner, events.JOB_CHECKPOINT_NOT_MIRRORED, {}, {},
            vm_id=member.vm_id, detail={"why": reason},
        )  # fmt: skip


def record_mirrored(session: Session, epoch: int, rank: int) -> None:
    """A checkpoint has arrived, so earlier failures no longer matter. The attempt's row is locked."""
    member = session.get_one(Member, (epoch, rank))
    if "missed" in member.handle:
        cleared = ("missed", "not_mirrored")
        member.handle = {k: v for k, v in member.handle.items() if k not in cleared}


def record_leaking(
    session: Session, epoch: int, owner: str, rank: int, holders: Sequence[Mapping[str, Any]]
) -> None:
    """The machine still holds resources of an ended attempt. The operator is alerted once, and these resources are not used."""
    attempt = locked_attempt(session, epoch, owner)
    if attempt.state != AttemptState.ENDED or attempt.cleanup == Cleanup.LEAKING:
        return
    cleanup_before, attempt.cleanup = attempt.cleanup, Cleanup.LEAKING
    member = session.get_one(Member, (epoch, rank))
    append_event(
        session, attempt, owner, "attempt.leaking",
        {"cleanup": cleanup_before}, {"cleanup": Cleanup.LEAKING},
        vm_id=member.vm_id, detail={"rank": rank, "holders": [dict(h) for h in holders]},
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------------------------
# Attempts on machines without a controller
# ---------------------------------------------------------------------------------------------------------------------------------------


def record_untracked(session: Session, owner: str, vm_id: str, job_id: str, epoch: int) -> bool:
    """Record once that a machine runs an attempt that the database does not know. True if it was not recorded before."""
    kind = events.ATTEMPT_UNTRACKED
    reported = select(Event.event_id).where(
        Event.job_id == job_id, Event.kind == kind, Event.vm_id == vm_id, Event.epoch == epoch
    )
    if session.scalar(reported.limit(1)) is not None:
        return False
    events.append(
        session, actor=f"dispatcher:{owner}", kind=kind, job_id=job_id, epoch=epoch, vm_id=vm_id,
        detail={"why": "it runs there, but the database does not know it; nothing is done to it"},
    )  # fmt: skip
    return True


@dataclass(frozen=True, slots=True)
class UnreleasedMember:
    """A member that was given up when its machine was declared lost."""

    job_id: str
    epoch: int
    rank: int
    gpus: tuple[str, ...]
    share_mb: int | None


def unobserved_machines(session: Session, started_at: float, *, lately: bool = True) -> list[str]:
    """Machines that were not asked for their state since `started_at`, with or without an answer. If `lately`, an observation that was
    still fresh at `started_at` counts too. While there are such machines, the fleet may have stood still and its database may have been
    restored.

    A machine that was silent before may answer now, so it is listed as well. An untrusted one gets no requests, and so runs nothing.
    """
    now = database_time(session)
    rows = session.execute(
        select(VM.vm_id, VM.observed_round, VM.facts)
        .where(VM.active, VM.lost_at.is_(None), VM.contact != Contact.UNTRUSTED)
        .order_by(VM.vm_id)
    )
    unobserved: list[str] = []
    for vm_id, observed, facts in rows:
        # Times in the future are ignored, since they come from another clock.
        times = (time for time in (observed, missed_at(facts)) if time <= now + AHEAD)
        since = started_at - (capacity.stale_after(facts) if lately else 0.0)
        if max(times, default=0.0) < since:
            unobserved.append(vm_id)
    return unobserved


def missed_at(facts: Mapping[str, Any]) -> float:
    """When a machine last failed to answer; 0.0 if it has answered since, or if the column holds no time."""
    time = facts.get("missed_at")
    return time if isinstance(time, int | float) else 0.0


def unreleased_members(session: Session, vm_id: str) -> list[UnreleasedMember]:
    """Members of ended attempts that may still run on this machine, because it was declared lost."""
    rows = session.execute(
        select(Attempt.job_id, Member.epoch, Member.rank)
        .join(Attempt, Attempt.epoch == Member.epoch)
        .where(
            Member.vm_id == vm_id,
            Member.released.is_(False),
            Attempt.state == AttemptState.ENDED,
            Attempt.cleanup == Cleanup.CLEAN,
        )
        .order_by(Member.epoch, Member.rank)
    )
    members: list[UnreleasedMember] = []
    for job_id, epoch, rank in rows:
        reservations = _reservations_held(session, [epoch]).get((epoch, rank), [])
        gpus = tuple(
            reservation.uuid for reservation in reservations if reservation.uuid is not None
        )
        members.append(
            UnreleasedMember(
                job_id, epoch, rank, gpus, reservations[0].share_mb if reservations else None
            )
        )
    return members


def record_released(session: Session, epoch: int, rank: int) -> None:
    """Record that a machine that had been lost holds nothing of this member."""
    session.execute(
        update(Member).where(Member.epoch == epoch, Member.rank == rank).values(released=True)
    )


def return_to_use(session: Session, owner: str, vm_id: str) -> bool:
    """Use a machine again that was declared lost, if it holds nothing of earlier attempts. Returns whether it does not."""
    vm = session.get_one(VM, vm_id, with_for_update=True)
    open_epoch = session.scalar(
        select(Member.epoch)
        .join(Attempt, Attempt.epoch == Member.epoch)
        .where(
            Member.vm_id == vm_id,
            or_(Attempt.state != AttemptState.ENDED, Member.released.is_(False)),
        )
        .limit(1)
    )
    if vm.lost_at is None or open_epoch is not None:
        return False
    lost_at_before, vm.lost_at = vm.lost_at, None
    events.append(
        session, actor=f"dispatcher:{owner}", kind=events.VM_RETURNED, vm_id=vm_id,
        before={"lost_at": lost_at_before}, after={"lost_at": None},
    )  # fmt: skip
    requeue_pending.wake(session, vm_ids=[vm_id], actor=f"dispatcher:{owner}")
    return True


def append_event(
    session: Session,
    attempt: Attempt,
    owner: str,
    kind: str,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    *,
    vm_id: str | None = None,
    detail: Mapping[str, Any] | None = None,
) -> None:
    """Append an event of the attempt, caused by the dispatcher that owns it."""
    events.append(
        session, actor=f"dispatcher:{owner}", kind=kind, job_id=attempt.job_id,
        epoch=attempt.epoch, vm_id=vm_id, before=before, after=after, detail=detail,
    )  # fmt: skip
