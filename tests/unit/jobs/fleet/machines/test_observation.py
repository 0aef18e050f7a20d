import asyncio
import copy
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from groupwise.jobs.fleet.machines import observation
from groupwise.jobs.fleet.operations import jobs, status
from groupwise.jobs.fleet.operations.actor import Actor
from groupwise.jobs.fleet.queue import untracked_processes
from groupwise.jobs.fleet.requeue import RequeueManager
from groupwise.jobs.fleet.store import database as databases
from groupwise.jobs.fleet.store import epochs
from groupwise.jobs.fleet.store.database import Database
from groupwise.jobs.fleet.store.tables import (
    GPU,
    VM,
    Attempt,
    Event,
    Job,
    Member,
    Reservation,
)
from groupwise.jobs.hosts import answers, keys
from groupwise.jobs.hosts.answers import Observation
from groupwise.jobs.hosts.framing import BadAnswer
from tests.unit.jobs.fleet.queue_helpers import (
    claim_some,
    claimed_ids,
    execute,
    statuses,
    submit,
)

KEY = keys.parse_host_key(
    "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIDlRAkn4LWJgZI0BlxNTR1aRJX4sMuoTdxkKPJVyCoIz"
)
OTHER = keys.parse_host_key(
    "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ1nCLkXP8W9XkR4YBoo1V7sWn4Uvfa2yJ1Q3nS3vKp3"
)


def gpu(index: int, uuid: str | None = None, **more: Any) -> dict[str, Any]:
    return {
        "index": index,
        "uuid": uuid or f"GPU-{index}",
        "model": "A100",
        "memory_mb": 40960,
        "memory_used_mb": 3,
        "utilisation": 0,
        "temperature": 30,
        "mig": False,
    } | more


def seen(*gpus: dict[str, Any], boot_id: str = "boot-1", **more: Any) -> Observation:
    document = {
        "boot_id": boot_id, "time": 1.0, "load": [0.5, 0.5, 0.5], "cpus": 8, "ram_mb": 64000,
        "ram_free_mb": 60000, "disk_free_mb": 100000, "gpus": list(gpus), "apps": [],
        "probe": {"status": "ok", "lines_not_read": [], "exit": 0}, "attempts": [],
        "quarantined": [],
    }  # fmt: skip
    document |= more
    document["probe"] = {"apps": document["probe"]["status"]} | document["probe"]
    return answers.parse_observation(document)


def kept(session: Session, rows: Sequence[Any]) -> list[Any]:
    """To be looked at after the transaction."""
    for row in rows:
        session.expunge(row)
    return list(rows)


