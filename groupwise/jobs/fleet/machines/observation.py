"""Writes each observation of a machine by the poller, or that it gave no answer, to the database, in one transaction each.

Reservations are the truth about used capacity: an observation only subtracts. It can mark a GPU as unavailable (a foreign process uses it,
it is gone, it does not answer properly, it is split by MIG), and remove the mark; it never closes a reservation and never ends an attempt.

Attempts that run there and are in no table are recorded with the machine while any of their processes lives there, even without a
supervisor or a folder, and are left alone.

Absence proves nothing by itself. Only a probe with a complete answer can show that a GPU is missing. A probe that failed, hung or gave only
unreadable lines makes the machine `degraded` and leaves its GPUs as last observed. If it reports some GPUs, these are used, and the others
are out of use, with what it said as the reason. A machine that does not answer is `unreachable` after several misses in a row, and nothing
more follows from that.

Each observation carries the time at which it was requested, by the database's clock. An older one never overwrites a newer one.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from sqlalchemy import and_, func, or_, select
from sqlalchemy.orm import Session, aliased

from groupwise.core.errors import UsageError
from groupwise.jobs.fleet.attempts import records
from groupwise.jobs.fleet.attempts.decide import ObservedState, OrphanAction, orphan_action
from groupwise.jobs.fleet.machines.clearing import is_doctor_attempt
from groupwise.jobs.fleet.queue import capacity, requeue_pending, untracked_processes
from groupwise.jobs.fleet.states import Contact, Observed
from groupwise.jobs.fleet.store import epochs, events
from groupwise.jobs.fleet.store.database import database_time
from groupwise.jobs.fleet.store.engine import upsert
from groupwise.jobs.fleet.store.events import note_observed
from groupwise.jobs.fleet.store.tables import GPU, VM, Attempt, GPUHistory, Reservation
from groupwise.jobs.hosts import keys
from groupwise.jobs.hosts.answers import (
    MAX_EPOCH,
    MemberState,
    Observation,
    ProbeStatus,
    RunnerState,
    SeenApp,
    SeenGPU,
)
from groupwise.jobs.hosts.spec import JOB_ID

MISSES = 3
"""Misses in a row that make a machine unreachable."""
MISSES_APART = 5.0
"""Seconds between two misses that count: several pollers must not count the same silence."""
LONGEST_PROBLEM = 500
"""Maximum characters of a stored problem."""
ACTOR = "poller"
HELD_UNTIL = "held_until"
"""Key in a machine's facts: database time until which `hold_back` delays the jobs of its unknown attempts; passed to `release`."""
NAME = re.compile(rf"({JOB_ID.pattern})\.(0|[1-9][0-9]{{0,18}})")
"""The name of an attempt as its processes carry it. Any user who can start a process there can forge it."""

logger = logging.getLogger(__name__)


