"""A dispatcher on a real database and fake machines: whatever fails, the history satisfies every guarantee.

Each test ends with a check of its history by `tests/history_checker.py`, which uses no code of the dispatcher.
"""

import asyncio
import errno
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from groupwise.jobs.fleet import dispatcher as dispatchers
from groupwise.jobs.fleet.attempts import records
from groupwise.jobs.fleet.attempts.decide import ObservedState, OrphanAction, orphan_action
from groupwise.jobs.fleet.attempts.effects import Side
from groupwise.jobs.fleet.dispatcher import GlobalJobDispatcher
from groupwise.jobs.fleet.machines import observation
from groupwise.jobs.fleet.operations import status
from groupwise.jobs.fleet.operations.actor import Actor
from groupwise.jobs.fleet.queue import failures
from groupwise.jobs.fleet.store.database import Database, database_time
from groupwise.jobs.fleet.store.tables import VM, Attempt, Event, Member
from groupwise.jobs.hosts.answers import MemberState, RunnerState
from groupwise.jobs.hosts.driver import Launch, Runner
from groupwise.jobs.hosts.failures import FailureClass
from groupwise.jobs.hosts.framing import BadAnswer
from groupwise.jobs.hosts.host import Host, OutcomeUnknown, Request, RunnerResponse
from groupwise.jobs.hosts.spec import JobSpec
from tests.fake_hosts import FakeHost, Fault, Script
from tests.in_process_fleet import InProcessFleet, NoJitter


@pytest.fixture
def fleet(database: Database, tmp_path: Path) -> InProcessFleet:
    return InProcessFleet(database, tmp_path, {"a": ["GPU-a0"], "b": ["GPU-b0"]})


@asynccontextmanager
async def running(dispatcher: GlobalJobDispatcher) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(dispatcher.run())
    try:
        yield task
    finally:
        dispatcher.stop()
        await task


async def over(fleet: InProcessFleet, job_id: str | None = None, status: str = "completed") -> None:
    """The job is, and nothing is left of any; every promise was kept."""
    if job_id is not None:
        await fleet.until(fleet.has(job_id, status))
    await fleet.until(fleet.is_clean)
    fleet.check_history()


def epoch_of(fleet: InProcessFleet, job_id: str) -> int:
    return fleet.attempts(job_id)[-1].epoch


def host_of(fleet: InProcessFleet, job_id: str) -> FakeHost:
    return fleet.rack[str(fleet.job(job_id).assigned_vm)]


def begun(fleet: InProcessFleet, job_id: str) -> Callable[[], bool]:
    return lambda: any(a.state == "running" for a in fleet.attempts(job_id))


def event_details(fleet: InProcessFleet, kind: str) -> list[Any]:
    """Details of the events of this kind."""
    query = select(Event.detail).where(Event.kind == kind).order_by(Event.event_id)
    return fleet.database.read(lambda s: list(s.scalars(query)))


def value(fleet: InProcessFleet, column: Any, *where: Any) -> Any:
    return fleet.database.read(lambda s: s.scalar(select(column).where(*where)))


LONG = Script(ticks=10**6)


@asynccontextmanager
async def job_running(
    fleet: InProcessFleet, dispatcher: GlobalJobDispatcher, **asked: Any
) -> AsyncIterator[None]:
    """A dispatcher works, and has begun a job that runs for ever; begun once more, it ends soon."""
    fleet.rack.scripts["job"] = [LONG, Script()]
    async with running(dispatcher):
        fleet.submit("job", **asked)
        await fleet.until(begun(fleet, "job"))
        yield


# the plain way


