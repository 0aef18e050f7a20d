"""Troubles that have a name, on real parts (`tests/chaos/fleet.py`): dispatchers that die or sleep at one instant, machines that are
given up or without power, clocks that jump, poison jobs, full disks, control planes without machines.

Where the first dispatcher dies or sleeps at a named point the second one is held still until then, so that it is known who did what; it
takes over when the lease has run out. The crash at every single effect is tried in one process by `test_crash_points.py`; this is the
proof that a real death is like that one.

A run of the tests has those that could begin a job twice; `make soak SUITE=fleet` has all.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pytest
from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from groupwise.fleet.store.database import seconds
from groupwise.fleet.store.events import VM_RETURNED
from groupwise.fleet.store.tables import VM, Base, Checkpoint, Event
from groupwise.fleet.verbs import machines
from groupwise.fleet.verbs.machines import NewMachine
from tests.chaos import clocks
from tests.chaos.clocks import DAY, WallClock
from tests.chaos.fleet import OPERATOR, Control, RealFleet, real_fleet
from tests.chaos.history import whole_history
from tests.fleet_history import violations
from tests.ssh_hosts import UID, FullHost

PATIENCE = 60.0
LEASE = 2.0
LIMIT = 3.0
DEADMAN = 4.0
"""Seconds; jobs here print all the time, so that a machine is asked again each second."""
LATE = 10.0
"""Seconds that the end of a job may be late on a machine with other work."""
PAUSE = 700.0
"""Seconds: none of a job that is tried again is longer."""
DISK = "/home/gpu/groupwise-fleet"
TALKS = ["sh", "-c", "while echo alive; do sleep 0.2; done"]
ENDLESS = {"steps": 100_000}
ROLES = ("dispatcher-1", "dispatcher-2", "poller", "requeue")
soak = pytest.mark.soak(suite="fleet")


@dataclass(frozen=True, slots=True)
class Place:
    """A fleet whose clocks can be set."""

    fleet: RealFleet
    clocks: dict[str, WallClock]
    """Of processes and machines, by name."""
    without_diary: set[str]
    """Jobs whose commands write down nothing for the judge."""

    @property
    def first(self) -> Control:
        return self.fleet.controls["dispatcher-1"]

    @property
    def second(self) -> Control:
        return self.fleet.controls["dispatcher-2"]

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        return self.fleet.until(condition, what)

    def started(self, job: str) -> int:
        """How often its command began."""
        return len(self.fleet.happened(job, "start"))

    def until_step(self, *jobs: str) -> None:
        self.until(lambda: all(self.fleet.happened(job, "step") for job in jobs), "first steps")

    def until_is(self, status: str, *jobs: str) -> None:
        def all_are() -> bool:
            self.fleet.no_pauses()
            return {self.fleet.status(job) for job in jobs} == {status}

        self.until(all_are, f"{jobs} to be {status}")

    def plain(self, arguments: list[str], vm: str | None = None) -> str:
        """A job that runs any command."""
        job = self.fleet.submit([], arguments=arguments, resources={"gpus": 1, "vm": vm})
        self.without_diary.add(job)
        return job

    def on(self, vm: str, play: dict[str, Any], gpus: int = 1, **request: Any) -> str:
        return self.fleet.submit([play], resources={"gpus": gpus, "vm": vm}, **request)

    def on_each(self, play: dict[str, Any], gpus: int = 1, **request: Any) -> list[str]:
        return [self.on(vm, play, gpus, **request) for vm in self.fleet.hosts]

    def judge(self) -> None:
        """Nothing is open, in the database or on a machine, and over all that has happened in this module no promise was broken."""
        self.until(lambda: not self.fleet.unfinished() and not self.fleet.marked(), "rest")
        told = [r for r in whole_history(self.fleet) if r.get("job") not in self.without_diary]
        assert violations(told) == []


@pytest.fixture(scope="module")
def whole_place() -> Iterator[Place]:
    with real_fleet(machines=2, gpus=2, LEASE_SECONDS=f"{LEASE:g}") as fleet:
        found = {name: clocks.of_control(fleet.controls[name], fleet.folder) for name in ROLES}
        found.update({name: clocks.of_machine(host) for name, host in fleet.hosts.items()})
        small_disk(fleet.hosts["h1"])
        fleet.start("poller", "requeue", "dispatcher-2")
        fleet.until_polled()
        yield Place(fleet, found, set())


@pytest.fixture
def place(whole_place: Place) -> Iterator[Place]:
    """With one dispatcher, the second; afterwards everything is right again."""
    yield whole_place
    fleet = whole_place.fleet
    if whole_place.first.is_there():
        whole_place.first.kill()
    for clock in whole_place.clocks.values():
        clock.set(0.0)
    for name in ROLES[1:]:
        fleet.controls[name].thaw()
    for host in fleet.hosts.values():
        host.heal()
    with_deadmen(fleet, None)


@pytest.fixture
def two(place: Place) -> Place:
    """With both dispatchers."""
    place.first.start()
    return place


def small_disk(host: FullHost) -> None:
    """What its runner keeps is on a disk of its own. One that lost its power has it no more."""
    options = f"size=16m,mode=700,uid={UID},gid={UID}"
    within(host, f"mkdir -p {DISK} && mount -t tmpfs -o {options} none {DISK}")


def within(host: FullHost, script: str) -> None:
    """A command for a shell of root's on that machine."""
    command = ["nsenter", "-t", str(host._init), "-m", "-p", "--", "sh", "-c", script]
    subprocess.run(command, check=True, capture_output=True)