def apply(
    session: Session,
    vm_id: str,
    asked_at: float,
    observation: Observation,
    *,
    look_seconds: float | None = None,
) -> bool:
    """Record an observation requested at `asked_at`. Returns False if a newer one is stored, or the machine has left or is barred.

    `look_seconds`: seconds until the next observation, if the poller keeps to an interval.
    """
    strays = _find_strays(session, observation)
    jobs = untracked_processes.lock(session, {stray.job for stray in strays})
    vm = _locked_machine(session, vm_id)
    now = database_time(session)
    if vm is None or not _is_newer(asked_at, vm.observed_round, now) or _is_barred(vm):
        return False
    was_fresh = asked_at - vm.observed_round <= capacity.stale_after(vm.facts)
    was_usable = _is_usable(vm) and was_fresh
    if vm.boot_id is not None and vm.boot_id != observation.boot_id:
        events.append(
            session,
            actor=ACTOR,
            kind=events.VM_REBOOTED,
            vm_id=vm.vm_id,
            before={"boot_id": vm.boot_id},
            after={"boot_id": observation.boot_id},
        )
    vm.boot_id = observation.boot_id
    contact_before = vm.contact
    vm.contact, vm.misses, vm.unreachable_since, vm.seen_host_key = Contact.OK, 0, None, None
    if contact_before != Contact.OK:
        _append_event(session, vm, events.VM_REACHABLE, contact_before)
    known = session.scalar(select(func.count(GPU.gpu_id)).where(GPU.vm_id == vm_id)) or 0
    vm.degraded, vm.problem = (False, None) if vm.engine else probe_problem(observation, known)
    vm.observed_round = asked_at
    holding_before, unknown_before = untracked_processes.holding(vm.facts), _unknown_jobs(vm)
    facts = _machine_facts(vm, observation, strays, now)
    vm.facts = {**vm.facts, **facts, capacity.LOOK_SECONDS: look_seconds}
    _hold_back_jobs(session, vm, jobs, unknown_before)
    epochs.raise_above(session, [attempt.epoch for attempt in observation.attempts])
    vm.last_polled = func.now()  # pyright: ignore[reportAttributeAccessIssue] — the database's clock
    has_gpus = vm.engine is None and observation.probe.status is ProbeStatus.OK
    has_news = has_gpus and _write_gpus(session, vm, asked_at, now, observation)
    session.flush()
    has_news |= holding_before != untracked_processes.holding(vm.facts)
    if has_news or (_is_usable(vm) and not was_usable):
        requeue_pending.wake(session, vm_ids=[vm_id], actor=ACTOR)
    return True


def record_miss(session: Session, vm_id: str, asked_at: float, problem: str) -> int:
    """Record that a machine gave no answer when asked at `asked_at`. Returns the number of misses in a row."""
    vm = _locked_machine(session, vm_id)
    now = database_time(session)
    if vm is None or not _is_newer(asked_at, vm.observed_round, now):
        return 0
    counted_at = records.missed_at(vm.facts)
    vm.last_polled = func.now()  # pyright: ignore[reportAttributeAccessIssue] — the database's clock
    if not _is_barred(vm):  # otherwise its operator still needs the message about its key
        vm.problem = problem[:LONGEST_PROBLEM]
    if vm.misses and not _is_newer(asked_at - MISSES_APART, counted_at, now):
        return vm.misses
    vm.misses += 1
    vm.facts = {**vm.facts, "missed_at": asked_at}
    if vm.misses >= MISSES and vm.contact in (Contact.NEW, Contact.OK):
        contact_before, vm.contact = vm.contact, Contact.UNREACHABLE
        answered_at = vm.observed_round  # 0: never; in the future: by a clock that was set back
        vm.unreachable_since = answered_at if 0 < answered_at <= now else now
        _append_event(
            session, vm, events.VM_UNREACHABLE, contact_before, detail={"problem": vm.problem}
        )
        logger.warning("machine %s does not answer: %s", vm_id, vm.problem)
    return vm.misses


def _is_newer(asked_at: float, known_at: float, now: float) -> bool:
    """True if an observation at `asked_at` is newer than the known one. A known time in the future dates from before the database's clock
    was set back, and does not count."""
    return asked_at > known_at or known_at > now + records.AHEAD


def record_shown_key(
    session: Session, vm_id: str, host_key: keys.HostKey, *, pin: bool = False
) -> None:
    """Record the key shown by an untrusted machine, or shown by a trusted one instead of the pinned key.

    `pin`: trust the first key of a machine. A changed key is never trusted; the machine is left alone until an operator has checked it.
    """
    vm = _locked_machine(session, vm_id)
    if vm is None:
        return
    if vm.host_key == str(host_key):
        if vm.contact == Contact.UNTRUSTED:
            _trust_key(session, vm, host_key, "it shows the pinned key")
        return
    if vm.host_key is None and pin:
        vm.host_key = str(host_key)
        _trust_key(session, vm, host_key, "trust_on_first_use: the first key was not compared")
        return
    if vm.contact == Contact.UNTRUSTED and vm.seen_host_key == str(host_key):
        return
    contact_before, vm.contact, vm.seen_host_key = vm.contact, Contact.UNTRUSTED, str(host_key)
    vm.misses, vm.unreachable_since = 0, None
    command = f"groupwise fleet vm trust {vm.vm_id} {host_key.fingerprint}"
    if vm.host_key is None:
        kind = host_key.type.removeprefix("ssh-").partition("-")[0]
        shown_problem = (
            f"it shows the host key {host_key.fingerprint}, which is not trusted yet. Compare it with the machine's own "
            f"(ssh-keygen -lf /etc/ssh/ssh_host_{kind}_key.pub there), then `{command}`"
        )
    else:
        shown_problem = (
            f"its host key has CHANGED: it shows {host_key.fingerprint}, pinned is {_key_fingerprint(vm.host_key)}. Somebody may stand "
            f"between, or it was set up again; nothing is sent there. If the new one is right: `{command}`"
        )
    vm.problem, changed = shown_problem, vm.host_key is not None
    detail = {
        "fingerprint": host_key.fingerprint,
        "changed": changed,
        "pinned": _key_fingerprint(vm.host_key),
    }
    _append_event(session, vm, events.VM_UNTRUSTED, contact_before, detail=detail)
    logger.log(logging.ERROR if changed else logging.WARNING, "machine %s: %s", vm_id, vm.problem)


