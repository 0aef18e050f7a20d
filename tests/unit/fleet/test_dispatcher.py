"""A dispatcher on a real database and machines of this process: whatever goes wrong, the history keeps every promise.

Each test ends with the judgement of `tests/history_checker.py`, which knows nothing of dispatchers.
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

from groupwise.fleet import dispatcher as dispatchers
from groupwise.fleet.attempts import records
from groupwise.fleet.attempts.effects import Side
from groupwise.fleet.dispatcher import GlobalJobDispatcher
from groupwise.fleet.machines import observation
from groupwise.fleet.queue import failures
from groupwise.fleet.store.database import Database, seconds
from groupwise.fleet.store.tables import VM, Attempt, Event, Member
from groupwise.fleet.verbs import status
from groupwise.fleet.verbs.actor import Actor
from groupwise.hosts.answers import MemberState, RunnerState
from groupwise.hosts.driver import Launch, Runner
from groupwise.hosts.failures import FailureClass
from groupwise.hosts.framing import BadAnswer
from groupwise.hosts.port import Answer, Host, OutcomeUnknown, Request
from groupwise.hosts.spec import JobSpec
from groupwise.testing.fake_hosts import FakeHost, Fault, Script
from tests.in_process_fleet import NoChance, Rig


@pytest.fixture
def rig(database: Database, tmp_path: Path) -> Rig:
    return Rig(database, tmp_path, {"a": ["GPU-a0"], "b": ["GPU-b0"]})


@asynccontextmanager
async def running(dispatcher: GlobalJobDispatcher) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(dispatcher.run())
    try:
        yield task
    finally:
        dispatcher.stop()
        await task


async def over(rig: Rig, job_id: str | None = None, status: str = "completed") -> None:
    """The job is, and nothing is left of any; every promise was kept."""
    if job_id is not None:
        await rig.until(rig.has(job_id, status))
    await rig.until(rig.is_clean)
    rig.judge()


def epoch_of(rig: Rig, job_id: str) -> int:
    return rig.attempts(job_id)[-1].epoch


def host_of(rig: Rig, job_id: str) -> FakeHost:
    return rig.rack[str(rig.job(job_id).assigned_vm)]


def begun(rig: Rig, job_id: str) -> Callable[[], bool]:
    return lambda: any(a.state == "running" for a in rig.attempts(job_id))


def said(rig: Rig, kind: str) -> list[Any]:
    """Details of the events of this kind."""
    query = select(Event.detail).where(Event.kind == kind).order_by(Event.event_id)
    return rig.database.read(lambda s: list(s.scalars(query)))


def value(rig: Rig, column: Any, *where: Any) -> Any:
    return rig.database.read(lambda s: s.scalar(select(column).where(*where)))


LONG = Script(ticks=10**6)


@asynccontextmanager
async def job_running(
    rig: Rig, dispatcher: GlobalJobDispatcher, **asked: Any
) -> AsyncIterator[None]:
    """A dispatcher works, and has begun a job that runs for ever; begun once more, it ends soon."""
    rig.rack.scripts["job"] = [LONG, Script()]
    async with running(dispatcher):
        rig.submit("job", **asked)
        await rig.until(begun(rig, "job"))
        yield


# the plain way


async def test_jobs_run_to_their_ends(rig: Rig) -> None:
    rig.rack.scripts["bad"] = [Script(code=3, tail="Traceback\nKeyError: 'x'\n")]
    rig.rack.scripts["wrong"] = [Script(code=2, tail="train: error: there is no --lr\n")]
    async with running(rig.dispatcher()):
        for job in ("good", "bad", "wrong"):
            rig.submit(job)
        await rig.until(rig.has("good", "completed"))
        await rig.until(rig.has("bad", "failed"))
        await over(rig, "wrong", "failed")
    ends = {job: rig.job(job) for job in ("good", "bad", "wrong")}
    found = {job: (end.exit_code, end.retry_count) for job, end in ends.items()}
    assert found == {"good": (0, 0), "bad": (3, 2), "wrong": (2, 0)}
    reasons = str(ends["bad"].failure_reason), str(ends["wrong"].failure_reason)
    assert reasons[0].startswith("crashed: exit code 3: KeyError: 'x'")
    assert reasons[1].startswith("user_error: exit code 2: train: error: there is no --lr")
    assert rig.fetched.logs["bad", epoch_of(rig, "bad")] == b"Traceback\nKeyError: 'x'\n"
    assert "Traceback" in {detail["tail"].partition("\n")[0] for detail in said(rig, "job.failed")}


async def test_of_a_job_that_keeps_its_last_checkpoints_each_is_mirrored(rig: Rig) -> None:
    """There are two of them for ever; they are others each time."""
    async with job_running(rig, rig.dispatcher()):
        folder = host_of(rig, "job").folders[f"job.{epoch_of(rig, 'job')}"]
        for count, step in ((1, 10), (2, 20), (2, 30), (2, 40)):
            rig.fetched.mirrored.clear()
            folder.checkpoints, folder.step = count, step
            await rig.until(lambda: rig.fetched.mirrored != [])


async def test_a_part_that_crashes_stops_nothing_else(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three looks at wishes, three adoptions and the first drive of the job fail by a bug."""
    left = {"wishes": 3, "adopt": 3, "snapshots": 1}

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
    async with running(rig.dispatcher()):
        rig.submit("job")
        await rig.until(rig.has("job", "completed"))
        await rig.until(lambda: not any(left.values()))
        await over(rig)


