"""Troubles that have a name: clocks that jump, poison jobs, machines that begin nothing, control planes without machines.

All parts are real (`tests/chaos/fleet.py`). Troubles in which a dispatcher or a machine dies are in `test_crash_named.py`.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pytest
from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from groupwise.fleet.store.database import seconds
from groupwise.fleet.store.tables import VM, Attempt, Base, Event, Job
from groupwise.fleet.verbs import machines
from tests.chaos import clocks
from tests.chaos.clocks import DAY, WallClock
from tests.chaos.fleet import OPERATOR, RealFleet, real_fleet
from tests.chaos.history import whole_history
from tests.fleet_history import violations
from tests.ssh_hosts import UID, FullHost

pytestmark = pytest.mark.fleet

PATIENCE = 60.0
LEASE = 2.0
LIMIT = 4.0
DEADMAN = 5.0
"""Seconds; jobs here print all the time, so that a machine is asked again each second."""
LATE = 10.0
"""Seconds that the end of a job may be late on a machine with other work."""
PAUSE = 700.0
"""Seconds: none of a job that is tried again is longer."""
DISK = "/home/gpu/groupwise-fleet"
TALKS = ["sh", "-c", "while echo alive; do sleep 0.2; done"]
ROLES = ("dispatcher-1", "dispatcher-2", "poller", "requeue")


@dataclass(frozen=True, slots=True)
class Place:
    """A fleet whose clocks can be set."""

    fleet: RealFleet
    clocks: dict[str, WallClock]
    """Of processes and machines, by name."""
    without_diary: set[str]
    """Jobs whose commands write down nothing for the judge."""


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with real_fleet(machines=2, gpus=2, LEASE_SECONDS=f"{LEASE:g}") as fleet:
        found = {name: clocks.of_control(fleet.controls[name], fleet.folder) for name in ROLES}
        found.update({name: clocks.of_machine(host) for name, host in fleet.hosts.items()})
        small_disk(fleet.hosts["h1"])
        fleet.start(*ROLES)
        fleet.until_polled()
        yield Place(fleet, found, set())


def small_disk(host: FullHost) -> None:
    """What its runner keeps is on a disk of its own."""
    options = f"size=16m,mode=700,uid={UID},gid={UID}"
    script = f"mkdir -p {DISK} && mount -t tmpfs -o {options} none {DISK}"
    subprocess.run(within(host, script), check=True)


def within(host: FullHost, script: str) -> list[str]:
    """A command for a shell of root's on that machine."""
    return ["nsenter", "-t", str(host._init), "-m", "-p", "--", "sh", "-c", script]


@pytest.fixture(autouse=True)
def right_again(place: Place) -> Iterator[None]:
    yield
    for clock in place.clocks.values():
        clock.set(0.0)
    for name in ROLES:
        place.fleet.controls[name].thaw()
    for host in place.fleet.hosts.values():
        host.heal()
    with_deadmen(place.fleet, None)


def with_deadmen(fleet: RealFleet, length: float | None) -> None:
    """For what is launched from now on."""
    fleet.database.run(lambda s: s.execute(update(VM).values(deadman=length)) and None)


def plain(place: Place, arguments: list[str], **request: Any) -> str:
    """A job that runs any command."""
    job = place.fleet.submit([], arguments=arguments, **request)
    place.without_diary.add(job)
    return job


def attempts(fleet: RealFleet, job: str) -> list[Attempt]:
    query = select(Attempt).where(Attempt.job_id == job).order_by(Attempt.epoch)

    def look(session: Session) -> list[Attempt]:
        found = list(session.scalars(query))
        session.expunge_all()
        return found

    return fleet.look(look)


def running(fleet: RealFleet, job: str) -> bool:
    return [each.state for each in attempts(fleet, job)] == ["running"]


def silences(fleet: RealFleet, job: str) -> int:
    """How often somebody wrote down that its machine does not answer."""
    query = select(func.count()).where(Event.job_id == job, Event.kind == "attempt.unreachable")
    return fleet.look(lambda s: s.scalar(query)) or 0