async def test_jobs_run_to_their_ends(fleet: InProcessFleet) -> None:
    fleet.rack.scripts["bad"] = [Script(code=3, tail="Traceback\nKeyError: 'x'\n")]
    fleet.rack.scripts["wrong"] = [Script(code=2, tail="train: error: there is no --lr\n")]
    async with running(fleet.dispatcher()):
        for job in ("good", "bad", "wrong"):
            fleet.submit(job)
        await fleet.until(fleet.has("good", "completed"))
        await fleet.until(fleet.has("bad", "failed"))
        await over(fleet, "wrong", "failed")
    ends = {job: fleet.job(job) for job in ("good", "bad", "wrong")}
    found = {job: (end.exit_code, end.retry_count) for job, end in ends.items()}
    assert found == {"good": (0, 0), "bad": (3, 2), "wrong": (2, 0)}
    reasons = str(ends["bad"].failure_reason), str(ends["wrong"].failure_reason)
    assert reasons[0].startswith("crashed: exit code 3: KeyError: 'x'")
    assert reasons[1].startswith("user_error: exit code 2: train: error: there is no --lr")
    assert fleet.fetched.logs["bad", epoch_of(fleet, "bad")] == b"Traceback\nKeyError: 'x'\n"
    assert "Traceback" in {
        detail["tail"].partition("\n")[0] for detail in event_details(fleet, "job.failed")
    }


async def test_each_checkpoint_of_a_job_that_keeps_the_last_two_is_mirrored(
    fleet: InProcessFleet,
) -> None:
    """There are two of them for ever; they are others each time."""
    async with job_running(fleet, fleet.dispatcher()):
        folder = host_of(fleet, "job").folders[f"job.{epoch_of(fleet, 'job')}"]
        for count, step in ((1, 10), (2, 20), (2, 30), (2, 40)):
            fleet.fetched.mirrored.clear()
            folder.checkpoints, folder.step = count, step
            await fleet.until(lambda: fleet.fetched.mirrored != [])


