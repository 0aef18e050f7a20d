"""Collects the history of a real fleet from its trainers, the test, and what the fleet says.

Trainers that were killed could not record that they stopped. The test recorded whom it killed and which machine lost power; any other
trainer that ended without a record was ended by the fleet, and the checker asks whether it was right to.
"""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from groupwise.jobs.fleet.states import AttemptState
from groupwise.jobs.fleet.store.tables import Attempt, Event, Job, Member, Reservation
from tests.chaos.fleet import RealFleet
from tests.chaos.trainer import printed

Record = dict[str, Any]
Who = tuple[str, int, int, str]

WHOLE = {"succeeded", "user_error", "crashed", "killed"}
"""Ends after which all of a log had time to come."""
STATUSES = ("job.completed", "job.failed", "job.cancelled", "job.queued", "job.retried")


def whole_history(fleet: RealFleet) -> list[Record]:
    """All of it, in the order of time."""
    told = fleet.told()
    ends = _attempts(fleet)
    records = [
        *fleet.records, *(r for r in told if r["what"] not in ("step", "term", "child")),
        *_last_children(told), *_silent_ends(fleet, told), *_statuses(fleet), *ends,
        *_refusals(fleet), *_reservations(fleet), *_logs(fleet, told, ends),
        *_artefacts(fleet, told), *_left(fleet),
    ]  # fmt: skip
    return sorted(_named_ends(records, told), key=lambda r: r["at"])


def _who(record: Record) -> Who:
    return record["job"], record["epoch"], record["rank"], record["vm"]


def _by_member(told: list[Record]) -> dict[Who, list[Record]]:
    found: dict[Who, list[Record]] = defaultdict(list)
    for record in told:
        found[_who(record)].append(record)
    return found


# --- How trainers ended ---------------------------------------------------------------------------


def _named_ends(records: list[Record], told: list[Record]) -> list[Record]:
    """Who had been asked to end did not end by itself."""
    asked = {_who(r) for r in told if r["what"] == "term"}
    return [
        {**r, "why": "cancelled"} if r["what"] == "stop" and "vm" in r and _who(r) in asked else r
        for r in records
    ]


def _last_children(told: list[Record]) -> list[Record]:
    last = {_who(r): r for r in told if r["what"] == "child"}
    return list(last.values())


def _silent_ends(fleet: RealFleet, told: list[Record]) -> list[Record]:
    """Of those that began and did not say that they stopped, and are not there any more."""
    here = {(r["job"], r["epoch"], r["rank"], r["vm"]) for r in fleet.trainers().values()}
    killed = {_who(r): r["at"] for r in fleet.records if r["what"] == "killed"}
    orphaned = {(r["job"], r["epoch"]) for r in fleet.records if r["what"] == "supervisor_killed"}
    found: list[Record] = []
    for who, mine in _by_member(told).items():
        words = {r["what"] for r in mine}
        if "start" not in words or "stop" in words or who in here:
            continue
        job, epoch, rank, vm = who
        facts: Record = {"job": job, "epoch": epoch, "rank": rank, "vm": vm}
        last = max(r["at"] for r in mine if r["what"] != "child")
        if who in killed:
            found.append({"at": killed[who], "what": "stop", "code": -9, "why": "killed", **facts})
        elif (job, epoch) in orphaned:
            found.append({"at": last, "what": "gone", **facts})
        elif not _power_went(fleet, vm, mine):
            end = {"at": last, "what": "stop", "code": -9, "why": "cancelled"}
            found.append({**end, **facts})
    return found


def _power_went(fleet: RealFleet, vm: str, mine: list[Record]) -> bool:
    """The machine lost power soon after the trainer's last sign of life: then that ended it. A trainer that was asked to end may have
    been killed before; it was, if it had been silent for longer than ever before."""
    signs = sorted(r["at"] for r in mine if r["what"] != "child")
    soon = 2.0
    if any(r["what"] == "term" for r in mine):
        soon = min(soon, 0.5 + max(b - a for a, b in pairwise(signs)))
    cuts = [r["at"] for r in fleet.records if r["what"] == "power_off" and r["vm"] == vm]
    return any(signs[-1] <= at <= signs[-1] + soon for at in cuts)


def _left(fleet: RealFleet) -> list[Record]:
    end = max((r["at"] for r in fleet.records), default=0.0) + 1e6
    found: list[Record] = []
    for words in fleet.marked():
        attempt, _, rest = words.partition(" ")
        job, _, epoch = attempt.rpartition(".")
        vm = rest.rpartition(" ")[2]
        found.append({"at": end, "what": "left", "job": job, "epoch": int(epoch), "vm": vm})
    return found


# --- What the fleet says --------------------------------------------------------------------------


def _statuses(fleet: RealFleet) -> list[Record]:
    def look(session: Session) -> list[Record]:
        query = select(Event).where(Event.kind.in_(STATUSES)).order_by(Event.event_id)
        generations: dict[str, int] = defaultdict(int)
        found: list[Record] = []
        for event in session.scalars(query):
            job = str(event.job_id)
            generations[job] += event.kind == "job.retried"
            status = event.kind.partition(".")[2].replace("retried", "queued")
            code = (event.detail or {}).get("exit_code")
            facts = {"job": job, "status": status, "generation": generations[job]}
            at = event.at - fleet.clock_offset
            found.append({"at": at, "what": "status", "exit_code": code, **facts})
        return found + _now(session, found)

    return fleet.look(look)


