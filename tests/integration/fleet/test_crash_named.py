"""A dispatcher dies by SIGKILL at a named instant, and another one finishes the job: once, with everything that belongs to it.

All parts are real (`tests/chaos/fleet.py`). The second dispatcher is held still until the first one is dead, so that it is known who did
what; it takes over when the lease has run out. The crash at every single effect of a launch is tried in one process, with machines that
are not real; this is the proof that a real death is like that one.
"""

import signal
from collections.abc import Iterator

import pytest
from sqlalchemy import select

from groupwise.fleet.store.events import VM_RETURNED
from groupwise.fleet.store.tables import VM, Attempt, Checkpoint, Event
from groupwise.fleet.verbs import machines
from groupwise.fleet.verbs.machines import NewMachine
from tests.chaos.fleet import OPERATOR, RealFleet, real_fleet
from tests.chaos.history import whole_history
from tests.fleet_history import violations

pytestmark = pytest.mark.fleet

PATIENCE = 60.0
JOB = {"steps": 12, "pause": 0.05, "save": 4, "log": "binary", "chunk": 2000}

POINTS = {
    "claimed": "job.claim:after",
    "launch sent": "host.launch:during",
    "running": "attempt.running:after",
    "exit seen": "attempt.collecting:before",
    "artefacts published": "artefacts.publish:after",
    "release checked": "host.release:after",
}
BESIDE_THEM = {
    "launching": "attempt.launching:after",
    "launch answered": "host.launch:after",
    "log appended": "log.append:after",
    "ended": "attempt.ended:after",
    "claimed, not committed": "job.claim:before",
    "launch about to be sent": "host.launch:before",
    "running, not committed": "attempt.running:before",
    "log about to be reported": "log.offset:before",
    "collecting": "attempt.collecting:after",
    "artefacts about to be published": "artefacts.publish:before",
    "ended, not committed": "attempt.ended:before",
    "released": "attempt.release:after",
}
"""`make soak SUITE=fleet` dies there too."""


@pytest.fixture(scope="module")
def fleet() -> Iterator[RealFleet]:
    with real_fleet(machines=2, gpus=2, LEASE_SECONDS="2") as running:
        running.start("poller", "requeue", "dispatcher-2")
        running.until_polled()
        running.controls["dispatcher-2"].freeze()
        yield running


@pytest.fixture(autouse=True)
def second_is_still(fleet: RealFleet) -> Iterator[None]:
    second = fleet.controls["dispatcher-2"]
    if not second.frozen:
        second.freeze()
    yield
    first = fleet.controls["dispatcher-1"]
    if first.is_there():
        first.kill()
    for host in fleet.hosts.values():
        host.heal()


def rests(fleet: RealFleet) -> bool:
    return not fleet.unfinished()


def judge(fleet: RealFleet) -> None:
    """Over all that has happened in this module so far."""
    history = whole_history(fleet)
    assert violations(history) == []


@pytest.mark.parametrize(
    "point",
    [
        *(pytest.param(point, id=name) for name, point in POINTS.items()),
        *(
            pytest.param(point, id=name, marks=pytest.mark.soak(suite="fleet"))
            for name, point in BESIDE_THEM.items()
        ),
    ],
)
def test_another_dispatcher_finishes_what_one_had_begun(fleet: RealFleet, point: str) -> None:
    first, second = fleet.controls["dispatcher-1"], fleet.controls["dispatcher-2"]
    first.start(DIES_AT=point)
    job = fleet.submit([JOB])
    fleet.until(lambda: first.died() is not None, PATIENCE, "its death")
    assert first.died() == -signal.SIGKILL, first.log()
    assert first.said()[-1] == f"dies at {point}"
    second.thaw()
    fleet.until(lambda: fleet.status(job) == "completed", PATIENCE, "the job")
    fleet.until(lambda: rests(fleet), PATIENCE, "rest")
    assert len(fleet.happened(job, "start")) == 1
    assert len(fleet.happened(job, "stop")) == 1
    assert len(fleet.epochs(job)) == 1
    judge(fleet)


# A dispatcher that wakes up late


def frozen_at(fleet: RealFleet, point: str) -> None:
    """The first dispatcher stands still there, and does not know it."""
    first = fleet.controls["dispatcher-1"]
    fleet.until(lambda: first.said()[-1:] == [f"stops at {point}"], PATIENCE, "its stop")


@pytest.mark.parametrize(
    "point",
    [
        "host.launch:before",
        pytest.param("host.launch:after", marks=pytest.mark.soak(suite="fleet")),
    ],
)
def test_one_that_slept_through_its_lease_in_a_launch_starts_nothing_twice(
    fleet: RealFleet, point: str
) -> None:
    first, second = fleet.controls["dispatcher-1"], fleet.controls["dispatcher-2"]
    first.start(STOPS_AT=point)
    job = fleet.submit([JOB])
    frozen_at(fleet, point)
    second.thaw()
    fleet.until(lambda: fleet.status(job) == "completed", PATIENCE, "the job")
    wakes(fleet)
    assert len(fleet.happened(job, "start")) == 1
    assert len(fleet.epochs(job)) == 1
    fleet.until(lambda: rests(fleet), PATIENCE, "rest")
    judge(fleet)