async def test_a_part_that_crashes_stops_nothing_else(
    fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three looks at what members ask for, three adoptions and the first drive of the job fail by a bug."""
    left = {"pending_requests": 3, "adopt": 3, "snapshots": 1}

    def buggy(name: str) -> Callable[..., Any]:
        real = getattr(records, name)

        def call(*args: Any) -> Any:
            if left[name]:
                left[name] -= 1
                raise ZeroDivisionError(name)
            return real(*args)

        return call

    for name in left:
        monkeypatch.setattr(records, name, buggy(name))
    async with running(fleet.dispatcher()):
        fleet.submit("job")
        await fleet.until(fleet.has("job", "completed"))
        await fleet.until(lambda: not any(left.values()))
        await over(fleet)


# launches that go wrong


@pytest.mark.parametrize("fault", [Fault.REQUEST_LOST, Fault.ANSWER_LOST, Fault.UNREACHABLE])
async def test_a_call_that_fails_is_a_call_that_is_repeated(
    fleet: InProcessFleet, fault: Fault
) -> None:
    for host in fleet.rack:
        for verb in ("status", "launch", "wait", "log", "manifest", "release"):
            host.fail(verb, fault, times=2)
    async with running(fleet.dispatcher()):
        fleet.submit("job")
        await over(fleet, "job")
    assert len(fleet.attempts("job")) == 1


async def test_after_a_restore_numbers_that_machines_have_seen_are_passed_over(
    fleet: InProcessFleet,
) -> None:
    """Whoever is told of one that is higher goes on above it, and blames nobody."""
    for number in range(4):
        for host in fleet.rack:
            host.highest[f"job-{number}"] = 40 + number
    async with running(fleet.dispatcher()):
        for number in range(4):
            fleet.submit(f"job-{number}")
        await fleet.until(
            lambda: all(fleet.job(f"job-{n}").status == "completed" for n in range(4))
        )
        await over(fleet)
    for number in range(4):
        *refused, last = fleet.attempts(f"job-{number}")
        assert last.epoch > 40 + number
        assert not any(attempt.charged for attempt in refused)
    assert value(fleet, VM.launch_failures, VM.vm_id == "a") == 0
    assert value(fleet, VM.drain_reason, VM.vm_id == "a") is None


async def test_after_a_standstill_nothing_begins_before_all_that_answered_were_looked_at(
    fleet: InProcessFleet,
) -> None:
    """The database may have been restored, and a machine may run what it does not know. That others were looked at already says nothing."""
    looked_at(fleet, "a", observed_round=lambda s: database_time(s) - 1000)
    fleet.submit("job")
    dispatcher = fleet.dispatcher()
    assert dispatcher.unobserved_machines is None
    assert not await dispatcher.knows_what_runs()
    assert dispatcher.unobserved_machines == ["a"]
    looked_at(fleet, "a", observed_round=lambda s: database_time(s) + 1000)
    assert not await dispatcher.knows_what_runs()  # that was another clock
    looked_at(fleet, "a", contact=lambda _: "unreachable")
    assert not await dispatcher.knows_what_runs()  # it may answer now
    looked_at(fleet, "a", contact=lambda _: "untrusted", observed_round=lambda _: 0.0)
    assert await fleet.dispatcher("zero").knows_what_runs()
    looked_at(fleet, "a", contact=lambda _: "ok")
    assert not await dispatcher.knows_what_runs()
    looked_at(fleet, "a", facts=lambda s: {"missed_at": database_time(s)})
    assert await dispatcher.knows_what_runs()
    looked_at(fleet, "a", facts=lambda s: {})
    assert await dispatcher.knows_what_runs()
    assert not await fleet.dispatcher("two").knows_what_runs()
    async with running(fleet.dispatcher("three")):
        looked_at(fleet, "a", observed_round=database_time)
        await over(fleet, "job", "completed")


async def test_beside_what_no_table_knows_jobs_get_what_it_leaves(
    database: Database, tmp_path: Path
) -> None:
    """As after a restore: nothing of it is to be seen on the GPU, yet its machine refuses others there."""
    fleet = InProcessFleet(database, tmp_path, {"a": ["GPU-a0", "GPU-a1"]})
    looked_at(fleet, "a", cpu_slots=lambda _: 2)
    fleet.rack.scripts |= {"old": [Script(ticks=10**6)], "older": [Script(ticks=10**6)]}
    runner, spec = Runner(fleet.rack["a"]), JobSpec(("true",))
    await runner.launch(Launch("old", 7, spec, gpus=("GPU-a0",)))
    await runner.launch(Launch("older", 6, spec, slot=0))
    seen = await runner.observe()
    fleet.database.run(lambda s: observation.apply(s, "a", database_time(s), seen))
    names = {"one": 1, "two": 1, "three": 0, "four": 0}
    async with running(fleet.dispatcher()):
        for name, gpus in names.items():
            fleet.submit(name, resources={"gpus": gpus})
        for name in names:
            await fleet.until(fleet.has(name, "completed"))
            assert [each.outcome for each in fleet.attempts(name)] == ["succeeded"]
    assert sorted(fleet.rack.running()) == [("old", 7), ("older", 6)]


def looked_at(fleet: InProcessFleet, vm_id: str, **columns: Callable[[Session], Any]) -> None:
    def write(session: Session) -> None:
        values = {name: value(session) for name, value in columns.items()}
        session.execute(update(VM).where(VM.vm_id == vm_id).values(**values))

    fleet.database.run(write)


async def test_a_machine_that_launches_nothing_is_drained_and_the_queue_is_not_drained_into_it(
    fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that was refused waits a moment, as in life: else it would be the next to go there, again and again."""
    monkeypatch.setattr(NoJitter, "uniform", lambda _, a, b: min(b, 0.3))  # pyright: ignore[reportUnknownArgumentType, reportUnknownLambdaType]
    fleet.rack["a"].refuses = "disk_full"
    async with running(fleet.dispatcher()):
        for number in range(5):
            fleet.submit(f"job-{number}", resources={"gpus": 1})
        await fleet.until(
            lambda: all(fleet.job(f"job-{n}").status == "completed" for n in range(5))
        )
        await over(fleet)
    assert value(fleet, VM.drain_reason, VM.vm_id == "a").startswith("3 launches in a row failed")
    assert value(fleet, VM.drain_reason, VM.vm_id == "b") is None


async def test_a_job_that_cannot_be_launched_ends_without_draining_machines(
    fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "FREE_RETRIES", 8)
    fleet.rack.scripts["job"] = [Script(refusal="disk_full")]
    async with running(fleet.dispatcher()):
        fleet.submit("job")
        await over(fleet, "job", "failed")
    assert len(fleet.attempts("job")) == failures.FREE_RETRIES + 1
    for vm_id in ("a", "b"):
        assert value(fleet, VM.drain_reason, VM.vm_id == vm_id) is None
        assert value(fleet, VM.launch_failures, VM.vm_id == vm_id) == 1


class HeldFiles:
    """Files that do not arrive on a machine before they may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, host: FakeHost) -> None:
        self.go_on = asyncio.Event()
        self.under_way = 0
        self._call = host.call
        monkeypatch.setattr(host, "call", self)

    async def __call__(self, request: Request, *, timeout: float) -> RunnerResponse:
        if request.verb == "put":
            self.under_way += 1
            try:
                await self.go_on.wait()
            finally:
                self.under_way -= 1
        return await self._call(request, timeout=timeout)


async def test_no_files_are_sent_for_a_cancelled_job(
    fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though its end has to wait for another machine."""
    held = HeldFiles(monkeypatch, fleet.rack["a"])
    sha256 = fleet.store.put(b"print(1)")
    async with running(fleet.dispatcher()):
        fleet.submit("job", resources=GANG, files={"train.py": (sha256, 0o644, 8)})
        await fleet.until(lambda: held.under_way == 1)
        fleet.rack["b"].cut()
        fleet.cancel("job")
        await fleet.until(lambda: held.under_way == 0)
        assert fleet.job("job").status == "running"
        fleet.rack["b"].heal()
        await over(fleet, "job", "cancelled")


async def test_a_file_that_the_control_side_has_lost_is_no_fault_of_machines(
    fleet: InProcessFleet,
) -> None:
    sha256 = fleet.store.put(b"print(1)")
    fleet.submit("job", files={"train.py": (sha256, 0o644, 8)})
    fleet.store.path(sha256).unlink()
    async with running(fleet.dispatcher()):
        await over(fleet, "job", "failed")
    (attempt,) = fleet.attempts("job")
    assert attempt.failure_class == "not_provided"
    said = str(fleet.job("job").failure_reason)
    assert said.startswith("not_provided: the control machine cannot give what the job needs: ")
    assert "train.py is not" in said
    assert "`groupwise fleet resume job`" in said
    assert value(fleet, VM.launch_failures, VM.vm_id == "a") == 0


# silence


async def test_a_machine_that_cannot_be_reached_is_waited_for(fleet: InProcessFleet) -> None:
    fleet.rack.scripts["job"] = [Script(ticks=40)]
    async with running(fleet.dispatcher()):
        fleet.submit("job")
        await fleet.until(begun(fleet, "job"), ticks=False)
        host = host_of(fleet, "job")
        host.cut()
        await fleet.until(lambda: fleet.attempts("job")[0].contact == "unreachable", ticks=False)
        await fleet.until(lambda: not fleet.rack.running())  # it ends while nobody sees it
        assert fleet.job("job").status == "running"
        assert len(fleet.open_reservations()) == 1
        host.heal()
        await over(fleet, "job", "completed")
    assert len(fleet.attempts("job")) == 1
    assert fleet.attempts("job")[0].contact == "ok"
    assert fleet.attempts("job")[0].unreachable_since is None
    assert (
        len(event_details(fleet, "attempt.unreachable")),
        len(event_details(fleet, "attempt.reachable")),
    ) == (
        1,
        1,
    )


async def test_a_launch_that_arrives_after_its_attempt_was_cancelled_begins_nothing(
    fleet: InProcessFleet,
) -> None:
    for host in fleet.rack:
        host.fail("launch", Fault.LATE, times=1000)
    async with running(fleet.dispatcher()):
        fleet.submit("job")
        await fleet.until(lambda: any(h._late for h in fleet.rack))  # pyright: ignore[reportPrivateUsage]
        fleet.cancel("job")
        await fleet.until(fleet.has("job", "cancelled"))
        assert sum([await host.deliver() for host in fleet.rack]) >= 1
        await over(fleet)
    assert fleet.rack.running() == []


async def test_a_launch_that_was_under_way_to_a_lost_machine_finds_itself_void(
    fleet: InProcessFleet,
) -> None:
    for host in fleet.rack:
        host.fail("launch", Fault.LATE)
    async with running(fleet.dispatcher()):
        fleet.submit("job")
        await fleet.until(lambda: any(h._late for h in fleet.rack), ticks=False)  # pyright: ignore[reportPrivateUsage]
        gone = host_of(fleet, "job")
        gone.cut()
        fleet.lose(gone.name)
        await fleet.until(fleet.has("job", "completed"))
        gone.heal()
        await fleet.until(lambda: value(fleet, VM.lost_at, VM.vm_id == gone.name) is None)
        await gone.deliver()
        await over(fleet)


async def test_a_deadman_frees_a_job_whose_launch_may_still_be_on_its_way(
    fleet: InProcessFleet,
) -> None:
    """It arrives when the job runs elsewhere, and begins nothing: its deadman counts from before it was sent."""
    fleet.database.run(lambda s: s.execute(update(VM).values(deadman=100.0)))
    fleet.rack.scripts["job"] = [LONG, LONG]
    for host in fleet.rack:
        host.fail("launch", Fault.LATE, times=1000)
    async with running(fleet.dispatcher()):
        fleet.submit("job")
        await fleet.until(lambda: any(h._late for h in fleet.rack), ticks=False)  # pyright: ignore[reportPrivateUsage]
        gone = host_of(fleet, "job")
        gone.cut()
        for host in fleet.rack:
            host.faultless()
        await fleet.until(lambda: fleet.attempts("job")[0].contact == "unreachable", ticks=False)
        assert fleet.attempts("job")[0].state == "launching"
        [alarm] = [each for each in alarms(fleet) if each["kind"] == "attempt_unreachable"]
        assert "host_lost" in alarm["remedy"], "it ends without an operator"
        fleet.rack.advance(165.0)
        await silent_for(fleet, 165.0)
        await fleet.until(lambda: len(fleet.rack.running()) == 1)
        assert await gone.deliver() >= 1
        assert gone.folders[f"job.{fleet.attempts('job')[0].epoch}"].exit["reason"] == "deadman"
        assert len(fleet.rack.running()) == 1
        gone.heal()
        fleet.cancel("job")
        await over(fleet)
    assert fleet.attempts("job")[0].failure_class == "host_lost"


async def silent_for(fleet: InProcessFleet, age: float, here: float | None = None) -> None:
    """The machines that are silent have been so for this long, by the clock of the database, and by that of the process."""
    await fleet.until(lambda: fleet.silence_noticed, ticks=False)
    fleet.passed = age if here is None else here

    def write(session: Any) -> None:
        for member in session.scalars(select(Member)):
            if "silent_since" in member.handle:
                since = database_time(session) - age
                member.handle = {**member.handle, "silent_since": since}

    fleet.database.run(write)


# what happens to running jobs


async def test_the_last_checkpoint_is_fetched_before_the_next_attempt_is_made(
    fleet: InProcessFleet,
) -> None:
    fleet.rack.scripts["job"] = [Script(ticks=10**6, checkpoints=1), Script()]
    async with running(fleet.dispatcher()):
        fleet.submit("job")
        await fleet.until(lambda: bool(fleet.fetched.mirrored))
        host = host_of(fleet, "job")
        host.cut()
        host.power_off()
        host.boot()
        fleet.fetched.mirrored.clear()
        host.heal()
        await fleet.until(lambda: fleet.attempts("job")[0].state == "ended", ticks=False)
        assert fleet.fetched.mirrored == [("job", fleet.attempts("job")[0].epoch)]


async def test_leftover_processes_keep_their_gpu_reserved_until_they_end(
    fleet: InProcessFleet,
) -> None:
    fleet.rack.scripts["job"] = [Script(leaks=True)]
    async with running(fleet.dispatcher()):
        fleet.submit("job")
        await fleet.until(fleet.has("job", "completed"))
        await fleet.until(lambda: fleet.attempts("job")[0].cleanup == "leaking")
        assert len(fleet.open_reservations()) == 1
        fleet.submit("next")
        await fleet.until(fleet.has("next", "completed"))
        assert fleet.job("next").assigned_vm != fleet.job("job").assigned_vm
        host_of(fleet, "job").clean_up()
        await over(fleet)
    assert len(event_details(fleet, "attempt.leaking")) == 1


# gangs


GANG = {"gpus": 1, "machines": 2}


async def test_a_gang_runs_on_all_its_machines(fleet: InProcessFleet) -> None:
    async with running(fleet.dispatcher()):
        fleet.submit("job", resources=GANG)
        await over(fleet, "job", "completed")
    told = [launch["environment"] for host in fleet.rack for launch in host.launches]
    assert sorted(t["NODE_RANK"] for t in told) == ["0", "1"]
    assert {t["NNODES"] for t in told} == {"2"}
    assert len({(t["MASTER_ADDR"], t["MASTER_PORT"], t["GROUPWISE_RENDEZVOUS"]) for t in told}) == 1


# what nobody drives


async def test_attempts_of_a_lower_epoch_are_killed_and_foreign_work_is_left_alone(
    fleet: InProcessFleet,
) -> None:
    fleet.rack.scripts["job"] = [LONG, Script()]
    fleet.rack.scripts["stranger"] = [LONG]
    fleet.rack["a"].perform(Request("launch", _launch("stranger", 5)))
    async with running(fleet.dispatcher()):
        await fleet.until(lambda: bool(event_details(fleet, "attempt.untracked")))
        fleet.database.run(
            lambda s: s.execute(update(VM).where(VM.vm_id == "a").values(draining=True))
        )
        fleet.submit("job")
        await fleet.until(begun(fleet, "job"))
        epoch = epoch_of(fleet, "job")
        fleet.rack["a"].perform(Request("launch", _launch("job", 0)))
        assert ("job", 0) in fleet.rack.running()
        await fleet.until(lambda: ("job", 0) not in fleet.rack.running())
        assert ("job", epoch) in fleet.rack.running()
        assert ("stranger", 5) in fleet.rack.running()
        assert len(event_details(fleet, "attempt.untracked")) == 1


async def test_a_live_attempt_is_left_alone_whichever_machine_reports_it(
    fleet: InProcessFleet,
) -> None:
    """Machines that share a home folder report each other's attempts."""
    async with job_running(fleet, fleet.dispatcher()):
        known = fleet.database.read(lambda s: records.known_jobs(s, ["job"]))["job"]
        assert (
            orphan_action(epoch_of(fleet, "job"), ObservedState.RUNNING, known)
            is OrphanAction.LEAVE
        )


def _launch(job: str, epoch: int) -> dict[str, Any]:
    return {
        "job": job, "epoch": epoch, "rank": 0, "members": 1, "spec": {"files": {}}, "gpus": [],
    }  # fmt: skip


# dispatchers that come back from the dead


class Gate:
    """A machine to which one dispatcher's launches come through only when it is opened."""

    def __init__(self, host: Host, opened: asyncio.Event, waiting: asyncio.Event) -> None:
        self._host = host
        self._opened = opened
        self._waiting = waiting

    async def call(self, request: Request, *, timeout: float) -> RunnerResponse:
        if request.verb == "launch":
            self._waiting.set()
            await self._opened.wait()
        return await self._host.call(request, timeout=timeout)

    async def close(self) -> None:
        await self._host.close()


def _hand_over(session: Session, owner: str) -> None:
    """As if the lease had run out while nobody but this one was awake to adopt."""
    session.execute(update(Attempt).values(lease_until=database_time(session) + 30.0, owner=owner))


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_dispatcher_that_was_stopped_past_its_lease_launches_late(
    fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    opened, waiting = asyncio.Event(), asyncio.Event()
    fleet.submit("job")
    with monkeypatch.context() as patched:
        patched.setattr(fleet, "host", lambda m: Gate(fleet.rack[m.vm_id], opened, waiting))
        asleep = fleet.dispatcher("asleep")
    async with running(asleep):
        await fleet.until(waiting.is_set)
        async with running(fleet.dispatcher("awake")):
            fleet.database.run(lambda s: _hand_over(s, "awake"))
            if cancelled:
                fleet.cancel("job")
            await fleet.until(fleet.has("job", "cancelled" if cancelled else "completed"))
            await fleet.until(fleet.is_clean)
            opened.set()
            await fleet.until(lambda: not asleep.driven_epochs)
    fleet.check_history()
    assert [a.owner for a in fleet.attempts("job")] == ["awake"]


@pytest.mark.parametrize("work", ["renew", "adopt", "claim"])
async def test_a_lease_is_counted_from_before_it_was_asked_for(
    fleet: InProcessFleet, work: str
) -> None:
    """The database counts it from a moment between question and answer, and the answer may take long."""
    asked: list[float] = []

    def hook(name: str, side: Side) -> None:
        if side is Side.BEFORE and name.endswith(f".{work}"):
            asked.append(time.monotonic())

    fleet.submit("job")
    if work == "adopt":
        await fleet.dispatcher("gone").claim()
        fleet.expire_leases()
    dispatcher = fleet.dispatcher(hook=hook)
    await getattr(dispatcher, work)()
    leased_until = dispatcher._leased_until  # pyright: ignore[reportPrivateUsage]
    assert 0.0 < leased_until <= asked[0] + records.LEASE


async def test_a_dispatcher_that_cannot_renew_stops_before_others_take_over(
    fleet: InProcessFleet, caplog: pytest.LogCaptureFixture
) -> None:
    """Its database is gone for longer than its lease; machines hear nothing of it any more."""
    fleet.rack.scripts["job"] = [LONG]
    away = False

    def hook(name: str, side: Side) -> None:
        if away and side is Side.BEFORE and name.startswith(("lease.", "job.", "attempt.")):
            raise DatabaseIsAway

    dispatcher = fleet.dispatcher(hook=hook)

    def has_let_go() -> bool:
        """Its lease has run out, also where one was under way when the database went."""
        dispatcher._leased_until = 0.0  # pyright: ignore[reportPrivateUsage]
        return not dispatcher.driven_epochs

    async with running(dispatcher):
        fleet.submit("job")
        await fleet.until(begun(fleet, "job"))
        away = True
        await fleet.until(has_let_go, ticks=False)
        assert "lease of 1 attempts" in caplog.text
        assert fleet.rack.running() != []
        fleet.expire_leases()
        away = False
        await fleet.until(lambda: bool(dispatcher.driven_epochs))
        fleet.cancel("job")
        await over(fleet, "job", "cancelled")


class DatabaseIsAway(Exception):
    pass


# a row that leads elsewhere


async def test_an_attempt_is_not_judged_by_another_root_than_its_own(fleet: InProcessFleet) -> None:
    """Its working folder was changed, or was not mounted, or its address is another machine's: nothing there knows of it."""
    async with job_running(fleet, fleet.dispatcher("one")):
        pass
    host = host_of(fleet, "job")
    epoch, own = epoch_of(fleet, "job"), (host.place, dict(host.folders))
    host.place = "another root"
    folder = host.folders.pop(f"job.{epoch}")
    async with running(fleet.dispatcher("two")):
        await fleet.until(lambda: fleet.attempts("job")[0].contact == "unreachable", ticks=False)
        [alarm] = fleet.database.read(lambda s: list(status.alarms(s, Actor("user:test"))))[1:]
        assert alarm["kind"] == "attempt_elsewhere"
        fleet.cancel("job")
        for _ in range(20):
            await asyncio.sleep(0.005)
        assert [a.state for a in fleet.attempts("job")] == ["running"]
        assert host.folders == {}, "nothing is voided there, or killed"
        host.place, host.folders[folder.key] = own[0], folder
        await over(fleet, "job", "cancelled")


# what goes wrong here


def alarms(fleet: InProcessFleet) -> list[Any]:
    return fleet.database.read(lambda s: list(status.alarms(s, Actor("user:test"))))


def stuck(fleet: InProcessFleet) -> list[str]:
    return [each["message"] for each in alarms(fleet) if each["kind"] == "attempt_stuck"]


NOT_TAKEN = [
    OSError(errno.ENOSPC, "No space left on device"),
    BadAnswer("the answer is not JSON"),
    OutcomeUnknown("no answer within 300 s"),
]


@pytest.mark.parametrize("fault", NOT_TAKEN)
async def test_artefacts_that_cannot_be_fetched_are_reported_and_do_not_fail_the_job(
    fleet: InProcessFleet, fault: Exception
) -> None:
    """The disk here is full, or its machine answers all else, so that nobody would see it."""
    fleet.fetched.fault = fault
    async with running(fleet.dispatcher()):
        fleet.submit("job")
        await fleet.until(lambda: bool(stuck(fleet)))
        before = fleet.fetched.collections
        await fleet.until(lambda: fleet.fetched.collections > before + 2)
        assert fleet.job("job").status == "running"
        assert str(fault.args[-1]) in stuck(fleet)[0]
        assert (
            len(event_details(fleet, "attempt.stuck")),
            event_details(fleet, "attempt.unreachable"),
        ) == (1, [])
        fleet.fetched.fault = None
        await fleet.until(lambda: not stuck(fleet))
        await over(fleet, "job")


@pytest.mark.parametrize("fault", NOT_TAKEN[:2])
async def test_a_cancellation_ends_the_fetching_of_what_a_machine_does_not_give(
    fleet: InProcessFleet, fault: Exception
) -> None:
    fleet.fetched.fault = fault
    async with running(fleet.dispatcher()):
        fleet.submit("job")
        await fleet.until(lambda: bool(stuck(fleet)))
        fleet.cancel("job")
        await fleet.until(fleet.has("job", "cancelled"))
        await fleet.until(fleet.is_clean)
    (attempt,) = fleet.attempts("job")
    assert attempt.failure_class == FailureClass.ARTEFACTS
    assert str(fault.args[-1]) in attempt.evidence["because"]


@pytest.mark.parametrize(
    ("before", "after", "asked"),
    [
        (RunnerState.RUNNING, RunnerState.RUNNING, ["kill"]),
        (RunnerState.QUEUED, RunnerState.VOIDED, ["void"]),  # its engine cannot begin it any more
        (RunnerState.QUEUED, RunnerState.RUNNING, ["void", "kill"]),  # that was quicker
    ],
)
async def test_an_ended_attempt_in_an_engines_queue_is_voided_or_killed(
    before: RunnerState, after: RunnerState, asked: list[str]
) -> None:
    told: list[str] = []

    class Stub:
        async def void(self, job: str, epoch: int) -> MemberState:
            told.append("void")
            return MemberState(job, epoch, after)

        async def kill(self, job: str, epoch: int, *, grace: float) -> MemberState:
            told.append("kill")
            return MemberState(job, epoch, RunnerState.EXITED)

    await dispatchers._stop_attempt(Stub(), MemberState("job", 1, before))  # type: ignore[arg-type]
    assert told == asked