def _now(session: Session, told: list[Record]) -> list[Record]:
    """What stands in the table itself must be what was told last."""
    at = max((r["at"] for r in told), default=0.0)
    query = select(Job.job_id.label("job"), Job.status, Job.generation, Job.exit_code)
    return [{"at": at + 1e-3, "what": "status", **r} for r in session.execute(query).mappings()]


def _attempts(fleet: RealFleet) -> list[Record]:
    def look(session: Session) -> list[Record]:
        vms: dict[int, list[str]] = defaultdict(list)
        for epoch, vm in session.execute(select(Member.epoch, Member.vm_id)):
            vms[epoch].append(vm)
        query = select(Attempt).where(Attempt.state == AttemptState.ENDED)
        return [
            {
                "at": (attempt.ended_at or 0.0) - fleet.clock_offset,
                "what": "attempt",
                "job": attempt.job_id,
                "epoch": attempt.epoch,
                "generation": attempt.generation,
                "vms": vms[attempt.epoch],
                "outcome": attempt.outcome,
                "failure": attempt.failure_class,
                "charged": bool(attempt.charged),
                "because": attempt.evidence.get("because"),
                "vm_lost": any(m.get("vm_lost") for m in attempt.evidence.get("members") or ()),
            }
            for attempt in session.scalars(query.order_by(Attempt.epoch))
        ]

    return fleet.look(look)


def _refusals(fleet: RealFleet) -> list[Record]:
    """Which machine would not begin what."""

    def look(session: Session) -> list[Record]:
        return [
            {
                "at": attempt.created_at - fleet.clock_offset, "what": "refused", "job": attempt.job_id, "epoch": attempt.epoch,
                "rank": member["rank"], "vm": member["vm"], "because": member.get("refusal"),
            }
            for attempt in session.scalars(select(Attempt))
            for member in attempt.evidence.get("members") or ()
            if member.get("refusal") or member.get("reading") in ("refused", "voided")
        ]  # fmt: skip

    return fleet.look(look)


def _reservations(fleet: RealFleet) -> list[Record]:
    at = max((r["at"] for r in fleet.records), default=0.0)
    columns = (Reservation.epoch, Reservation.vm_id.label("vm"), Reservation.gpu_id.label("gpu"))
    query = (
        select(Attempt.job_id.label("job"), *columns)
        .join(Attempt, Attempt.epoch == Reservation.epoch)
        .where(Reservation.released_at.is_(None))
    )
    held = fleet.look(lambda s: s.execute(query).mappings().all())
    return [{"at": at, "what": "reserved", **row} for row in held]


# --- Logs and artefacts ---------------------------------------------------------------------------


def _logs(fleet: RealFleet, told: list[Record], ends: list[Record]) -> list[Record]:
    """What each attempt printed follows from its name; how much of it at least, it has told. Of one whose machine was declared lost before
    its log had come, the end is lost with the machine, however it had exited."""
    how = {(r["job"], r["epoch"]): r["failure"] or r["outcome"] for r in ends if not r["vm_lost"]}
    found: list[Record] = []
    for (job, epoch, rank, _), mine in _by_member(told).items():
        starts = [r for r in mine if r["what"] == "start"]
        if not starts:
            continue
        at = max(r["at"] for r in mine)
        size = max((r["wrote"] for r in mine if "wrote" in r), default=0)
        exact = any(r["what"] == "stop" for r in mine)
        path = fleet.home / "logs" / job / (f"{epoch}.log" if rank == 0 else f"{epoch}.{rank}.log")
        mirrored = path.read_bytes() if path.exists() else b""
        length = size if exact else max(size, len(mirrored))
        wrote = printed(f"{job}.{epoch}.{rank}", starts[0]["play"]["log"], 0, length)
        facts: Record = {"job": job, "epoch": epoch, "rank": rank}
        whole = how.get((job, epoch)) in WHOLE
        found += [
            {"at": at, "what": "wrote", "data": wrote.decode("latin-1"), **facts},
            {"at": at + 1e-6, "what": "mirrored", "data": mirrored.decode("latin-1"), **facts}
            | {"whole": whole},
        ]
    return found


def _artefacts(fleet: RealFleet, told: list[Record]) -> list[Record]:
    found: list[Record] = []
    for record in told:
        if record["what"] == "stop" and record["code"] == 0:
            job, epoch, rank, _ = _who(record)
            name = f"result-{rank}.txt"
            facts: Record = {"job": job, "epoch": epoch, "rank": rank, "path": name}
            made = f"{job}.{epoch}.{rank}"
            found.append({"at": record["at"], "what": "made", "data": made, **facts})
            folder = str(epoch) if rank == 0 else f"{epoch}.{rank}"
            path = fleet.home / "artefacts" / job / folder / "outputs" / name
            if path.exists():
                kept = path.read_text()
                found.append({"at": record["at"], "what": "kept", "data": kept, **facts})
    return found


def write(history: list[Record], path: Path) -> None:
    """For people, without what logs say."""
    with path.open("w") as file:
        for record in history:
            shown = {k: v for k, v in record.items() if k not in ("data", "play")}
            file.write(json.dumps(shown, default=str) + "\n")
