"""Named faults on a real fleet (`tests/chaos/fleet.py`): dispatchers that die or sleep at one instant, machines that are given up,
control planes without machines.

Where the first dispatcher dies or sleeps at a named point the second one is held still until then, so that it is known who did what; it
takes over when the lease has run out. The crash at every single effect is tried in one process by `test_crash_points.py`; this is the
proof that a real death is like that one.

A run of the tests has those that could begin a job twice; `make soak SUITE=fleet` has all.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import select, update

from groupwise.jobs.fleet.operations import machines
from groupwise.jobs.fleet.operations.machines import NewMachine
from groupwise.jobs.fleet.store.events import VM_RETURNED
from groupwise.jobs.fleet.store.tables import VM, Event
from tests.chaos.collect_history import whole_history
from tests.chaos.fleet import OPERATOR, Control, RealFleet, real_fleet
from tests.history_checker import violations

LEASE = 2.0
DEADMAN = 4.0
"""Seconds; jobs here print all the time, so that a machine is asked again each second."""
MAX_DELAY_S = 10.0
"""How late a job may end on a busy machine, in seconds."""
TALKS = ["sh", "-c", "while echo alive; do sleep 0.2; done"]
ENDLESS = {"steps": 100_000}
ROLES = ("dispatcher-2", "poller", "requeue")
SOAK = pytest.mark.soak(suite="fleet")


@dataclass(frozen=True, slots=True)
class DispatcherPair:
    """A fleet and its two dispatchers."""

    fleet: RealFleet
    without_diary: set[str]
    """Jobs whose commands record nothing for the checker."""

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

    def check_history(self) -> None:
        """Nothing is open, in the database or on a machine, and nothing in this module violated a guarantee."""
        self.until(lambda: not self.fleet.unfinished() and not self.fleet.marked(), "rest")
        told = [r for r in whole_history(self.fleet) if r.get("job") not in self.without_diary]
        assert violations(told) == []


@pytest.fixture(scope="module")
def shared_pair() -> Iterator[DispatcherPair]:
    with real_fleet(machines=2, gpus=2, LEASE_SECONDS=f"{LEASE:g}") as fleet:
        fleet.start("poller", "requeue", "dispatcher-2")
        fleet.until_polled()
        yield DispatcherPair(fleet, set())


@pytest.fixture
def pair(shared_pair: DispatcherPair) -> Iterator[DispatcherPair]:
    """With one dispatcher, the second; afterwards everything is right again."""
    yield shared_pair
    fleet = shared_pair.fleet
    if shared_pair.first.is_there():
        shared_pair.first.kill()
    for name in ROLES:
        fleet.controls[name].thaw()
    for host in fleet.hosts.values():
        host.heal()


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
    **dict.fromkeys(
        "job.claim:before job.claim:after attempt.launching:after host.launch:before host.launch:after "
        "attempt.running:before attempt.running:after log.append:after log.offset:before "
        "attempt.collecting:after artefacts.publish:before artefacts.publish:after attempt.ended:before "
        "attempt.ended:after host.release:after attempt.release:after".split(),
        False,
    ),
}
"""Where it dies by SIGKILL, and whether in each run of the tests; `make soak SUITE=fleet` dies at all."""
JOB = {"steps": 12, "pause": 0.05, "save": 4, "log": "binary", "chunk": 2000}


@pytest.mark.parametrize(
    "point", [pytest.param(p, marks=[] if always else SOAK) for p, always in POINTS.items()]
)
def test_another_dispatcher_finishes_what_one_had_begun(pair: DispatcherPair, point: str) -> None:
    pair.second.freeze()
    pair.first.start(DIES_AT=point)
    job = pair.fleet.submit([JOB])
    pair.until(lambda: pair.first.died() is not None, "its death")
    assert pair.first.died() == -signal.SIGKILL, pair.first.log()
    assert pair.first.said()[-1] == f"dies at {point}"
    pair.second.thaw()
    pair.until_is("completed", job)
    pair.check_history()
    happened = [len(pair.fleet.happened(job, what)) for what in ("start", "stop")]
    assert (happened, len(pair.fleet.epochs(job))) == ([1, 1], 1)


@pytest.mark.parametrize(("point", "meanwhile"), [
    ("host.launch:before", "running"), ("host.launch:before", "cancelled"), pytest.param("host.launch:before", "completed", marks=SOAK),
    pytest.param("host.launch:after", "completed", marks=SOAK),
])  # fmt: skip
def test_a_dispatcher_that_slept_through_its_lease_starts_nothing_twice(
    pair: DispatcherPair, point: str, meanwhile: str
) -> None:
    """It wakes up while another one has its job, or once that is over."""
    fleet, first = pair.fleet, pair.first
    pair.second.freeze()
    first.start(STOPS_AT=point)
    job = fleet.submit([{**JOB, "steps": 100 if meanwhile == "running" else 12}])
    pair.until(lambda: first.said()[-1:] == [f"stops at {point}"], "its stop")
    pair.second.thaw()
    if meanwhile == "running":
        pair.until_step(job)
    else:
        if meanwhile == "cancelled":
            fleet.operate("cancel", job)
        pair.until_is(meanwhile, job)
    first.thaw()
    pair.until(lambda: "has done it" in first.said(), "what it was about to do")
    pair.until_is("completed", fleet.submit([{"steps": 1}]))
    assert fleet.status(job) == meanwhile
    if meanwhile == "running":
        pair.until_is("completed", job)
    pair.check_history()
    assert pair.started(job) == (0 if meanwhile == "cancelled" else 1)
    assert len(fleet.epochs(job)) == 1


# Machines that do not come back, or late


def test_a_machine_that_was_given_up_and_comes_back_is_emptied_before_it_is_used(
    pair: DispatcherPair,
) -> None:
    fleet = pair.fleet
    job = fleet.submit([{**ENDLESS, "term": "ignore", "child": "stays"}, JOB])
    [start] = pair.until(lambda: fleet.happened(job, "start"), "the job")
    gone = fleet.hosts[start["vm"]]
    gone.reset()  # it is found out sooner than a cut, and is the same otherwise
    fleet.lose(gone.name)
    pair.until_is("completed", job)
    assert fleet.happened(job, "start")[-1]["vm"] != gone.name
    said = fleet.attempts(job)[0]
    assert (said.failure_class, said.charged) == ("host_lost", False)
    assert fleet.trainers(), "the first attempt lives on where nobody can reach it"
    # Somebody wants to be rid of what was known of it: what was given up there is not forgotten all the same.
    row = {"labels": {}, **gone.vm_row()}
    new = NewMachine(**{name: row[name] for name in NewMachine.__slots__ if name in row})
    fleet.database.run(lambda s: machines.remove(s, OPERATOR, gone.name) and None)
    fleet.database.run(lambda s: machines.add(s, OPERATOR, new) and None)
    gone.heal()
    poller = fleet.controls["poller"]
    poller.kill()
    poller.start()  # else it would ask a machine ever more rarely that was silent for so long
    query = select(Event.event_id).where(Event.kind == VM_RETURNED, Event.vm_id == gone.name)
    pair.until(lambda: fleet.rows(query), "its return")
    assert fleet.marked() == []
    pair.until_is("completed", *[pair.on(gone.name, {"steps": 1}, gpus=2) for _ in range(2)])
    pair.check_history()


# Control planes that ask nothing any more


def test_a_deadman_ends_what_no_control_plane_asks_for(pair: DispatcherPair) -> None:
    fleet = pair.fleet
    fleet.database.run(lambda s: s.execute(update(VM).values(deadman=DEADMAN)) and None)
    job = pair.plain(TALKS, "h2")
    pair.until(lambda: [a.state for a in fleet.attempts(job)] == ["running"], "the job")
    for name in ROLES:
        fleet.controls[name].freeze()
    began = time.monotonic()
    assert fleet.marked()
    pair.until(lambda: not fleet.marked(), "its end by the deadman")
    assert time.monotonic() - began < DEADMAN + MAX_DELAY_S
    for name in ROLES:  # one that was frozen within a transaction holds its locks
        fleet.controls[name].thaw()
    fleet.database.run(lambda s: s.execute(update(VM).values(deadman=None)) and None)
    pair.until(lambda: fleet.attempts(job)[0].failure_class == "host_lost", "its first end")
    assert fleet.attempts(job)[0].charged is False
    fleet.operate("cancel", job)
    pair.until_is("cancelled", job)
    pair.check_history()


# Dispatchers that reach the database, and no machine


def test_both_dispatchers_are_cut_off_from_all_machines(pair: DispatcherPair) -> None:
    """Longer than any lease. Nothing is ended, begun elsewhere or taken over, and no cancellation is acknowledged that nobody has heard."""
    fleet = pair.fleet
    pair.first.start()
    jobs = [pair.on(vm, {"steps": 90}) for vm in fleet.hosts]
    unwanted = pair.on("h1", ENDLESS)
    pair.until_step(*jobs, unwanted)
    fleet.hosts["h1"].partition()  # silence
    fleet.hosts["h2"].reset()  # and one that is found out at once
    fleet.operate("cancel", unwanted)
    waiting = fleet.submit([{"steps": 1}])
    stay(fleet, 2 * LEASE, *jobs, unwanted)
    assert (fleet.status(unwanted), pair.started(waiting)) == ("running", 0)
    pair.until(lambda: fleet.attempts(jobs[1])[0].contact == "unreachable", "silence")
    assert fleet.happened(unwanted, "term") == []
    assert any(unwanted in line for line in fleet.marked())
    for host in fleet.hosts.values():
        host.heal()
    pair.until_is("completed", *jobs, waiting)
    pair.until_is("cancelled", unwanted)
    assert [pair.started(job) for job in (*jobs, unwanted, waiting)] == [1] * 4
    pair.check_history()