# launches that go wrong


@pytest.mark.parametrize("fault", [Fault.REQUEST_LOST, Fault.ANSWER_LOST, Fault.UNREACHABLE])
async def test_a_call_that_fails_is_a_call_that_is_repeated(rig: Rig, fault: Fault) -> None:
    for host in rig.rack:
        for verb in ("status", "launch", "wait", "log", "manifest", "release"):
            host.fail(verb, fault, times=2)
    async with running(rig.dispatcher()):
        rig.submit("job")
        await over(rig, "job")
    assert len(rig.attempts("job")) == 1


async def test_after_a_restore_numbers_that_machines_have_seen_are_passed_over(rig: Rig) -> None:
    """Whoever is told of one that is higher goes on above it, and blames nobody."""
    for number in range(4):
        for host in rig.rack:
            host.highest[f"job-{number}"] = 40 + number
    async with running(rig.dispatcher()):
        for number in range(4):
            rig.submit(f"job-{number}")
        await rig.until(lambda: all(rig.job(f"job-{n}").status == "completed" for n in range(4)))
        await over(rig)
    for number in range(4):
        *refused, last = rig.attempts(f"job-{number}")
        assert last.epoch > 40 + number
        assert not any(attempt.charged for attempt in refused)
    assert value(rig, VM.launch_failures, VM.vm_id == "a") == 0
    assert value(rig, VM.cordoned, VM.vm_id == "a") is None


async def test_after_a_standstill_nothing_begins_before_all_that_answered_were_looked_at(
    rig: Rig,
) -> None:
    """The database may have been restored, and a machine may run what it does not know. That others were looked at already says nothing."""
    looked_at(rig, "a", observed_round=lambda s: seconds(s) - 1000)
    rig.submit("job")
    dispatcher = rig.dispatcher()
    assert dispatcher.not_asked is None
    assert not await dispatcher.knows_what_runs()
    assert dispatcher.not_asked == ["a"]
    looked_at(rig, "a", observed_round=lambda s: seconds(s) + 1000)
    assert not await dispatcher.knows_what_runs()  # that was another clock
    looked_at(rig, "a", contact=lambda _: "unreachable")
    assert not await dispatcher.knows_what_runs()  # it may answer now
    looked_at(rig, "a", contact=lambda _: "untrusted", observed_round=lambda _: 0.0)
    assert await rig.dispatcher("zero").knows_what_runs()
    looked_at(rig, "a", contact=lambda _: "ok")
    assert not await dispatcher.knows_what_runs()
    looked_at(rig, "a", facts=lambda s: {"missed_at": seconds(s)})
    assert await dispatcher.knows_what_runs()
    looked_at(rig, "a", facts=lambda s: {})
    assert await dispatcher.knows_what_runs()
    assert not await rig.dispatcher("two").knows_what_runs()
    async with running(rig.dispatcher("three")):
        looked_at(rig, "a", observed_round=seconds)
        await over(rig, "job", "completed")