class Fleet:
    """Short words for what the tests do and look at."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.start = database.run(databases.database_time) - 10_000
        """So that all looks of a test lie behind us, as looks do."""
        self.round = 0

    def look(self, *gpus: dict[str, Any], at: float | None = None, **more: Any) -> bool:
        self.round += 1
        asked = self.start + self.round * 15 if at is None else at
        return self.database.run(lambda s: observation.apply(s, "vm", asked, seen(*gpus, **more)))

    def miss(self, problem: str = "no connection", at: float | None = None) -> int:
        self.round += 1
        asked = self.start + self.round * 15 if at is None else at
        return self.database.run(lambda s: observation.record_miss(s, "vm", asked, problem))

    def show(self, key: keys.HostKey, *, pin: bool = False) -> None:
        self.database.run(lambda s: observation.record_shown_key(s, "vm", key, pin=pin))

    @property
    def vm(self) -> VM:
        return self.database.read(lambda s: kept(s, [s.get_one(VM, "vm")])[0])

    def set(self, **values: Any) -> None:
        self.database.run(lambda s: s.execute(update(VM).values(**values)))

    def gpus(self) -> dict[str, GPU]:
        rows = self.database.read(lambda s: kept(s, s.scalars(select(GPU)).all()))
        return {row.uuid: row for row in rows}

    def observed(self) -> dict[str, str]:
        return {uuid: row.observed for uuid, row in self.gpus().items()}

    def events(self, prefix: str = "") -> list[str]:
        kinds = self.database.read(
            lambda s: s.scalars(select(Event.kind).order_by(Event.event_id)).all()
        )
        return [kind for kind in kinds if kind.startswith(prefix)]

    def reserve(self, uuid: str, *, job_id: str = "job", state: str = "reserved") -> int:
        def write(session: Session) -> int:
            if session.get(Job, job_id) is None:
                session.add(Job(job_id=job_id))
                session.flush()
            attempt = Attempt(job_id=job_id, generation=0, number=0, created_at=0.0, state=state)
            session.add(attempt)
            session.flush()
            session.add(Member(epoch=attempt.epoch, rank=0, vm_id="vm"))
            number = session.scalars(select(GPU.gpu_id).where(GPU.uuid == uuid)).one()
            session.add(
                Reservation(
                    vm_id="vm", gpu_id=number, epoch=attempt.epoch, rank=0, reserved_at=self.start
                )
            )
            return attempt.epoch

        return self.database.run(write)

    def not_before(self, job_id: str) -> float:
        return self.database.read(lambda s: s.get_one(Job, job_id).not_before)

    def release(self, epoch: int, at: float) -> None:
        self.database.run(
            lambda s: s.execute(
                update(Reservation).where(Reservation.epoch == epoch).values(released_at=at)
            )
        )


@pytest.fixture
def fleet(database: Database) -> Fleet:
    database.run(lambda s: s.add(VM(vm_id="vm", user="u", host_key=str(KEY))))
    return Fleet(database)


def test_a_first_observation_makes_a_machine_usable_and_wakes_pending_jobs(fleet: Fleet):
    submit(fleet.database, "waits", gpus=1)
    assert claimed_ids(fleet.database) == []
    assert fleet.look(gpu(0), gpu(1), at=fleet.database.run(databases.database_time))
    vm = fleet.vm
    assert (vm.contact, vm.degraded, vm.boot_id, vm.problem) == ("ok", False, "boot-1", None)
    assert vm.facts["cpus"] == 8
    assert vm.last_polled is not None
    assert fleet.observed() == {"GPU-0": "ok", "GPU-1": "ok"}
    assert statuses(fleet.database) == {"waits": "queued"}
    assert fleet.events("vm.") == ["vm.reachable"]
    before = fleet.events()
    fleet.look(gpu(0), gpu(1), at=fleet.database.run(databases.database_time))
    assert fleet.events() == before


def running(job: str, epoch: int, state: str = "running", **more: Any) -> dict[str, Any]:
    return {"job": job, "epoch": epoch, "state": state, **more}


EXIT = {"code": 1, "signal": None, "reason": "exited"}


SAID: dict[str, Any] = {
    "boot_id": "boot-1", "time": 1.0, "load": [0.5, 0.5, 0.5], "cpus": 8, "ram_mb": 64000, "ram_free_mb": 60000,
    "disk_free_mb": 100000, "probe": {"status": "ok", "apps": "ok", "lines_not_read": ["x"], "exit": 0, "said": "x"},
    "gpus": [gpu(0)], "apps": [{"uuid": "GPU-0", "pid": 1, "memory_mb": 10, "attempt": "stranger.5"}],
    "attempts": [running("stranger", 5, "exited", exit=EXIT | {"seconds": 1.5}, pid=4, started_at=1.0, survivors=1, gpus=["GPU-0"])],
    "quarantined": [{"what": "folder", "detail": "x", "pid": 5}], "unremoved": ["x"],
}  # fmt: skip


def leaves(document: Any) -> Iterator[tuple[Any, Any]]:
    """Each place that holds a value: what it is in, and its key there."""
    each = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in list(each):
        yield document, key
        if isinstance(value, dict | list):
            yield from leaves(value)


def test_hostile_observations_are_rejected_or_stored(fleet: Fleet):
    """Everything that a machine says, in turn, as one that lies may say it: refused as no answer, or written down."""
    odd = (2**31, 2**63, -(2**63), 10**400, 1e308, math.inf, math.nan, "x" * 100_000, None, [], {})
    refused = tried = 0
    for value in odd:
        for number in range(len(list(leaves(SAID)))):
            document = copy.deepcopy(SAID)
            within, key = list(leaves(document))[number]
            within[key] = value
            tried += 1
            try:
                observed = answers.parse_observation(document)
            except BadAnswer:
                refused += 1
                continue
            at = fleet.start + tried
            apply = partial(observation.apply, vm_id="vm", asked_at=at, observation=observed)
            assert fleet.database.run(apply)
    assert tried / 4 < refused < tried


def strays(fleet: Fleet) -> list[tuple[str, int, float]]:
    found = untracked_processes.on_machine(fleet.vm)
    return [(each["job_id"], each["epoch"], each["since"]) for each in found]


def test_untracked_processes_are_reported_with_their_machine_while_they_run(fleet: Fleet):
    fleet.look(gpu(0))
    own = fleet.reserve("GPU-0")
    here = [running("job", own), running("stranger", 5), running("gone", 6, "lost")]
    fleet.look(gpu(0), attempts=[*here, running("doctor-0123456789", 1)])
    ((job, epoch, since),) = strays(fleet)
    assert (job, epoch) == ("stranger", 5)
    assert since >= fleet.start
    fleet.look(gpu(0), attempts=[*here, running("job", own + 1)])
    assert strays(fleet)[0] == ("stranger", 5, since)
    assert strays(fleet)[1][:2] == ("job", own + 1)
    fleet.miss()
    assert strays(fleet)[0] == ("stranger", 5, since)
    fleet.look(gpu(0), attempts=[running("job", own), running("stranger", 5, "lost")])
    assert strays(fleet) == []


def test_the_job_of_what_stands_in_no_table_does_not_begin_meanwhile(fleet: Fleet):
    """As after a restore from a backup: the machine runs what was begun since."""
    fleet.look(gpu(0), gpu(1))
    job = submit(fleet.database, "back", gpus=1)
    cancelled = submit(fleet.database, "over", gpus=1)
    fleet.database.run(lambda s: jobs.cancel(s, Actor("user:x"), cancelled))
    now = fleet.database.run(databases.database_time)
    fleet.look(gpu(0), gpu(1), at=now, attempts=[running("back", 7), running("over", 8)])
    assert claimed_ids(fleet.database) == []
    shown = fleet.database.run(lambda s: jobs.show(s, Actor("user:x"), job))
    assert any("vm runs back.7" in why for why in shown["waiting"])
    fleet.database.run(lambda s: jobs.retry(s, Actor("user:x"), cancelled))
    assert claimed_ids(fleet.database) == []
    execute(fleet.database, "UPDATE jobs SET not_before = 1")
    asyncio.run(RequeueManager(fleet.database).sweep())  # whoever is heard says it himself
    assert fleet.not_before("back") == 1
    fleet.set(contact="unreachable")
    asyncio.run(RequeueManager(fleet.database).sweep())
    assert fleet.not_before("back") > now + 100
    fleet.look(gpu(0), gpu(1), at=now + 0.5, attempts=[running("back", 7), running("over", 8)])
    fleet.look(gpu(0), gpu(1), at=now + 1, attempts=[running("over", 8)])
    assert claimed_ids(fleet.database) == ["back"]
    fleet.look(gpu(0), gpu(1), at=now + 2)
    assert claimed_ids(fleet.database) == ["over"]
    made = fleet.database.read(lambda s: s.scalars(select(Attempt.epoch)).all())
    assert sorted(made) == [9, 10]


@pytest.mark.parametrize(
    "alive",
    [
        {"attempts": [running("back", 7, "lost", survivors=2, gpus=["GPU-0"])]},
        {"attempts": [running("back", 7, "exited", survivors=1, gpus=["GPU-0"], exit=EXIT)]},
        {"quarantined": [{"what": "process", "detail": "back.7", "pid": pid} for pid in (5, 6)]},
    ],
    ids=["its supervisor was killed", "it could not be killed", "its folder is gone"],
)
def test_processes_without_a_supervisor_hold_their_job_back(fleet: Fleet, alive: dict[str, Any]):
    fleet.look(gpu(0))
    submit(fleet.database, "back", gpus=1)
    now = fleet.database.run(databases.database_time)
    fleet.look(gpu(0), at=now, **alive)
    assert [each[:2] for each in strays(fleet)] == [("back", 7)]
    if "attempts" in alive:
        assert untracked_processes.holding(fleet.vm.facts) == untracked_processes.Holding(
            whole=frozenset({"GPU-0"})
        )
    assert claimed_ids(fleet.database) == []
    over = [running("back", 7, "lost", survivors=0, gpus=["GPU-0"])]
    fleet.look(gpu(0), at=now + 1, attempts=over)
    assert strays(fleet) == []
    assert claimed_ids(fleet.database) == ["back"]


def test_numbers_of_attempts_continue_above_what_machines_have_seen(fleet: Fleet):
    gpus, seen = [gpu(0), gpu(1), gpu(2)], 40
    fleet.look(*gpus)
    own = fleet.reserve("GPU-0")
    fleet.look(*gpus, attempts=[running("job", own), running("other", seen, "lost")])
    assert fleet.reserve("GPU-1", job_id="next") == seen + 1
    fleet.look(*gpus, attempts=[running("other", seen, "lost")])
    fleet.look(*gpus, attempts=[running("other", seen + epochs.MAX_AHEAD + 2)])
    assert fleet.reserve("GPU-2", job_id="third") == seen + 2


def test_resources_of_untracked_attempts_are_not_assigned_until_they_end(fleet: Fleet):
    """Its machine refuses others there, also where nothing of it is seen on the GPU."""
    gpus = [gpu(0), gpu(1), gpu(2)]
    fleet.set(cpu_slots=2)
    now = fleet.database.run(databases.database_time)
    holding = [
        running("old", 7, gpus=["GPU-0"]),
        running("older", 6, gpus=["GPU-1"], share_mb=30_000),
        running("oldest", 5, slot=0),
        running("forged", 4, slot=7),
    ]
    fleet.look(*gpus, at=now, attempts=holding)
    for name in ("one", "two"):
        submit(fleet.database, name, gpus=1)
        submit(fleet.database, f"cpu-{name}", gpus=0)
        submit(fleet.database, f"part-{name}", gpus=1, share_mb=10_000)
    made = {each.job_id: each.placement.seats[0] for each in claim_some(fleet.database)}
    assert {job: [g.uuid for g in seat.gpus] or seat.slot for job, seat in made.items()} == {
        "one": ["GPU-2"], "part-one": ["GPU-1"], "cpu-one": 1,
    }  # fmt: skip
    assert statuses(fleet.database)["two"] == "pending"
    fleet.look(*gpus, at=now + 1, attempts=holding)
    assert claimed_ids(fleet.database) == []
    fleet.look(*gpus, at=now + 2)
    assert sorted(claimed_ids(fleet.database)) == ["cpu-two", "part-two", "two"]


def test_observations_dated_in_the_future_are_replaced(fleet: Fleet):
    now = fleet.database.run(databases.database_time)
    fleet.look(gpu(0), at=now)
    fleet.set(observed_round=now + 3600, facts={"missed_at": now + 3600})
    assert fleet.look(gpu(0, mig=True), at=now + 1)
    assert fleet.vm.observed_round == now + 1
    fleet.set(observed_round=now + 3600, facts={"missed_at": now + 3600}, misses=1)
    assert [fleet.miss(at=now + at) for at in (2, 3, 8)] == [2, 2, 3]
    assert fleet.vm.contact == "unreachable"


def test_an_older_look_never_overwrites_a_newer_one(fleet: Fleet):
    fleet.look(gpu(0), at=fleet.start + 100)
    assert not fleet.look(gpu(0, mig=True), at=fleet.start + 90)
    assert not fleet.look(gpu(0, mig=True), at=fleet.start + 100)
    assert fleet.miss(at=fleet.start + 90) == 0
    assert fleet.observed() == {"GPU-0": "ok"}
    assert fleet.vm.misses == 0


def test_a_vanished_gpu_is_missing_until_it_is_back(fleet: Fleet):
    fleet.look(gpu(0), gpu(1))
    fleet.reserve("GPU-1")
    fleet.look(gpu(0))
    assert fleet.observed() == {"GPU-0": "ok", "GPU-1": "missing"}
    fleet.look(gpu(0), gpu(1))
    assert fleet.observed() == {"GPU-0": "ok", "GPU-1": "ok"}
    assert fleet.events("gpu.observed") == ["gpu.observed"] * 2
    held = select(func.count()).where(Reservation.released_at.is_(None))
    assert fleet.database.read(lambda s: s.scalar(held)) == 1, "no look closes a reservation"


def test_absence_proves_nothing_where_the_probe_was_not_answered_whole(fleet: Fleet):
    probes: tuple[dict[str, Any], ...] = (
        {"status": "failed", "exit": 9}, {"status": "hung"}, {"status": "garbage", "lines_not_read": ["%%%"]},
        {"status": "ok", "lines_not_read": ["Unable to determine the device handle"]}, {"status": "absent"},
    )  # fmt: skip
    whole = (gpu(0), gpu(1, mig=True))
    for probe in probes:
        fleet.look(*whole)
        assert (fleet.vm.degraded, fleet.vm.problem) == (False, None)
        assert fleet.look(probe=probe)
        assert fleet.observed() == {"GPU-0": "ok", "GPU-1": "mig"}
        assert fleet.vm.degraded
        assert "nvidia-smi" in (fleet.vm.problem or "")


def test_one_gpu_that_is_lost_leaves_the_others_in_use(fleet: Fleet):
    line = "Unable to determine the device handle for GPU1: 0000:0B:00.0: Unknown Error"
    fleet.look(gpu(0), gpu(1), gpu(2))
    fleet.look(gpu(0), gpu(2), probe={"status": "ok", "lost": [line]})
    assert fleet.observed() == {"GPU-0": "ok", "GPU-1": "missing", "GPU-2": "ok"}
    assert line in (fleet.gpus()["GPU-1"].detail or "")
    assert (fleet.vm.degraded, line in (fleet.vm.problem or "")) == (False, True)
    told = fleet.database.read(lambda s: list(status.alarms(s, Actor("user:x"))))
    assert [line in alarm["message"] for alarm in told if alarm["kind"] == "degraded"] == [True]
    submit(fleet.database, "waits", gpus=3)
    now = fleet.database.run(databases.database_time)
    fleet.look(gpu(0), probe={"status": "ok", "lines_not_read": ["%%%"]}, at=now)
    assert fleet.observed() == {"GPU-0": "ok", "GPU-1": "degraded", "GPU-2": "degraded"}
    assert "%%%" in (fleet.gpus()["GPU-2"].detail or "")
    assert claimed_ids(fleet.database) == []
    waiting = fleet.database.run(lambda s: jobs.show(s, Actor("user:x"), "waits"))["waiting"]
    assert any("GPU 2" in reason and "%%%" in reason for reason in waiting)
    fleet.look(gpu(0), gpu(1), gpu(2), at=now + 1)
    assert (fleet.vm.problem, {*fleet.observed().values()}) == (None, {"ok"})


def test_a_display_uses_a_gpu_only_by_its_memory(fleet: Fleet):
    display = app("GPU-0") | {"graphics": True}
    fleet.look(gpu(0, memory_used_mb=701), apps=[display])
    assert fleet.observed() == {"GPU-0": "foreign_busy"}
    assert "--idle-memory-mb" in (fleet.gpus()["GPU-0"].detail or "")
    fleet.set(idle_memory_mb=900)
    fleet.look(gpu(0, memory_used_mb=701), apps=[display])
    assert fleet.observed() == {"GPU-0": "ok"}
    fleet.look(gpu(0, memory_used_mb=701), apps=[display, app("GPU-0")])
    assert fleet.observed() == {"GPU-0": "foreign_busy"}


def test_a_gpu_is_not_free_if_its_processes_are_unknown(fleet: Fleet):
    fleet.look(gpu(0), apps=[app("GPU-0")])
    fleet.look(gpu(0), probe={"status": "ok", "apps": "hung"})
    assert fleet.observed() == {"GPU-0": "foreign_busy"}
    assert fleet.vm.degraded
    assert "who is on its GPUs" in (fleet.vm.problem or "")


def app(uuid: str, attempt: str | None = None, pid: int | None = 7) -> dict[str, Any]:
    return {"uuid": uuid, "pid": pid, "memory_mb": 100, "attempt": attempt}


def test_a_process_of_the_attempt_that_holds_the_gpu_is_not_foreign(fleet: Fleet):
    fleet.look(gpu(0), gpu(1))
    epoch = fleet.reserve("GPU-0")
    busy = gpu(0, memory_used_mb=30000)
    fleet.look(busy, gpu(1), apps=[app("GPU-0", f"job.{epoch}")])
    assert fleet.observed() == {"GPU-0": "ok", "GPU-1": "ok"}
    fleet.look(busy, gpu(1), apps=[app("GPU-1", f"job.{epoch}")])
    assert fleet.observed()["GPU-1"] == "foreign_busy"
    fleet.look(busy, gpu(1), apps=[app("GPU-0", f"job.{epoch}"), app("GPU-0", "stranger.1")])
    assert fleet.observed()["GPU-0"] == "foreign_busy"


def test_a_process_of_an_attempt_released_after_the_poll_began_is_not_foreign(fleet: Fleet):
    fleet.look(gpu(0))
    epoch = fleet.reserve("GPU-0")
    at_work = app("GPU-0", f"job.{epoch}")
    fleet.release(epoch, fleet.start + 1000)
    fleet.look(gpu(0), apps=[at_work], at=fleet.start + 999)
    assert fleet.observed() == {"GPU-0": "ok"}
    fleet.look(gpu(0), apps=[at_work], at=fleet.start + 1001)
    assert fleet.observed() == {"GPU-0": "foreign_busy"}


def test_unreserved_gpu_memory_in_use_counts_as_foreign(fleet: Fleet):
    fleet.look(gpu(0, memory_used_mb=501), gpu(1, memory_used_mb=500))
    assert fleet.observed() == {"GPU-0": "foreign_busy", "GPU-1": "ok"}
    fleet.look(gpu(0, memory_used_mb=None, utilisation=None), gpu(1))
    assert fleet.observed()["GPU-0"] == "ok"
    fleet.reserve("GPU-1")
    fleet.look(gpu(0), gpu(1, memory_used_mb=20000))
    assert fleet.observed()["GPU-1"] == "ok"


def test_three_misses_make_it_unreachable_and_one_answer_ends_that(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
):
    fleet.look(gpu(0))
    assert [fleet.miss("cut"), fleet.miss("cut")] == [1, 2]
    assert (fleet.vm.contact, fleet.vm.problem) == ("ok", "cut")
    assert fleet.miss("cut") == 3
    vm = fleet.vm
    assert (vm.contact, vm.unreachable_since) == ("unreachable", vm.observed_round), (
        "since its last answer"
    )
    fleet.miss("cut")
    assert caplog.text.count("does not answer") == 1
    assert fleet.observed() == {"GPU-0": "ok"}
    fleet.look(gpu(0))
    vm = fleet.vm
    assert (vm.contact, vm.misses, vm.unreachable_since, vm.problem) == ("ok", 0, None, None)
    assert fleet.events("vm.") == ["vm.reachable", "vm.unreachable", "vm.reachable"]


def test_several_pollers_do_not_count_the_same_silence_twice(fleet: Fleet):
    fleet.look(gpu(0), at=fleet.start)
    assert [fleet.miss(at=fleet.start + s) for s in (15, 15.1, 15.2, 30, 31)] == [1, 1, 1, 2, 2]


class TestKeys:
    def test_trust_on_first_use_pins_the_first_and_no_other(self, fleet: Fleet):
        fleet.set(host_key=None)
        fleet.show(KEY, pin=True)
        assert (fleet.vm.contact, fleet.vm.host_key) == ("new", str(KEY))
        fleet.show(OTHER, pin=True)
        assert (fleet.vm.contact, fleet.vm.host_key) == ("untrusted", str(KEY))
        fleet.show(KEY)
        assert (fleet.vm.contact, fleet.vm.seen_host_key) == ("new", None)
        assert fleet.look(gpu(0))

    def test_a_changed_host_key_stops_all_use_until_an_operator_confirms_it(
        self, fleet: Fleet, caplog: pytest.LogCaptureFixture
    ):
        fleet.look(gpu(0))
        for _ in range(3):
            fleet.show(OTHER)
        assert fleet.vm.contact == "untrusted"
        assert "CHANGED" in (fleet.vm.problem or "")
        assert caplog.text.count("CHANGED") == 1
        assert fleet.database.read(observation.barred_machines) == {"vm"}
        assert not fleet.look(gpu(0)), "a kept connection says nothing against it"
        fleet.miss("cut")
        assert "CHANGED" in (fleet.vm.problem or "")
        fleet.set(host_key=str(OTHER), seen_host_key=None, contact="new")
        assert fleet.look(gpu(0))
        assert fleet.vm.contact == "ok"


def test_a_card_that_another_machine_has_is_not_given_away_twice(fleet: Fleet):
    """One machine under two names: by two addresses, by two users, or as the local one and by SSH."""
    fleet.look(gpu(0), gpu(1))
    fleet.database.run(lambda s: s.add(VM(vm_id="twin", user="v", host_key=str(KEY))))
    asked = fleet.start + 100
    fleet.database.run(lambda s: observation.apply(s, "twin", asked, seen(gpu(0), gpu(2))))

    def states() -> dict[tuple[str, str], tuple[str, str | None]]:
        query = select(GPU.vm_id, GPU.uuid, GPU.observed, GPU.detail)
        rows = fleet.database.read(lambda s: s.execute(query).all())
        return {(vm, uuid): (observed, detail) for vm, uuid, observed, detail in rows}

    names = [gpu(n)["uuid"] for n in range(3)]
    assert states()["vm", names[0]] == ("ok", None)
    assert states()["twin", names[0]][0] == "degraded"
    assert "vm has the same" in str(states()["twin", names[0]][1])
    assert states()["twin", names[2]] == ("ok", None)
    fleet.look(gpu(0), gpu(1))
    assert states()["vm", names[0]] == ("ok", None), "who came first keeps it"
    fleet.database.run(lambda s: s.execute(update(VM).where(VM.vm_id == "vm").values(active=False)))
    fleet.database.run(lambda s: observation.apply(s, "twin", asked + 15, seen(gpu(0), gpu(2))))
    assert states()["twin", names[0]] == ("ok", None)


def test_renumbered_indices_follow_the_uuid(fleet: Fleet):
    fleet.look(gpu(0, "GPU-a"), gpu(1, "GPU-b"))
    numbers = {uuid: row.gpu_id for uuid, row in fleet.gpus().items()}
    fleet.look(gpu(0, "GPU-b"), gpu(1, "GPU-a"))
    assert {uuid: (row.gpu_id, row.index) for uuid, row in fleet.gpus().items()} == {
        "GPU-a": (numbers["GPU-a"], 1),
        "GPU-b": (numbers["GPU-b"], 0),
    }