def stays(fleet: RealFleet, job: str, length: float) -> None:
    """So long it runs, and nobody takes it over."""
    [before] = attempts(fleet, job)
    end = time.monotonic() + length
    while time.monotonic() < end:
        [now] = attempts(fleet, job)
        assert (now.owner, now.state) == (before.owner, "running"), fleet.logs()
        time.sleep(0.1)


def completed(fleet: RealFleet, *jobs: str) -> None:
    def all_are() -> bool:
        fleet.no_pauses()
        return {fleet.status(job) for job in jobs} == {"completed"}

    fleet.until(all_are, PATIENCE, f"the ends of {jobs}")


def rests(place: Place) -> None:
    """Nothing is open, in the database or on a machine."""
    fleet = place.fleet
    fleet.until(lambda: not fleet.unfinished() and not fleet.marked(), PATIENCE, "rest")


def judge(place: Place) -> None:
    """Over all that has happened in this module so far."""
    rests(place)
    told = [r for r in whole_history(place.fleet) if r.get("job") not in place.without_diary]
    assert violations(told) == []


def other_times(session: Session, began: float) -> list[str]:
    """Whatever in the database is a moment, and none of this test."""
    last = seconds(session) + PAUSE
    found: list[str] = []
    for table in Base.metadata.sorted_tables:
        for row in session.execute(select(table)).mappings():
            for name, value in row.items():
                moment = _moment(value)
                if moment is not None and not began <= moment <= last:
                    found.append(f"{table.name}.{name} is {moment - began:.0f} s off")
    return found


def _moment(value: Any) -> float | None:
    if isinstance(value, datetime):
        return value.timestamp()
    return value if isinstance(value, float) and value > 1e9 else None


def test_those_of_the_control_plane_decide_nothing(place: Place) -> None:
    """No attempt is taken from whoever drives it, and no other time than that of the database is written into it."""
    fleet = place.fleet
    began = fleet.look(seconds) - PATIENCE
    job = fleet.submit([{"steps": 120}])
    fails_once = fleet.submit([{"steps": 40, "code": 1}, {"steps": 1}])
    fleet.until(lambda: fleet.happened(job, "step"), PATIENCE, "its first step")
    for ahead, behind in (("dispatcher-1", "dispatcher-2"), ("dispatcher-2", "dispatcher-1")):
        place.clocks[ahead].set(2 * DAY)
        place.clocks[behind].set(-2 * DAY)
        place.clocks["poller"].set(DAY)
        place.clocks["requeue"].set(-DAY)
        stays(fleet, job, LEASE)
    later = fleet.submit([{"steps": 1}])
    fleet.until(
        lambda: fleet.status(fails_once) == "queued" or len(fleet.epochs(fails_once)) == 2,
        PATIENCE,
        "its first failure",
    )
    assert fleet.look(lambda s: other_times(s, began)) == []
    completed(fleet, job, fails_once, later)
    assert [len(fleet.happened(each, "start")) for each in (job, fails_once, later)] == [1, 2, 1]
    assert fleet.look(lambda s: other_times(s, began)) == []
    judge(place)


def test_those_of_machines_end_no_job_and_let_none_go_on(place: Place) -> None:
    """One is put ahead, one back, while each has a job with all its time and one whose time will be up."""
    fleet = place.fleet
    with_deadmen(fleet, DEADMAN)
    healthy: list[str] = []
    endless: list[str] = []
    for name in fleet.hosts:
        where = {"gpus": 1, "vm": name}
        healthy.append(fleet.submit([{"steps": 100}], resources=where, limits=ample()))
        limits = {"grace_seconds": 1.0, "time_seconds": LIMIT}
        endless.append(fleet.submit([{"steps": 100_000}], resources=where, limits=limits))
    fleet.until(
        lambda: all(fleet.happened(each, "step") for each in (*healthy, *endless)),
        PATIENCE,
        "their first steps",
    )
    place.clocks["h1"].set(2 * DAY)
    place.clocks["h2"].set(-2 * DAY)
    completed(fleet, *healthy)
    assert [len(fleet.happened(job, "start")) for job in healthy] == [1, 1]
    for job in endless:
        fleet.until(lambda job=job: fleet.status(job) == "failed", PATIENCE, "its time limit")
        [limited] = attempts(fleet, job)
        [start], [end] = fleet.happened(job, "start"), fleet.happened(job, "term")
        assert limited.failure_class == "time_limit"
        assert LIMIT - 1 <= end["at"] - start["at"] <= LIMIT + LATE
    judge(place)