def with_deadmen(fleet: RealFleet, length: float | None) -> None:
    """For what is launched from now on."""
    fleet.database.run(lambda s: s.execute(update(VM).values(deadman=length)) and None)


def running(fleet: RealFleet, job: str) -> bool:
    return [each.state for each in fleet.attempts(job)] == ["running"]


def stay(fleet: RealFleet, length: float, *jobs: str) -> None:
    """So long they run, and nobody takes them over."""
    before = {job: fleet.attempts(job)[0].owner for job in jobs}
    end = time.monotonic() + length
    while time.monotonic() < end:
        for job, owner in before.items():
            [now] = fleet.attempts(job)
            assert (now.owner, now.state) == (owner, "running"), fleet.story()
        time.sleep(0.1)


# Dispatchers that die, or sleep


POINTS = {
    "host.launch:during": True,
    "attempt.collecting:before": True,
    "job.claim:before": False,
    "job.claim:after": False,
    "attempt.launching:after": False,
    "host.launch:before": False,
    "host.launch:after": False,
    "attempt.running:before": False,
    "attempt.running:after": False,
    "log.append:after": False,
    "log.offset:before": False,
    "attempt.collecting:after": False,
    "artefacts.publish:before": False,
    "artefacts.publish:after": False,
    "attempt.ended:before": False,
    "attempt.ended:after": False,
    "host.release:after": False,
    "attempt.release:after": False,
}
"""Where it dies by SIGKILL, and whether in each run of the tests; `make soak SUITE=fleet` dies at all."""
JOB = {"steps": 12, "pause": 0.05, "save": 4, "log": "binary", "chunk": 2000}


@pytest.mark.parametrize(
    "point", [pytest.param(p, marks=[] if always else soak) for p, always in POINTS.items()]
)
def test_another_dispatcher_finishes_what_one_had_begun(place: Place, point: str) -> None:
    place.second.freeze()
    place.first.start(DIES_AT=point)
    job = place.fleet.submit([JOB])
    place.until(lambda: place.first.died() is not None, "its death")
    assert place.first.died() == -signal.SIGKILL, place.first.log()
    assert place.first.said()[-1] == f"dies at {point}"
    place.second.thaw()
    place.until_is("completed", job)
    place.judge()
    happened = [len(place.fleet.happened(job, what)) for what in ("start", "stop")]
    assert (happened, len(place.fleet.epochs(job))) == ([1, 1], 1)


