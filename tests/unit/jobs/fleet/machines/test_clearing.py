"""What is removed on machines, when, and what never is."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.orm import Session

from groupwise.jobs.fleet.attempts.effects import Gateway
from groupwise.jobs.fleet.attempts.records import Machine
from groupwise.jobs.fleet.dispatcher import GlobalJobDispatcher
from groupwise.jobs.fleet.machines.clearing import (
    MachineClearing,
    Retention,
    forgettable,
    needed_blobs,
)
from groupwise.jobs.fleet.store.database import Database, database_time
from groupwise.jobs.fleet.store.tables import VM, Attempt, Job, Member
from groupwise.jobs.hosts.answers import RunnerState
from groupwise.jobs.hosts.driver import KnownState, Launch, Runner
from groupwise.jobs.hosts.local import LocalHost
from groupwise.jobs.hosts.spec import FileEntry, JobSpec, as_json
from tests.fake_hosts import FakeHost, Script
from tests.in_process_fleet import InProcessFleet

AT_ONCE = Retention(0.0, 0.0)
HOUR = 3600.0


# --- which folders may go -------------------------------------------------------------------------


@dataclass
class Ended:
    """An attempt of long ago, and what of it is as it should not be."""

    job: str = "job"
    ago: float = 100 * HOUR
    outcome: str = "succeeded"
    state: str = "ended"
    cleanup: str = "clean"
    released: bool = True
    vm: str = "m"
    goes_on: bool = False


def write(database: Database, *attempts: Ended) -> list[tuple[str, int]]:
    """Their names."""

    def rows(session: Session) -> list[tuple[str, int]]:
        now = database_time(session)
        for vm in {each.vm for each in attempts} | {"m"}:
            session.merge(VM(vm_id=vm))
        names: list[tuple[str, int]] = []
        for each in attempts:
            if session.get(Job, each.job) is None:
                session.add(Job(job_id=each.job))
                session.flush()
            attempt = Attempt(job_id=each.job, generation=0, number=0, created_at=now)
            session.add(attempt)
            session.flush()
            attempt.state = "launching"
            session.flush()
            if each.state == "ended":
                attempt.outcome, attempt.ended_at = each.outcome, now - each.ago
                attempt.state, attempt.cleanup = "ended", each.cleanup
            session.add(Member(epoch=attempt.epoch, rank=0, vm_id=each.vm, released=each.released))
            session.flush()
            names.append((each.job, attempt.epoch))
        for job in {each.job for each in attempts if not each.goes_on}:
            for status in ("running", "completed"):
                session.get_one(Job, job).status = status
                session.flush()
        return names

    return database.run(rows)


def free(
    database: Database, names: list[tuple[str, int]], retention: Retention | None = None
) -> Any:
    return database.read(lambda s: forgettable(s, "m", names, retention or Retention()))


def test_failures_stay_longer_than_successes(database: Database) -> None:
    names = write(
        database,
        Ended("a", 25 * HOUR),
        Ended("b", 23 * HOUR),
        Ended("c", 25 * HOUR, "void"),
        Ended("d", 25 * HOUR, "failed"),
        Ended("e", 25 * HOUR, "cancelled"),
        Ended("f", 73 * HOUR, "failed"),
    )
    assert {job for job, _ in free(database, names)} == {"a", "c", "f"}
    assert free(database, names, Retention(HOUR, HOUR))[0][0] == "f"  # the oldest first
    assert len(free(database, names, Retention(HOUR, HOUR))) == 6


def test_files_of_attempts_that_may_still_run_are_kept(database: Database) -> None:
    assert free(database, write(database, Ended())) == [("job", 1)]
    stays = {
        "live": Ended(state="launching", cleanup="pending", goes_on=True),
        "leaking": Ended(cleanup="leaking", released=False),
        "not-looked": Ended(cleanup="pending"),
        "given-up-with-its-machine": Ended(released=False),
        "of-another-machine": Ended(vm="elsewhere"),
    }
    names = write(database, *(replace(each, job=job) for job, each in stays.items()))
    assert free(database, names) == []


def test_unknown_attempts_are_not_cleared(database: Database) -> None:
    ((job, epoch),) = write(database, Ended())
    assert free(database, [(job, epoch + 1), ("stranger", epoch), ("stranger", 7)]) == []


def test_the_last_folder_of_a_job_that_continues_stays(database: Database) -> None:
    names = write(
        database,
        Ended(outcome="failed", goes_on=True),
        Ended(outcome="failed", goes_on=True),
        Ended(outcome="failed", goes_on=True, vm="elsewhere"),
    )
    assert free(database, names) == names[:1]


def test_files_of_live_attempts_are_needed(database: Database) -> None:
    own, smaller, resumed, over = (FileEntry(c * 64, 0o644, 1) for c in "abcd")
    names = write(
        database,
        Ended("one", state="launching", goes_on=True),
        Ended("two", state="launching", goes_on=True),
        Ended("three"),
        Ended("four", state="launching", goes_on=True, vm="elsewhere"),
    )

    def name(session: Session) -> None:
        for job, entry in (("one", own), ("two", own), ("three", over), ("four", over)):
            session.get_one(Job, job).spec = as_json(JobSpec(("true",), files={"f": entry}))
        second = session.get_one(Attempt, names[1][1])
        second.spec = as_json(JobSpec(("true",), files={"f": smaller}))
        second.resume_from = {"step": 1, "manifest": {"c": [resumed.sha256, 0o644, 1]}}

    database.run(name)
    expected = [own.sha256, smaller.sha256, resumed.sha256]
    assert database.read(lambda s: needed_blobs(s, "m")) == expected


# --- on machines ----------------------------------------------------------------------------------


@pytest.fixture
def fleet(database: Database, tmp_path: Path) -> InProcessFleet:
    return InProcessFleet(database, tmp_path, {"a": ["GPU-a0"]})


@pytest.fixture
def host(fleet: InProcessFleet) -> FakeHost:
    return fleet.rack["a"]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cleared(fleet: InProcessFleet, clock: Clock) -> Any:
    keeper = MachineClearing(Gateway(fleet.database), AT_ONCE, clock)
    return lambda: keeper.clear_all(lambda machine: runner_of(fleet, machine))


def runner_of(fleet: InProcessFleet, machine: Machine) -> Runner:
    return Runner(fleet.host(machine), root=machine.workdir)


@asynccontextmanager
async def running(dispatcher: GlobalJobDispatcher) -> AsyncIterator[None]:
    task = asyncio.create_task(dispatcher.run())
    try:
        yield
    finally:
        dispatcher.stop()
        await task


async def done(fleet: InProcessFleet, *jobs: str) -> None:
    async with running(fleet.dispatcher()):
        for job in jobs:
            fleet.submit(job)
        for job in jobs:
            await fleet.until(fleet.has(job, "completed"))
        await fleet.until(fleet.is_clean)


async def test_a_folder_in_which_something_lives_is_refused_and_keeps_none_of_the_others(
    fleet: InProcessFleet, host: FakeHost, cleared: Any
) -> None:
    await done(fleet, "one", "two")
    next(iter(host.folders.values())).leaked = True
    await cleared()
    assert len(host.folders) == 1
    host.clean_up()
    await cleared()
    assert host.folders == {}


async def test_a_machine_that_was_lost_is_emptied_before_it_is_cleared(
    fleet: InProcessFleet, host: FakeHost, cleared: Any
) -> None:
    await done(fleet, "job")
    fleet.lose("a")
    await cleared()
    assert len(host.folders) == 1


async def test_files_of_what_runs_are_not_swept(
    fleet: InProcessFleet, host: FakeHost, cleared: Any
) -> None:
    entry = fleet.store.put(b"its data")
    fleet.rack.scripts["job"] = [Script(ticks=10**6)]
    async with running(fleet.dispatcher()):
        fleet.submit("job", files={"data": [entry, 0o644, 8]})
        await fleet.until(lambda: any(a.state == "running" for a in fleet.attempts("job")))
        await cleared()
    (sweep,) = [request for request in host.calls if request.verb == "sweep"]
    assert sweep.body["keep"] == [entry]


async def test_with_a_real_runner_the_folder_is_gone_and_stays_gone(
    database: Database, tmp_path: Path
) -> None:
    """Nothing of a stranger is touched."""
    ((job, epoch),) = write(database, Ended())
    host, root = LocalHost(), tmp_path / "machine"
    runner = Runner(host, root=str(root))
    launch = Launch(job, epoch, JobSpec(("true",)))
    for each in (launch, replace(launch, job="stranger")):
        state = await runner.launch(each)
        while state.state in {RunnerState.CLAIMED, RunnerState.RUNNING}:
            known = {(each.job, epoch): KnownState(state.state, clock=state.clock)}
            (state,) = await runner.wait(known, seconds=10.0)
    keeper = MachineClearing(Gateway(database), AT_ONCE)
    await keeper.clear_all(lambda machine: runner)
    assert [path.name for path in (root / "attempts").iterdir()] == [f"stranger.{epoch}"]
    late = await runner.launch(launch)
    assert (late.state, late.refused and late.refused.code) == ("refused", "lower_epoch")
    await host.close()


async def test_one_machine_that_does_not_answer_holds_up_no_other(
    database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = InProcessFleet(database, tmp_path, {"a": [], "b": ["GPU-b0"], "c": []})
    await done(fleet, "job")
    fleet.rack["a"].cut()

    def runner(machine: Machine) -> Runner:
        if machine.vm_id == "c":
            raise ValueError("a row that somebody wrote by hand")
        return runner_of(fleet, machine)

    await MachineClearing(Gateway(database), AT_ONCE).clear_all(runner)
    assert fleet.rack["b"].folders == {}
    assert "c is not cleared" in caplog.text