def ample() -> dict[str, float]:
    return {"grace_seconds": 1.0, "time_seconds": 1000.0}


def test_a_deadman_strikes_although_its_clock_was_put_back(place: Place) -> None:
    fleet = place.fleet
    with_deadmen(fleet, DEADMAN)
    job = plain(place, TALKS, resources={"gpus": 1, "vm": "h2"})
    fleet.until(lambda: running(fleet, job), PATIENCE, "the job")
    for name in ROLES:
        fleet.controls[name].freeze()
    place.clocks["h2"].set(-2 * DAY)
    began = time.monotonic()
    assert fleet.marked()
    fleet.until(lambda: not fleet.marked(), PATIENCE, "its end by the deadman")
    assert time.monotonic() - began < DEADMAN + LATE
    for name in ROLES:
        fleet.controls[name].thaw()
    fleet.until(
        lambda: attempts(fleet, job)[0].failure_class == "host_lost", PATIENCE, "its first end"
    )
    assert attempts(fleet, job)[0].charged is False
    fleet.verb("cancel", job)
    fleet.until(lambda: fleet.status(job) == "cancelled", PATIENCE, "its cancellation")
    judge(place)


# Poison jobs


POISON = {
    "supervisor_lost": "kill -9 $PPID; exec sleep 1000",
    "host_oom": "ulimit -v 200000; exec python3 -Sc 'x = bytearray(1 << 30)'",
    "crashed": "kill -SEGV $$",
}


def test_poison_jobs_come_to_an_end_and_take_nothing_with_them(place: Place) -> None:
    fleet = place.fleet
    healthy = [
        fleet.submit([{"steps": 150}], resources={"gpus": 1, "vm": name}) for name in fleet.hosts
    ]
    fleet.until(lambda: all(fleet.happened(j, "step") for j in healthy), PATIENCE, "first steps")
    poison = {kind: plain(place, ["sh", "-c", script]) for kind, script in POISON.items()}

    def failed() -> bool:
        fleet.no_pauses()
        return {fleet.status(job) for job in poison.values()} == {"failed"}

    fleet.until(failed, PATIENCE, "the ends of the poison jobs")
    for kind, job in poison.items():
        tried = attempts(fleet, job)
        assert [each.failure_class for each in tried] == [kind] * 3
        reason = fleet.look(lambda s, job=job: s.get_one(Job, job).failure_reason) or ""
        assert reason.startswith(f"{kind}: ")
        assert "retries: all 2 used" in reason
    whole = [
        fleet.submit([{"steps": 1}], resources={"gpus": 2, "vm": name}) for name in fleet.hosts
    ]
    completed(fleet, *healthy, *whole)
    assert [len(fleet.happened(job, "start")) for job in healthy] == [1, 1]
    judge(place)


FILLS = "cat /dev/zero >filler"


def test_a_full_disk_is_told_and_holds_nothing(place: Place) -> None:
    """Its machine begins nothing more until somebody makes room, and says so: it is not taken for one that is silent, nor are its GPUs
    kept for what cannot begin."""
    fleet = place.fleet
    quiet = plain(place, ["sleep", "6"], resources={"gpus": 1, "vm": "h1"})
    fleet.until(lambda: running(fleet, quiet), PATIENCE, "a job beside it")
    filler = plain(place, ["sh", "-c", FILLS], resources={"gpus": 1, "vm": "h1"})

    def refused() -> bool:
        fleet.no_pauses()
        return [each.state for each in attempts(fleet, filler)][:3] == ["ended"] * 3

    fleet.until(refused, PATIENCE, "launches that are refused")
    first, *others = attempts(fleet, filler)[:3]
    assert (first.failure_class, first.charged) == ("crashed", True)
    assert {(each.failure_class, each.charged) for each in others} == {("launch_failure", False)}
    assert "h1 would not start it: disk_full" in others[0].evidence["because"]
    assert silences(fleet, filler) == 0
    fleet.verb("cancel", filler)
    fleet.until(lambda: fleet.status(filler) == "cancelled", PATIENCE, "its cancellation")
    completed(fleet, quiet, fleet.submit([{"steps": 1}], resources={"gpus": 2, "vm": "h2"}))
    rests(place)
    subprocess.run(within(fleet.hosts["h1"], f"rm {DISK}/attempts/*/*/filler"), check=True)
    completed(fleet, fleet.submit([{"steps": 1}], resources={"gpus": 2, "vm": "h1"}))
    judge(place)