def test_one_that_wakes_up_while_another_has_its_job_lets_go(fleet: RealFleet) -> None:
    first, second = fleet.controls["dispatcher-1"], fleet.controls["dispatcher-2"]
    first.start(STOPS_AT="host.launch:before")
    job = fleet.submit([{**JOB, "steps": 100}])
    frozen_at(fleet, "host.launch:before")
    second.thaw()
    fleet.until(lambda: fleet.happened(job, "step"), PATIENCE, "the job's first step")
    wakes(fleet)
    assert fleet.status(job) == "running"
    fleet.until(lambda: fleet.status(job) == "completed", PATIENCE, "the job")
    assert len(fleet.happened(job, "start")) == 1
    fleet.until(lambda: rests(fleet), PATIENCE, "rest")
    judge(fleet)


def test_one_that_wakes_up_after_a_cancellation_launches_nothing(fleet: RealFleet) -> None:
    first, second = fleet.controls["dispatcher-1"], fleet.controls["dispatcher-2"]
    first.start(STOPS_AT="host.launch:before")
    job = fleet.submit([JOB])
    frozen_at(fleet, "host.launch:before")
    second.thaw()
    fleet.verb("cancel", job)
    fleet.until(lambda: fleet.status(job) == "cancelled", PATIENCE, "its cancellation")
    wakes(fleet)
    fleet.until(lambda: rests(fleet), PATIENCE, "rest")
    assert fleet.happened(job, "start") == []
    assert fleet.marked() == []
    judge(fleet)


def wakes(fleet: RealFleet) -> None:
    """It goes on where it stood, and does what it was about to do; then it is as good as any other."""
    first = fleet.controls["dispatcher-1"]
    first.thaw()
    fleet.until(lambda: "has done it" in first.said(), PATIENCE, "what it was about to do")
    other = fleet.submit([{"steps": 1}])
    fleet.until(lambda: fleet.status(other) == "completed", PATIENCE, "another job")


# A machine that does not come back


def test_a_machine_that_was_given_up_and_comes_back_is_emptied_before_it_is_used(
    fleet: RealFleet,
) -> None:
    second = fleet.controls["dispatcher-2"]
    second.thaw()
    job = fleet.submit([{"steps": 100_000, "term": "ignore", "child": "stays"}, JOB])
    [start] = fleet.until(lambda: fleet.happened(job, "start"), PATIENCE, "the job")
    gone = fleet.hosts[start["vm"]]
    gone.reset()  # it is found out sooner than a cut, and is the same otherwise
    fleet.until(lambda: contact(fleet, start["vm"]) == "unreachable", PATIENCE, "silence")
    assert fleet.status(job) == "running"
    fleet.lose(gone.name)
    fleet.until(lambda: fleet.status(job) == "completed", PATIENCE, "the job elsewhere")
    again = fleet.happened(job, "start")[-1]
    assert again["vm"] != gone.name
    said = select(Attempt.failure_class, Attempt.charged).where(Attempt.epoch == start["epoch"])
    assert fleet.look(lambda s: s.execute(said).one()) == ("host_lost", False)
    assert fleet.trainers(), "the first attempt lives on where nobody can reach it"
    add_again(fleet, gone.name)
    gone.heal()
    fleet.until(lambda: returned(fleet, gone.name), PATIENCE, "its return")
    assert fleet.marked() == []
    others = [
        fleet.submit([{"steps": 1}], resources={"gpus": 2, "vm": gone.name}) for _ in range(2)
    ]
    fleet.until(
        lambda: {fleet.status(other) for other in others} == {"completed"}, PATIENCE, "new jobs"
    )
    fleet.until(lambda: rests(fleet), PATIENCE, "rest")
    judge(fleet)


def test_a_job_on_a_machine_without_power_waits_for_it(fleet: RealFleet) -> None:
    fleet.controls["dispatcher-2"].thaw()
    job = fleet.submit([{"steps": 100_000, "pause": 0.2, "save": 2}, JOB])
    fleet.until(lambda: mirrored(fleet, job), PATIENCE, "a checkpoint that is mirrored")
    [start] = fleet.happened(job, "start")
    fleet.power_off(start["vm"])
    fleet.until(lambda: contact(fleet, start["vm"]) == "unreachable", PATIENCE, "silence")
    assert fleet.status(job) == "running"
    assert len(fleet.happened(job, "start")) == 1
    fleet.hosts[start["vm"]].start()
    fleet.until(lambda: len(fleet.epochs(job)) == 2, PATIENCE, "its second attempt")
    fleet.until(lambda: fleet.status(job) == "completed", PATIENCE, "the job")
    fleet.until(lambda: rests(fleet), PATIENCE, "rest")
    assert fleet.happened(job, "start")[1]["resumed"] >= 2
    judge(fleet)


def contact(fleet: RealFleet, vm: str) -> str:
    return fleet.look(lambda s: s.get_one(VM, vm).contact)


def returned(fleet: RealFleet, vm: str) -> bool:
    query = select(Event.event_id).where(Event.kind == VM_RETURNED, Event.vm_id == vm)
    return fleet.look(lambda s: s.scalar(query)) is not None


def add_again(fleet: RealFleet, vm: str) -> None:
    """Somebody wants to be rid of what was known of it: what was given up there is not forgotten all the same."""
    row = {"labels": {}, **fleet.hosts[vm].vm_row()}
    new = NewMachine(**{name: row[name] for name in NewMachine.__slots__ if name in row})
    fleet.database.run(lambda s: machines.remove(s, OPERATOR, vm) and None)
    fleet.database.run(lambda s: machines.add(s, OPERATOR, new) and None)


def mirrored(fleet: RealFleet, job: str) -> bool:
    query = select(Checkpoint.step).where(Checkpoint.job_id == job).limit(1)
    return fleet.look(lambda s: s.scalar(query)) is not None