@pytest.mark.parametrize(
    ("point", "meanwhile"),
    [
        ("host.launch:before", "running"),
        ("host.launch:before", "cancelled"),
        pytest.param("host.launch:before", "completed", marks=soak),
        pytest.param("host.launch:after", "completed", marks=soak),
    ],
)
def test_one_that_slept_through_its_lease_in_a_launch_starts_nothing_twice(
    place: Place, point: str, meanwhile: str
) -> None:
    """It wakes up while another one has its job, or once that is over."""
    fleet, first = place.fleet, place.first
    place.second.freeze()
    first.start(STOPS_AT=point)
    job = fleet.submit([{**JOB, "steps": 100 if meanwhile == "running" else 12}])
    place.until(lambda: first.said()[-1:] == [f"stops at {point}"], "its stop")
    place.second.thaw()
    if meanwhile == "running":
        place.until_step(job)
    else:
        if meanwhile == "cancelled":
            fleet.verb("cancel", job)
        place.until_is(meanwhile, job)
    first.thaw()
    place.until(lambda: "has done it" in first.said(), "what it was about to do")
    place.until_is("completed", fleet.submit([{"steps": 1}]))
    assert fleet.status(job) == meanwhile
    if meanwhile == "running":
        place.until_is("completed", job)
    place.judge()
    assert place.started(job) == (0 if meanwhile == "cancelled" else 1)
    assert len(fleet.epochs(job)) == 1


# Machines that do not come back, or late


def contact(fleet: RealFleet, vm: str) -> str:
    return fleet.look(lambda s: s.get_one(VM, vm).contact)


def test_a_machine_that_was_given_up_and_comes_back_is_emptied_before_it_is_used(
    place: Place,
) -> None:
    fleet = place.fleet
    job = fleet.submit([{**ENDLESS, "term": "ignore", "child": "stays"}, JOB])
    [start] = place.until(lambda: fleet.happened(job, "start"), "the job")
    gone = fleet.hosts[start["vm"]]
    gone.reset()  # it is found out sooner than a cut, and is the same otherwise
    place.until(lambda: contact(fleet, gone.name) == "unreachable", "silence")
    assert fleet.status(job) == "running"
    fleet.lose(gone.name)
    place.until_is("completed", job)
    assert fleet.happened(job, "start")[-1]["vm"] != gone.name
    said = fleet.attempts(job)[0]
    assert (said.failure_class, said.charged) == ("host_lost", False)
    assert fleet.trainers(), "the first attempt lives on where nobody can reach it"
    add_again(fleet, gone)
    gone.heal()
    query = select(Event.event_id).where(Event.kind == VM_RETURNED, Event.vm_id == gone.name)
    place.until(lambda: fleet.look(lambda s: s.scalar(query)), "its return")
    assert fleet.marked() == []
    place.until_is("completed", *[place.on(gone.name, {"steps": 1}, gpus=2) for _ in range(2)])
    place.judge()


def add_again(fleet: RealFleet, host: FullHost) -> None:
    """Somebody wants to be rid of what was known of it: what was given up there is not forgotten all the same."""
    row = {"labels": {}, **host.vm_row()}
    new = NewMachine(**{name: row[name] for name in NewMachine.__slots__ if name in row})
    fleet.database.run(lambda s: machines.remove(s, OPERATOR, host.name) and None)
    fleet.database.run(lambda s: machines.add(s, OPERATOR, new) and None)