async def test_beside_what_no_table_knows_jobs_get_what_it_leaves(
    database: Database, tmp_path: Path
) -> None:
    """As after a restore: nothing of it is to be seen on the GPU, yet its machine refuses others there."""
    rig = Rig(database, tmp_path, {"a": ["GPU-a0", "GPU-a1"]})
    looked_at(rig, "a", cpu_slots=lambda _: 2)
    rig.rack.scripts |= {"old": [Script(ticks=10**6)], "older": [Script(ticks=10**6)]}
    runner, spec = Runner(rig.rack["a"]), JobSpec(("true",))
    await runner.launch(Launch("old", 7, spec, gpus=("GPU-a0",)))
    await runner.launch(Launch("older", 6, spec, slot=0))
    seen = await runner.observe()
    rig.database.run(lambda s: observation.apply(s, "a", seconds(s), seen))
    names = {"one": 1, "two": 1, "three": 0, "four": 0}
    async with running(rig.dispatcher()):
        for name, gpus in names.items():
            rig.submit(name, resources={"gpus": gpus})
        for name in names:
            await rig.until(rig.has(name, "completed"))
            assert [each.outcome for each in rig.attempts(name)] == ["succeeded"]
    assert sorted(rig.rack.running()) == [("old", 7), ("older", 6)]


def looked_at(rig: Rig, vm_id: str, **columns: Callable[[Session], Any]) -> None:
    def write(session: Session) -> None:
        values = {name: value(session) for name, value in columns.items()}
        session.execute(update(VM).where(VM.vm_id == vm_id).values(**values))

    rig.database.run(write)


async def test_a_machine_that_launches_nothing_is_cordoned_and_the_queue_is_not_drained_into_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that was refused waits a moment, as in life: else it would be the next to go there, again and again."""
    monkeypatch.setattr(NoChance, "uniform", lambda _, a, b: min(b, 0.3))  # pyright: ignore[reportUnknownArgumentType, reportUnknownLambdaType]
    rig.rack["a"].refuses = "disk_full"
    async with running(rig.dispatcher()):
        for number in range(5):
            rig.submit(f"job-{number}")
        await rig.until(lambda: all(rig.job(f"job-{n}").status == "completed" for n in range(5)))
        await over(rig)
    assert value(rig, VM.cordoned, VM.vm_id == "a").startswith("3 launches in a row failed")
    assert value(rig, VM.cordoned, VM.vm_id == "b") is None


async def test_one_job_that_nobody_can_launch_cordons_no_machine_and_comes_to_an_end(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "FREE_RETRIES", 8)
    rig.rack.scripts["job"] = [Script(refusal="disk_full")]
    async with running(rig.dispatcher()):
        rig.submit("job")
        await over(rig, "job", "failed")
    assert len(rig.attempts("job")) == failures.FREE_RETRIES + 1
    for vm_id in ("a", "b"):
        assert value(rig, VM.cordoned, VM.vm_id == vm_id) is None
        assert value(rig, VM.launch_failures, VM.vm_id == vm_id) == 1


class HeldFiles:
    """Files that do not arrive on a machine before they may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, host: FakeHost) -> None:
        self.go_on = asyncio.Event()
        self.under_way = 0
        self._call = host.call
        monkeypatch.setattr(host, "call", self)

    async def __call__(self, request: Request, *, timeout: float) -> Answer:
        if request.verb == "put":
            self.under_way += 1
            try:
                await self.go_on.wait()
            finally:
                self.under_way -= 1
        return await self._call(request, timeout=timeout)