def record_untrusted(session: Session, vm_id: str, problem: str) -> None:
    """Record that a key needed to reach a machine is not trusted or cannot be read: its jump host's, or the one in its row."""
    vm = _locked_machine(session, vm_id)
    if vm is None or (vm.contact == Contact.UNTRUSTED and vm.problem == problem[:LONGEST_PROBLEM]):
        return
    contact_before, vm.contact, vm.problem = (
        vm.contact,
        Contact.UNTRUSTED,
        problem[:LONGEST_PROBLEM],
    )
    _append_event(session, vm, events.VM_UNTRUSTED, contact_before, detail={"problem": vm.problem})
    logger.error("machine %s: %s", vm_id, vm.problem)


def barred_machines(session: Session) -> frozenset[str]:
    """Machines that showed another key than the pinned one: only their key is read."""
    rows = session.scalars(select(VM).where(VM.active, VM.contact == Contact.UNTRUSTED))
    return frozenset(vm.vm_id for vm in rows if _is_barred(vm))


# --- the machine ----------------------------------------------------------------------------------


def _locked_machine(session: Session, vm_id: str) -> VM | None:
    """The machine's row, locked: two pollers write one after the other. None: it has left the fleet."""
    vm = session.get(VM, vm_id, with_for_update={"key_share": True}, populate_existing=True)
    return vm if vm is not None and vm.active else None


def _is_barred(vm: VM) -> bool:
    """True if it showed another key than the pinned one, even if an earlier connection still answers."""
    return vm.contact == Contact.UNTRUSTED and vm.seen_host_key not in (None, vm.host_key)


def _trust_key(session: Session, vm: VM, host_key: keys.HostKey, reason: str) -> None:
    contact_before, vm.contact, vm.problem, vm.seen_host_key = vm.contact, Contact.NEW, None, None
    detail = {"fingerprint": host_key.fingerprint, "why": reason}
    _append_event(session, vm, events.VM_TRUSTED, contact_before, detail=detail)


def _is_usable(vm: VM) -> bool:
    return vm.contact == Contact.OK and not vm.degraded


def _machine_facts(
    vm: VM, observation: Observation, strays: Iterable[MemberState], now: float
) -> dict[str, Any]:
    """The facts to store for the machine itself. `untracked`: the runner's own findings, and living attempts that are in no table, each
    with the time when it was first seen."""
    since_by_name = {
        entry["detail"]: entry["since"] for entry in untracked_processes.on_machine(vm)
    }
    untracked: list[dict[str, Any]] = [
        asdict(stray_state) for stray_state in observation.quarantined
    ]
    for stray_state in strays:
        name = f"{stray_state.job}.{stray_state.epoch}"
        fields = {
            "job_id": stray_state.job,
            "epoch": stray_state.epoch,
            "since": since_by_name.get(name, now),
        }
        resources = {
            "gpus": list(stray_state.gpus),
            "share_mb": stray_state.share_mb,
            "slot": stray_state.slot,
        }
        untracked.append(
            {"what": untracked_processes.ATTEMPT, "detail": name, **fields, **resources}
        )
    return {
        "load": [round(load, 2) for load in observation.load],
        "cpus": observation.cpus,
        "ram_mb": observation.ram_mb,
        "ram_free_mb": observation.ram_free_mb,
        "disk_free_mb": observation.disk_free_mb,
        "unremoved": list(observation.unremoved),
        "machine_time": observation.time,
        "missed_at": None,
        "untracked": untracked,
    }