@soak  # in each run of the tests `test_entrances.py` takes the power of a machine
def test_a_job_on_a_machine_without_power_waits_for_it(place: Place) -> None:
    fleet, host = place.fleet, place.fleet.hosts["h2"]
    play = {**ENDLESS, "pause": 0.2, "save": 2}
    job = fleet.submit([play, JOB], resources={"gpus": 1, "vm": host.name})
    kept = select(Checkpoint.step).where(Checkpoint.job_id == job).limit(1)
    place.until(lambda: fleet.look(lambda s: s.scalar(kept)), "a checkpoint that is mirrored")
    fleet.power_off(host.name)
    place.until(lambda: contact(fleet, host.name) == "unreachable", "silence")
    assert (fleet.status(job), place.started(job)) == ("running", 1)
    host.start()
    place.until_is("completed", job)
    assert fleet.happened(job, "start")[1]["resumed"] >= 2
    place.judge()


# Clocks


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


@soak
def test_clocks_of_the_control_plane_decide_nothing(two: Place) -> None:
    """No attempt is taken from whoever drives it, and no other time than that of the database is written into it."""
    fleet = two.fleet
    began = fleet.look(seconds) - 10 * PATIENCE
    job = fleet.submit([{"steps": 90}])
    fails_once = fleet.submit([{"steps": 30, "code": 1}, {"steps": 1}])
    two.until_step(job)
    for ahead, behind in (("dispatcher-1", "dispatcher-2"), ("dispatcher-2", "dispatcher-1")):
        two.clocks[ahead].set(2 * DAY)
        two.clocks[behind].set(-2 * DAY)
        two.clocks["poller"].set(DAY)
        two.clocks["requeue"].set(-DAY)
        stay(fleet, LEASE, job)
    later = fleet.submit([{"steps": 1}])
    two.until(
        lambda: fleet.status(fails_once) == "queued" or len(fleet.epochs(fails_once)) == 2,
        "its first failure",
    )
    assert fleet.look(lambda s: other_times(s, began)) == []
    two.until_is("completed", job, fails_once, later)
    assert [two.started(each) for each in (job, fails_once, later)] == [1, 2, 1]
    assert fleet.look(lambda s: other_times(s, began)) == []
    two.judge()


@soak
def test_clocks_of_machines_end_no_job_and_let_none_go_on(place: Place) -> None:
    """One is put ahead, one back, while each has a job with all its time and one whose time will be up."""
    fleet = place.fleet
    with_deadmen(fleet, DEADMAN)
    ample, short = ({"grace_seconds": 1.0, "time_seconds": n} for n in (1000.0, LIMIT))
    healthy = place.on_each({"steps": 100}, limits=ample)
    endless = place.on_each(ENDLESS, limits=short)
    place.until_step(*healthy, *endless)
    place.clocks["h1"].set(2 * DAY)
    place.clocks["h2"].set(-2 * DAY)
    place.until_is("completed", *healthy)
    assert [place.started(job) for job in healthy] == [1, 1]
    place.until_is("failed", *endless)
    for job in endless:
        [limited] = fleet.attempts(job)
        [start], [end] = fleet.happened(job, "start"), fleet.happened(job, "term")
        assert limited.failure_class == "time_limit"
        assert LIMIT - 1 <= end["at"] - start["at"] <= LIMIT + LATE
    place.judge()


def test_a_deadman_strikes_although_its_clock_was_put_back(place: Place) -> None:
    fleet = place.fleet
    with_deadmen(fleet, DEADMAN)
    job = place.plain(TALKS, "h2")
    place.until(lambda: running(fleet, job), "the job")
    for name in ROLES[1:]:
        fleet.controls[name].freeze()
    place.clocks["h2"].set(-2 * DAY)
    began = time.monotonic()
    assert fleet.marked()
    place.until(lambda: not fleet.marked(), "its end by the deadman")
    assert time.monotonic() - began < DEADMAN + LATE
    for name in ROLES[1:]:
        fleet.controls[name].thaw()
    place.until(lambda: fleet.attempts(job)[0].failure_class == "host_lost", "its first end")
    assert fleet.attempts(job)[0].charged is False
    fleet.verb("cancel", job)
    place.until_is("cancelled", job)
    place.judge()