async def test_nobody_sends_files_of_what_is_cancelled(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though its end has to wait for another machine."""
    held = HeldFiles(monkeypatch, rig.rack["a"])
    sha256 = rig.store.put(b"print(1)")
    async with running(rig.dispatcher()):
        rig.submit("job", resources=GANG, files={"train.py": (sha256, 0o644, 8)})
        await rig.until(lambda: held.under_way == 1)
        rig.rack["b"].cut()
        rig.cancel("job")
        await rig.until(lambda: held.under_way == 0)
        assert rig.job("job").status == "running"
        rig.rack["b"].heal()
        await over(rig, "job", "cancelled")


async def test_a_file_that_the_control_side_has_lost_is_no_fault_of_machines(rig: Rig) -> None:
    sha256 = rig.store.put(b"print(1)")
    rig.submit("job", files={"train.py": (sha256, 0o644, 8)})
    rig.store.path(sha256).unlink()
    async with running(rig.dispatcher()):
        await over(rig, "job", "failed")
    (attempt,) = rig.attempts("job")
    assert attempt.failure_class == "not_provided"
    said = str(rig.job("job").failure_reason)
    assert said.startswith("not_provided: the control machine cannot give what the job needs: ")
    assert "train.py is not in the fleet's store of files" in said
    assert "`groupwise fleet retry job`" in said
    assert value(rig, VM.launch_failures, VM.vm_id == "a") == 0


# silence


async def test_a_machine_that_cannot_be_reached_is_waited_for(rig: Rig) -> None:
    rig.rack.scripts["job"] = [Script(ticks=40)]
    async with running(rig.dispatcher()):
        rig.submit("job")
        await rig.until(begun(rig, "job"), ticks=False)
        host = host_of(rig, "job")
        host.cut()
        await rig.until(lambda: rig.attempts("job")[0].contact == "unreachable", ticks=False)
        await rig.until(lambda: not rig.rack.running())  # it ends while nobody sees it
        assert rig.job("job").status == "running"
        assert len(rig.open_reservations()) == 1
        host.heal()
        await over(rig, "job", "completed")
    assert len(rig.attempts("job")) == 1
    assert rig.attempts("job")[0].contact == "ok"
    assert rig.attempts("job")[0].unreachable_since is None
    assert (len(said(rig, "attempt.unreachable")), len(said(rig, "attempt.reachable"))) == (1, 1)


async def test_a_launch_that_arrives_after_its_attempt_was_cancelled_begins_nothing(
    rig: Rig,
) -> None:
    for host in rig.rack:
        host.fail("launch", Fault.LATE, times=1000)
    async with running(rig.dispatcher()):
        rig.submit("job")
        await rig.until(lambda: any(h._late for h in rig.rack))  # pyright: ignore[reportPrivateUsage]
        rig.cancel("job")
        await rig.until(rig.has("job", "cancelled"))
        assert sum([await host.deliver() for host in rig.rack]) >= 1
        await over(rig)
    assert rig.rack.running() == []


async def test_a_launch_that_was_under_way_to_a_lost_machine_finds_itself_void(rig: Rig) -> None:
    for host in rig.rack:
        host.fail("launch", Fault.LATE)
    async with running(rig.dispatcher()):
        rig.submit("job")
        await rig.until(lambda: any(h._late for h in rig.rack), ticks=False)  # pyright: ignore[reportPrivateUsage]
        gone = host_of(rig, "job")
        gone.cut()
        rig.lose(gone.name)
        await rig.until(rig.has("job", "completed"))
        gone.heal()
        await rig.until(lambda: value(rig, VM.lost_at, VM.vm_id == gone.name) is None)
        await gone.deliver()
        await over(rig)


async def test_a_deadman_frees_a_job_whose_launch_may_still_be_on_its_way(rig: Rig) -> None:
    """It arrives when the job runs elsewhere, and begins nothing: its deadman counts from before it was sent."""
    rig.database.run(lambda s: s.execute(update(VM).values(deadman=100.0)))
    rig.rack.scripts["job"] = [LONG, LONG]
    for host in rig.rack:
        host.fail("launch", Fault.LATE, times=1000)
    async with running(rig.dispatcher()):
        rig.submit("job")
        await rig.until(lambda: any(h._late for h in rig.rack), ticks=False)  # pyright: ignore[reportPrivateUsage]
        gone = host_of(rig, "job")
        gone.cut()
        for host in rig.rack:
            host.faultless()
        await rig.until(lambda: rig.attempts("job")[0].contact == "unreachable", ticks=False)
        assert rig.attempts("job")[0].state == "launching"
        rig.rack.advance(165.0)
        await silent_for(rig, 165.0)
        await rig.until(lambda: len(rig.rack.running()) == 1)
        assert await gone.deliver() >= 1
        assert gone.folders[f"job.{rig.attempts('job')[0].epoch}"].exit["reason"] == "deadman"
        assert len(rig.rack.running()) == 1
        gone.heal()
        rig.cancel("job")
        await over(rig)
    assert rig.attempts("job")[0].failure_class == "host_lost"


async def silent_for(rig: Rig, age: float, here: float | None = None) -> None:
    """The machines that are silent have been so for this long, by the clock of the database, and by that of the process."""
    await rig.until(lambda: rig.silence_noticed, ticks=False)
    rig.passed = age if here is None else here

    def write(session: Any) -> None:
        for member in session.scalars(select(Member)):
            if "silent_since" in member.handle:
                since = seconds(session) - age
                member.handle = {**member.handle, "silent_since": since}

    rig.database.run(write)


# what happens to running jobs


async def test_what_a_machine_saved_last_is_fetched_before_the_next_attempt_is_made(
    rig: Rig,
) -> None:
    rig.rack.scripts["job"] = [Script(ticks=10**6, checkpoints=1), Script()]
    async with running(rig.dispatcher()):
        rig.submit("job")
        await rig.until(lambda: bool(rig.fetched.mirrored))
        host = host_of(rig, "job")
        host.cut()
        host.power_off()
        host.boot()
        rig.fetched.mirrored.clear()
        host.heal()
        await rig.until(lambda: rig.attempts("job")[0].state == "ended", ticks=False)
        assert rig.fetched.mirrored == [("job", rig.attempts("job")[0].epoch)]


async def test_what_a_job_leaves_behind_keeps_its_gpu_until_it_is_gone(rig: Rig) -> None:
    rig.rack.scripts["job"] = [Script(leaks=True)]
    async with running(rig.dispatcher()):
        rig.submit("job")
        await rig.until(rig.has("job", "completed"))
        await rig.until(lambda: rig.attempts("job")[0].cleanup == "leaking")
        assert len(rig.open_reservations()) == 1
        rig.submit("next")
        await rig.until(rig.has("next", "completed"))
        assert rig.job("next").assigned_vm != rig.job("job").assigned_vm
        host_of(rig, "job").clean_up()
        await over(rig)
    assert len(said(rig, "attempt.leaking")) == 1


# gangs


GANG = {"gpus": 1, "machines": 2}


async def test_a_gang_runs_on_all_its_machines(rig: Rig) -> None:
    async with running(rig.dispatcher()):
        rig.submit("job", resources=GANG)
        await over(rig, "job", "completed")
    told = [launch["environment"] for host in rig.rack for launch in host.launches]
    assert sorted(t["NODE_RANK"] for t in told) == ["0", "1"]
    assert {t["NNODES"] for t in told} == {"2"}
    assert len({(t["MASTER_ADDR"], t["MASTER_PORT"], t["GROUPWISE_RENDEZVOUS"]) for t in told}) == 1


# what nobody drives


async def test_what_a_machine_runs_of_a_lower_epoch_is_killed_and_foreign_work_is_left_alone(
    rig: Rig,
) -> None:
    rig.rack.scripts["job"] = [LONG, Script()]
    rig.rack.scripts["stranger"] = [LONG]
    rig.rack["a"].perform(Request("launch", _launch("stranger", 5)))
    async with running(rig.dispatcher()):
        await rig.until(lambda: bool(said(rig, "attempt.quarantined")))
        rig.database.run(
            lambda s: s.execute(update(VM).where(VM.vm_id == "a").values(draining=True))
        )
        rig.submit("job")
        await rig.until(begun(rig, "job"))
        epoch = epoch_of(rig, "job")
        rig.rack["a"].perform(Request("launch", _launch("job", 0)))
        assert ("job", 0) in rig.rack.running()
        await rig.until(lambda: ("job", 0) not in rig.rack.running())
        assert ("job", epoch) in rig.rack.running()
        assert ("stranger", 5) in rig.rack.running()
        assert len(said(rig, "attempt.quarantined")) == 1


def _launch(job: str, epoch: int) -> dict[str, Any]:
    return {
        "job": job,
        "epoch": epoch,
        "rank": 0,
        "members": 1,
        "spec": {"files": {}},
        "gpus": [],
    }


# dispatchers that come back from the dead


class Gate:
    """A machine to which one dispatcher's launches come through only when it is opened."""

    def __init__(self, host: Host, opened: asyncio.Event, waiting: asyncio.Event) -> None:
        self._host = host
        self._opened = opened
        self._waiting = waiting

    async def call(self, request: Request, *, timeout: float) -> Answer:
        if request.verb == "launch":
            self._waiting.set()
            await self._opened.wait()
        return await self._host.call(request, timeout=timeout)

    async def close(self) -> None:
        await self._host.close()


def _hand_over(session: Session, owner: str) -> None:
    """As if the lease had run out while nobody but this one was awake to adopt."""
    session.execute(update(Attempt).values(lease_until=seconds(session) + 30.0, owner=owner))


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_dispatcher_that_was_stopped_past_its_lease_launches_late(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    opened, waiting = asyncio.Event(), asyncio.Event()
    rig.submit("job")
    with monkeypatch.context() as patched:
        patched.setattr(rig, "host", lambda m: Gate(rig.rack[m.vm_id], opened, waiting))
        asleep = rig.dispatcher("asleep")
    async with running(asleep):
        await rig.until(waiting.is_set)
        async with running(rig.dispatcher("awake")):
            rig.database.run(lambda s: _hand_over(s, "awake"))
            if cancelled:
                rig.cancel("job")
            await rig.until(rig.has("job", "cancelled" if cancelled else "completed"))
            await rig.until(rig.is_clean)
            opened.set()
            await rig.until(lambda: not asleep.driven)
    rig.judge()
    assert [a.owner for a in rig.attempts("job")] == ["awake"]


@pytest.mark.parametrize("work", ["renew", "adopt", "claim"])
async def test_a_lease_is_counted_from_before_it_was_asked_for(rig: Rig, work: str) -> None:
    """The database counts it from a moment between question and answer, and the answer may take long."""
    asked: list[float] = []

    def hook(name: str, side: Side) -> None:
        if side is Side.BEFORE and name.endswith(f".{work}"):
            asked.append(time.monotonic())

    rig.submit("job")
    if work == "adopt":
        await rig.dispatcher("gone").claim()
        rig.expire_leases()
    dispatcher = rig.dispatcher(hook=hook)
    await getattr(dispatcher, work)()
    mine_until = dispatcher._mine_until  # pyright: ignore[reportPrivateUsage]
    assert 0.0 < mine_until <= asked[0] + records.LEASE


async def test_a_dispatcher_that_cannot_renew_stops_before_others_take_over(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """Its database is gone for longer than its lease; machines hear nothing of it any more."""
    rig.rack.scripts["job"] = [LONG]
    away = False

    def hook(name: str, side: Side) -> None:
        if away and side is Side.BEFORE and name.startswith(("lease.", "job.", "attempt.")):
            raise DatabaseIsAway

    dispatcher = rig.dispatcher(hook=hook)

    def has_let_go() -> bool:
        """Its lease has run out, also where one was under way when the database went."""
        dispatcher._mine_until = 0.0  # pyright: ignore[reportPrivateUsage]
        return not dispatcher.driven

    async with running(dispatcher):
        rig.submit("job")
        await rig.until(begun(rig, "job"))
        away = True
        await rig.until(has_let_go, ticks=False)
        assert "the lease of 1 attempts could not be renewed" in caplog.text
        assert rig.rack.running() != []
        rig.expire_leases()
        away = False
        await rig.until(lambda: bool(dispatcher.driven))
        rig.cancel("job")
        await over(rig, "job", "cancelled")


class DatabaseIsAway(Exception):
    pass


# a row that leads elsewhere


async def test_an_attempt_is_not_judged_by_another_root_than_its_own(rig: Rig) -> None:
    """Its working folder was changed, or was not mounted, or its address is another machine's: nothing there knows of it."""
    async with job_running(rig, rig.dispatcher("one")):
        pass
    host = host_of(rig, "job")
    epoch, own = epoch_of(rig, "job"), (host.place, dict(host.folders))
    host.place = "another root"
    folder = host.folders.pop(f"job.{epoch}")
    async with running(rig.dispatcher("two")):
        await rig.until(lambda: rig.attempts("job")[0].contact == "unreachable", ticks=False)
        [alarm] = rig.database.read(lambda s: list(status.alarms(s, Actor("user:test"))))[1:]
        assert alarm["kind"] == "attempt_elsewhere"
        rig.cancel("job")
        for _ in range(20):
            await asyncio.sleep(0.005)
        assert [a.state for a in rig.attempts("job")] == ["running"]
        assert host.folders == {}, "nothing is voided there, or killed"
        host.place, host.folders[folder.key] = own[0], folder
        await over(rig, "job", "cancelled")


# what goes wrong here


def alarms(rig: Rig) -> list[Any]:
    return rig.database.read(lambda s: list(status.alarms(s, Actor("user:test"))))


def stuck(rig: Rig) -> list[str]:
    return [each["message"] for each in alarms(rig) if each["kind"] == "attempt_stuck"]


NOT_TAKEN = [
    OSError(errno.ENOSPC, "No space left on device"),
    BadAnswer("the answer is no JSON"),
    OutcomeUnknown("no answer within 300 s"),
]


@pytest.mark.parametrize("fault", NOT_TAKEN)
async def test_what_a_job_left_and_cannot_be_fetched_is_told_and_ends_no_job(
    rig: Rig, fault: Exception
) -> None:
    """The disk here is full, or its machine answers all else, so that nobody would see it."""
    rig.fetched.fault = fault
    async with running(rig.dispatcher()):
        rig.submit("job")
        await rig.until(lambda: bool(stuck(rig)))
        before = rig.fetched.collections
        await rig.until(lambda: rig.fetched.collections > before + 2)
        assert rig.job("job").status == "running"
        assert str(fault.args[-1]) in stuck(rig)[0]
        assert (len(said(rig, "attempt.stuck")), said(rig, "attempt.unreachable")) == (1, [])
        rig.fetched.fault = None
        await rig.until(lambda: not stuck(rig))
        await over(rig, "job")


@pytest.mark.parametrize("fault", NOT_TAKEN[:2])
async def test_a_cancellation_ends_the_fetching_of_what_a_machine_does_not_give(
    rig: Rig, fault: Exception
) -> None:
    rig.fetched.fault = fault
    async with running(rig.dispatcher()):
        rig.submit("job")
        await rig.until(lambda: bool(stuck(rig)))
        rig.cancel("job")
        await rig.until(rig.has("job", "cancelled"))
        await rig.until(rig.is_clean)
    (attempt,) = rig.attempts("job")
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
async def test_what_is_over_and_waits_for_an_engine_never_begins(
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

    await dispatchers._end(Stub(), MemberState("job", 1, before))  # type: ignore[arg-type]
    assert told == asked