def _find_strays(session: Session, observation: Observation) -> list[MemberState]:
    """Attempts that live there and are in no table, even if the folder was removed and only processes reveal them."""
    bare_processes: dict[str, MemberState] = {}
    for state in observation.quarantined:
        if state.what == "process" and (match := NAME.fullmatch(state.detail)):
            job, epoch = match.group(1), int(match.group(2))
            if epoch <= MAX_EPOCH:
                bare_processes[state.detail] = MemberState(
                    job, epoch, RunnerState.LOST, survivors=1
                )
    live_attempts = (state for state in observation.attempts if state.is_alive or state.may_start)
    candidates = [*live_attempts, *bare_processes.values()]
    known_jobs = records.known_jobs(session, {e.job for e in candidates}) if candidates else {}
    strays: list[MemberState] = []
    for state in candidates:
        reading, survivors = ObservedState(state.state), state.survivors or 0
        verdict = orphan_action(state.epoch, reading, known_jobs.get(state.job), survivors)
        if verdict is OrphanAction.REPORT and not is_doctor_attempt(state.job, state.epoch):
            strays.append(state)
    return strays


def _hold_back_jobs(session: Session, vm: VM, jobs: set[str], unknown_before: set[str]) -> None:
    """Delay the jobs of unknown attempts that run here, and release those whose unknown attempts (`unknown_before`) have ended. `jobs`: the
    locked rows, which are all that exist."""
    unknown_jobs = _unknown_jobs(vm)
    if ended_jobs := unknown_before - unknown_jobs:
        session.flush()  # `release` reads the facts of all machines
        untracked_processes.release(session, ended_jobs, vm.facts.get(HELD_UNTIL))
    if unknown_jobs:
        vm.facts = {
            **vm.facts,
            HELD_UNTIL: untracked_processes.hold_back(session, unknown_jobs & jobs),
        }


def _unknown_jobs(vm: VM) -> set[str]:
    return {entry["job_id"] for entry in untracked_processes.on_machine(vm)}


def probe_problem(seen: Observation, known: int) -> tuple[bool, str | None]:
    """Return True if the GPUs of a machine, or the processes on them, are unknown, and the problem to show. `known`: how many GPUs the
    fleet has seen there before. A machine without GPUs has no problem. If some GPUs cannot be read, the others stay in use."""
    probe, is_unknown = seen.probe, True
    if probe.status is ProbeStatus.ABSENT and not known:
        return False, None
    if probe.status in _PROBE_TROUBLE:
        problem = _PROBE_TROUBLE[probe.status]
    elif probe.apps in _PROBE_TROUBLE and probe.apps is not ProbeStatus.ABSENT:
        problem = f"who is on its GPUs is not known: {_PROBE_TROUBLE[probe.apps]}"
    elif probe.lost:
        problem = "{tool} cannot reach some of its GPUs"
        is_unknown = not seen.gpus and len(probe.lost) < known
    elif probe.lines_not_read:
        problem, is_unknown = "{tool} gives lines that cannot be read", not seen.gpus
    else:
        return False, None
    code = f" (exit {probe.exit})" if probe.exit else ""
    output = "; ".join([*probe.lost, *probe.lines_not_read][:3]) or probe.said.strip()
    text = problem.format(tool=probe.tool) + code + (f": {output}" if output else "")
    return is_unknown, text[:LONGEST_PROBLEM]


_PROBE_TROUBLE = {
    ProbeStatus.ABSENT: "it had GPUs, and now there is no {tool}: see that the driver is installed and on PATH",
    ProbeStatus.FAILED: "{tool} failed",
    ProbeStatus.HUNG: "{tool} hangs",
    ProbeStatus.GARBAGE: "{tool} gives an answer that cannot be read",
}