def test_a_machine_that_begins_nothing_does_not_swallow_the_queue(place: Place) -> None:
    """It has all its GPUs free at any moment, while those of the other one are all in use."""
    fleet = place.fleet
    completed(fleet, fleet.submit([{"steps": 1}], resources={"gpus": 2, "vm": "h1"}))
    busy = fleet.submit([{"steps": 100_000}], resources={"gpus": 2, "vm": "h2"})
    fleet.until(lambda: fleet.happened(busy, "step"), PATIENCE, "a job on the other one")
    fill = f"cat /dev/zero >{DISK}/filler || true"
    subprocess.run(within(fleet.hosts["h1"], fill), check=True, capture_output=True)
    jobs = [fleet.submit([{"steps": 5}]) for _ in range(4)]

    def cordoned() -> str | None:
        # Those that it has refused pause, so that it is the turn of the others.
        return fleet.look(lambda s: s.get_one(VM, "h1").cordoned)

    said = fleet.until(cordoned, PATIENCE, "an end of launches there")
    assert "launches in a row failed" in said
    assert "disk_full" in said
    fleet.verb("cancel", busy)
    completed(fleet, *jobs)
    assert [each["vm"] for job in jobs for each in fleet.happened(job, "start")] == ["h2"] * 4
    subprocess.run(within(fleet.hosts["h1"], f"rm {DISK}/filler"), check=True)
    fleet.database.run(lambda s: machines.uncordon(s, OPERATOR, "h1") and None)
    completed(fleet, fleet.submit([{"steps": 1}], resources={"gpus": 2, "vm": "h1"}))
    judge(place)


# Dispatchers that reach the database, and no machine


def test_both_dispatchers_are_cut_off_from_all_machines(place: Place) -> None:
    """Longer than any lease. Nothing is ended, begun elsewhere or taken over, and no cancellation is acknowledged that nobody has heard."""
    fleet = place.fleet
    jobs = [
        fleet.submit([{"steps": 110}], resources={"gpus": 1, "vm": name}) for name in fleet.hosts
    ]
    unwanted = fleet.submit([{"steps": 100_000}], resources={"gpus": 1, "vm": "h1"})
    fleet.until(
        lambda: all(fleet.happened(job, "step") for job in (*jobs, unwanted)), PATIENCE, "steps"
    )
    fleet.hosts["h1"].partition()  # silence
    fleet.hosts["h2"].reset()  # and one that is found out at once
    fleet.verb("cancel", unwanted)
    waiting = fleet.submit([{"steps": 1}])
    before = {job: attempts(fleet, job)[0].owner for job in (*jobs, unwanted)}
    end = time.monotonic() + 2 * LEASE
    while time.monotonic() < end:
        for job, owner in before.items():
            [now] = attempts(fleet, job)
            assert (now.owner, now.state) == (owner, "running"), fleet.logs()
        assert fleet.status(unwanted) == "running"
        assert fleet.happened(waiting, "start") == []
        time.sleep(0.1)
    assert attempts(fleet, jobs[1])[0].contact == "unreachable"
    assert fleet.happened(unwanted, "term") == []
    assert any(unwanted in line for line in fleet.marked())
    for host in fleet.hosts.values():
        host.heal()
    completed(fleet, *jobs, waiting)
    fleet.until(lambda: fleet.status(unwanted) == "cancelled", PATIENCE, "its cancellation")
    assert [len(fleet.happened(job, "start")) for job in (*jobs, unwanted, waiting)] == [1] * 4
    judge(place)