# Poison jobs, and full disks


POISON = {
    "supervisor_lost": "kill -9 $PPID; exec sleep 1000",
    "host_oom": "ulimit -v 200000; exec python3 -Sc 'x = bytearray(1 << 30)'",
    "crashed": "kill -SEGV $$",
}


@soak
def test_poison_jobs_come_to_an_end_and_take_nothing_with_them(place: Place) -> None:
    fleet = place.fleet
    healthy = place.on_each({"steps": 150})
    place.until_step(*healthy)
    poison = {kind: place.plain(["sh", "-c", script]) for kind, script in POISON.items()}
    place.until_is("failed", *poison.values())
    for kind, job in poison.items():
        assert [each.failure_class for each in fleet.attempts(job)] == [kind] * 3
        assert str(fleet.job(job).failure_reason).startswith(f"{kind}: ")
    place.until_is("completed", *healthy, *place.on_each({"steps": 1}, gpus=2))
    assert [place.started(job) for job in healthy] == [1, 1]
    place.judge()


def silences(fleet: RealFleet, job: str) -> int:
    """How often somebody wrote down that its machine does not answer."""
    query = select(func.count()).where(Event.job_id == job, Event.kind == "attempt.unreachable")
    return fleet.look(lambda s: s.scalar(query)) or 0


@soak
def test_a_full_disk_is_told_and_holds_nothing(place: Place) -> None:
    """Its machine begins nothing more until somebody makes room, and says so: it is not taken for one that is silent, nor are its GPUs
    kept for what cannot begin."""
    fleet = place.fleet
    quiet = place.plain(["sleep", "6"], "h1")
    place.until(lambda: running(fleet, quiet), "a job beside it")
    filler = place.plain(["sh", "-c", "cat /dev/zero >filler"], "h1")

    def refused() -> bool:
        fleet.no_pauses()
        return [each.state for each in fleet.attempts(filler)][:3] == ["ended"] * 3

    place.until(refused, "launches that are refused")
    first, *others = fleet.attempts(filler)[:3]
    assert (first.failure_class, first.charged) == ("crashed", True)
    assert {(each.failure_class, each.charged) for each in others} == {("launch_failure", False)}
    assert "disk_full" in others[0].evidence["because"]
    assert silences(fleet, filler) == 0
    fleet.verb("cancel", filler)
    place.until_is("cancelled", filler)
    place.until_is("completed", quiet, place.on("h2", {"steps": 1}, gpus=2))
    within(fleet.hosts["h1"], f"rm {DISK}/attempts/*/*/filler")
    place.until_is("completed", place.on("h1", {"steps": 1}, gpus=2))
    place.judge()


# Dispatchers that reach the database, and no machine


def test_both_dispatchers_are_cut_off_from_all_machines(two: Place) -> None:
    """Longer than any lease. Nothing is ended, begun elsewhere or taken over, and no cancellation is acknowledged that nobody has heard."""
    fleet = two.fleet
    jobs = two.on_each({"steps": 90})
    unwanted = two.on("h1", ENDLESS)
    two.until_step(*jobs, unwanted)
    fleet.hosts["h1"].partition()  # silence
    fleet.hosts["h2"].reset()  # and one that is found out at once
    fleet.verb("cancel", unwanted)
    waiting = fleet.submit([{"steps": 1}])
    stay(fleet, 2 * LEASE, *jobs, unwanted)
    assert (fleet.status(unwanted), two.started(waiting)) == ("running", 0)
    two.until(lambda: fleet.attempts(jobs[1])[0].contact == "unreachable", "silence")
    assert fleet.happened(unwanted, "term") == []
    assert any(unwanted in line for line in fleet.marked())
    for host in fleet.hosts.values():
        host.heal()
    two.until_is("completed", *jobs, waiting)
    two.until_is("cancelled", unwanted)
    assert [two.started(job) for job in (*jobs, unwanted, waiting)] == [1] * 4
    two.judge()