def _key_fingerprint(key: str | None) -> str | None:
    try:
        return None if key is None else keys.parse_host_key(key).fingerprint
    except UsageError:  # a row that was written by hand
        return "unreadable"


def _append_event(
    session: Session,
    vm: VM,
    kind: str,
    before: str,
    *,
    detail: Mapping[str, Any] | None = None,
) -> None:
    events.append(
        session,
        actor=ACTOR,
        kind=kind,
        vm_id=vm.vm_id,
        before={"contact": before},
        after={"contact": vm.contact},
        detail=detail,
    )


# --- its GPUs -------------------------------------------------------------------------------------


def _write_gpus(
    session: Session, vm: VM, asked_at: float, now: float, observation: Observation
) -> bool:
    """Record the GPUs of a machine. Returns True if one has become available that was not before."""
    # The order in which the end of an attempt locks them too.
    own_gpus = select(GPU).where(GPU.vm_id == vm.vm_id).order_by(GPU.gpu_id)
    locked = session.scalars(own_gpus.with_for_update(key_share=True))
    rows = {gpu.uuid: gpu for gpu in locked}
    uuids = [gpu.uuid for gpu in observation.gpus]
    apps_known = observation.probe.apps is ProbeStatus.OK
    has_available, new_uuids = False, set[str]()
    for seen_gpu in {gpu.uuid: gpu for gpu in observation.gpus}.values():
        if seen_gpu.uuid not in rows:
            new_uuids.add(seen_gpu.uuid)
            rows[seen_gpu.uuid] = GPU(
                vm_id=vm.vm_id, uuid=seen_gpu.uuid, index=seen_gpu.index, observed=Observed.OK
            )
            session.add(rows[seen_gpu.uuid])
    session.flush()
    holders = _holding_attempts(session, vm.vm_id, asked_at)
    twins = _find_twins(session, vm, uuids)
    for seen_gpu in {gpu.uuid: gpu for gpu in observation.gpus}.values():
        gpu = rows[seen_gpu.uuid]
        # Keep constant properties that a probe leaves out; reset changing ones, which are then unknown.
        gpu.index = seen_gpu.index
        gpu.model = seen_gpu.model or gpu.model
        gpu.memory_mb = seen_gpu.memory_mb if seen_gpu.memory_mb is not None else gpu.memory_mb
        gpu.memory_used_mb = seen_gpu.memory_used_mb
        gpu.utilisation = seen_gpu.utilisation
        gpu.temperature = seen_gpu.temperature
        gpu.observed_at = now
        apps = [app for app in observation.apps if app.uuid == seen_gpu.uuid]
        verdict = _judge_gpu(seen_gpu, apps, holders.get(gpu.gpu_id, set()), vm.idle_memory_mb)
        if uuids.count(seen_gpu.uuid) > 1:
            verdict = Observed.DEGRADED, "its UUID was shown twice"
        if twin := twins.get(gpu.gpu_id):
            verdict = (
                Observed.DEGRADED,
                f"{twin} has the same one: the machine is in the fleet twice",
            )
        if verdict[0] is Observed.OK and gpu.observed == Observed.FOREIGN_BUSY and not apps_known:
            verdict = Observed.FOREIGN_BUSY, gpu.detail
        has_available |= (
            note_observed(session, gpu, *verdict, actor=ACTOR) and verdict[0] is Observed.OK
        )
        has_available |= seen_gpu.uuid in new_uuids and verdict[0] is Observed.OK
    for uuid in rows.keys() - set(uuids):
        verdict = _judge_absent_gpu(observation, len(rows.keys() - set(uuids)))
        if verdict is not None:
            note_observed(session, rows[uuid], *verdict, actor=ACTOR)
    _keep_history(session, [rows[uuid] for uuid in uuids], now)
    return has_available


def _judge_absent_gpu(seen: Observation, count: int) -> tuple[Observed, str] | None:
    """Judge from an observation that leaves out `count` known GPUs whether they may be used. None: it does not show that."""
    probe = seen.probe
    if not probe.lines_not_read and not probe.lost:
        return Observed.MISSING, "the machine no longer shows it"
    lines = "; ".join([*probe.lost, *probe.lines_not_read][:3])
    reason = f"{probe.tool} does not list it, and says: {lines}"[:LONGEST_PROBLEM]
    if len(probe.lost) >= count:
        return Observed.MISSING, reason
    return (Observed.DEGRADED, reason) if seen.gpus else None


def _find_twins(session: Session, vm: VM, uuids: Sequence[str]) -> dict[int, str]:
    """GPUs that another machine showed first and still has: gpu_id → that machine. One card cannot be in two machines."""
    own_gpu, first_gpu = aliased(GPU), aliased(GPU)
    rows = session.execute(
        select(own_gpu.gpu_id, first_gpu.vm_id)
        .join(first_gpu, and_(first_gpu.uuid == own_gpu.uuid, first_gpu.gpu_id < own_gpu.gpu_id))
        .join(VM, VM.vm_id == first_gpu.vm_id)
        .where(
            own_gpu.vm_id == vm.vm_id, own_gpu.uuid.in_(uuids),
            first_gpu.vm_id != vm.vm_id, first_gpu.observed != Observed.MISSING, VM.active,
        )
    )  # fmt: skip
    return dict(rows.all())


def _judge_gpu(
    seen_gpu: SeenGPU, apps: list[SeenApp], own_attempts: Collection[str], idle_memory_mb: int
) -> tuple[Observed, str | None]:
    """Judge from an observation whether a GPU may be used. `own_attempts`: names of our attempts that may be running on it."""
    if seen_gpu.mig:
        return Observed.MIG, None
    if seen_gpu.problems:
        return Observed.DEGRADED, "; ".join(seen_gpu.problems)[:LONGEST_PROBLEM]
    apps = [app for app in apps if not app.graphics]
    foreign = [app for app in apps if app.attempt not in own_attempts]
    if foreign:
        # Without amounts of memory, which differ in every observation.
        users = sorted({a.attempt or (f"pid {a.pid}" if a.pid else "somebody") for a in foreign})
        rest_note = " and others" if len(users) > 5 else ""
        return Observed.FOREIGN_BUSY, f"in use by {', '.join(users[:5])}{rest_note}"
    used_mb = seen_gpu.memory_used_mb
    if not apps and not own_attempts and used_mb is not None and used_mb > idle_memory_mb:
        return Observed.FOREIGN_BUSY, (
            f"more than {idle_memory_mb} MB of its memory is in use, by no computing process that can be seen. If it is a display's: "
            "`groupwise fleet vm set` with a larger --idle-memory-mb"
        )
    return Observed.OK, None


def _holding_attempts(session: Session, vm_id: str, asked_at: float) -> dict[int, set[str]]:
    """Attempts by gpu_id: those (`<job>.<epoch>`) that hold a part of the GPU, or held it when the machine was asked."""
    query = (
        select(Reservation.gpu_id, Reservation.epoch, Attempt.job_id)
        .join(Attempt, Attempt.epoch == Reservation.epoch)
        .where(
            Reservation.vm_id == vm_id,
            Reservation.gpu_id.is_not(None),
            or_(Reservation.released_at.is_(None), Reservation.released_at >= asked_at),
        )
    )
    holders: dict[int, set[str]] = {}
    for gpu_id, epoch, job_id in session.execute(query):
        if gpu_id is not None:
            holders.setdefault(gpu_id, set()).add(f"{job_id}.{epoch}")
    return holders


def _keep_history(session: Session, gpus: list[GPU], now: float) -> None:
    """Keep the first observation of each minute. `files/clearing.py` deletes old rows, including those of GPUs no longer observed."""
    minute = int(now // 60)
    lines = [
        {
            "gpu_id": gpu.gpu_id,
            "minute": minute,
            "memory_used_mb": gpu.memory_used_mb,
            "utilisation": gpu.utilisation,
            "temperature": gpu.temperature,
        }
        for gpu in gpus
    ]
    if not lines:
        return
    session.execute(upsert(session, GPUHistory).on_conflict_do_nothing(), lines)
