import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from sqlalchemy import insert, select, update

from groupwise.core.waiting import cancel_and_wait
from groupwise.jobs.clouds.schedulers import SchedulerClient
from groupwise.jobs.fleet import poller as pollers
from groupwise.jobs.fleet.attempts.records import Machine
from groupwise.jobs.fleet.poller import Pace, Poller
from groupwise.jobs.fleet.store.database import Database
from groupwise.jobs.fleet.store.tables import GPU, VM, Event
from groupwise.jobs.hosts import keys
from groupwise.jobs.hosts.driver import Runner
from groupwise.jobs.hosts.host import (
    HostError,
    HostKeyError,
    HostUnreachable,
    OutcomeUnknown,
    Request,
    RunnerResponse,
)
from tests.processes import wait_until_async

KEY = keys.parse_host_key(
    "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIDlRAkn4LWJgZI0BlxNTR1aRJX4sMuoTdxkKPJVyCoIz"
)
OTHER = keys.parse_host_key(
    "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ1nCLkXP8W9XkR4YBoo1V7sWn4Uvfa2yJ1Q3nS3vKp3"
)
QUICK = Pace(interval=0.05, longest=0.05, listed=0.02, probe=1, answer=1, spread=0, least=0.001)


class Rack:
    """Machines by name: what each answers, and how it was asked."""

    def __init__(self) -> None:
        self.failing: dict[str, HostError] = {}
        self.hanging: dict[str, asyncio.Event] = {}
        self.keys: dict[str, keys.HostKey | HostError] = {}
        self.asked: list[str] = []
        self.keys_asked: list[str] = []
        self.open: dict[str, int] = {}
        self.at_once: dict[str, int] = {}
        self.most_at_once = 0
        self.probes: list[Any] = []

    def reach(self, machine: Machine) -> "RackHost":
        self.open[machine.vm_id] = self.open.get(machine.vm_id, 0) + 1
        return RackHost(self, machine.vm_id)

    async def read_key(self, machine: Machine) -> keys.HostKey:
        self.keys_asked.append(machine.vm_id)
        shown = self.keys.get(machine.vm_id, KEY)
        if isinstance(shown, HostError):
            raise shown
        return shown


class RackHost:
    def __init__(self, rack: Rack, name: str) -> None:
        self.rack = rack
        self.name = name

    async def call(self, request: Request, *, timeout: float) -> RunnerResponse:
        rack, name = self.rack, self.name
        assert request.verb == "observe"
        rack.asked.append(name)
        rack.probes.append(request.body.get("probe"))
        rack.at_once[name] = rack.at_once.get(name, 0) + 1
        rack.most_at_once = max(rack.most_at_once, *rack.at_once.values())
        try:
            if name in rack.hanging:
                await rack.hanging[name].wait()
            if name in rack.failing:
                raise rack.failing[name]
            return RunnerResponse(observed(name))
        finally:
            rack.at_once[name] -= 1

    async def close(self) -> None:
        self.rack.open[self.name] -= 1


def observed(name: str) -> dict[str, Any]:
    gpu = {"index": 0, "uuid": f"GPU-{name}", "model": "A100", "memory_mb": 1, "mig": False}
    return {
        "boot_id": "boot", "time": 1.0, "load": [0.0], "cpus": 4, "ram_mb": 8000, "ram_free_mb": 4000, "disk_free_mb": 9000,
        "gpus": [gpu], "apps": [], "probe": {"status": "ok", "apps": "ok", "lines_not_read": [], "exit": 0}, "attempts": [],
        "quarantined": [],
    }  # fmt: skip


class Fleet:
    def __init__(self, database: Database) -> None:
        self.database = database
        self.rack = Rack()

    def add(self, *names: str, **more: Any) -> None:
        values = {"user": "u", "host_key": str(KEY)} | more
        rows = [{"vm_id": name, **values} for name in names]
        self.database.run(lambda s: s.execute(insert(VM), rows))

    def set(self, name: str, **values: Any) -> None:
        chosen = update(VM).where(VM.vm_id == name).values(**values)
        self.database.run(lambda s: s.execute(chosen))

    def get(self, name: str, column: Any) -> Any:
        return self.database.read(lambda s: s.scalars(select(column).where(VM.vm_id == name)).one())

    def contact(self, name: str) -> str:
        return self.get(name, VM.contact)

    def kinds(self) -> list[str]:
        return self.database.read(lambda s: list(s.scalars(select(Event.kind))))

    def poller(self, **more: Any) -> Poller:
        given = {"pace": QUICK, "reach": self.rack.reach, "read_key": self.rack.read_key} | more
        return Poller(self.database, **given)

    @asynccontextmanager
    async def polled(self, **more: Any) -> AsyncIterator[Poller]:
        poller = self.poller(**more)
        running = asyncio.create_task(poller.run())
        try:
            yield poller
        finally:
            await cancel_and_wait(running)


@pytest.fixture
def fleet(database: Database) -> Fleet:
    return Fleet(database)


async def test_every_machine_is_looked_at_again_and_again_on_one_connection(fleet: Fleet):
    fleet.add("a", "b")
    async with fleet.polled():
        await wait_until_async(lambda: min(fleet.rack.asked.count(n) for n in "ab") >= 3)
        assert fleet.rack.open == {"a": 1, "b": 1}
    assert fleet.rack.open == {"a": 0, "b": 0}
    assert [fleet.contact("a"), fleet.contact("b")] == ["ok", "ok"]
    assert fleet.database.read(lambda s: sorted(s.scalars(select(GPU.uuid)))) == ["GPU-a", "GPU-b"]


async def test_a_row_is_enough_and_one_that_goes_is_left_alone(fleet: Fleet):
    async with fleet.polled():
        fleet.add("late", probe=["my-smi", "-x"])
        await wait_until_async(lambda: fleet.contact("late") == "ok")
        assert fleet.rack.probes[0] == ["my-smi", "-x"]
        fleet.set("late", active=False)
        await wait_until_async(lambda: fleet.rack.open["late"] == 0)
        asked = len(fleet.rack.asked)
        fleet.add("other")
        await wait_until_async(lambda: fleet.rack.asked.count("other") >= 3)
        assert fleet.rack.asked.count("late") == asked


async def test_a_hanging_machine_is_polled_once_at_a_time_and_delays_no_other(fleet: Fleet):
    fleet.rack.hanging["stuck"] = asyncio.Event()
    fleet.add("stuck", "fine")
    async with fleet.polled():
        await wait_until_async(lambda: fleet.rack.asked.count("fine") >= 5)
        assert fleet.rack.asked.count("stuck") == 1
        fleet.rack.hanging.pop("stuck").set()
        await wait_until_async(lambda: fleet.contact("stuck") == "ok")
    assert fleet.rack.most_at_once == 1


async def test_without_a_pinned_key_nothing_but_the_key_is_asked_for(fleet: Fleet):
    fleet.add("new", host_key=None)
    async with fleet.polled():
        await wait_until_async(lambda: fleet.rack.keys_asked.count("new") >= 3)
        assert fleet.contact("new") == "untrusted"
        assert fleet.rack.asked == []
        assert fleet.rack.open == {}
        fleet.set("new", host_key=str(KEY), seen_host_key=None, contact="new")
        await wait_until_async(lambda: fleet.contact("new") == "ok")


async def test_a_changed_key_ends_all_use_until_the_pinned_one_is_shown_again(fleet: Fleet):
    fleet.add("a", host_key=None)
    async with fleet.polled(trust_on_first_use=True):
        await wait_until_async(lambda: fleet.contact("a") == "ok")
        assert fleet.get("a", VM.host_key) == str(KEY)
        fleet.rack.keys_asked.clear()
        fleet.rack.failing["a"] = HostKeyError("another key", str(OTHER))
        fleet.rack.keys["a"] = OTHER
        await wait_until_async(lambda: fleet.contact("a") == "untrusted")
        await wait_until_async(lambda: fleet.rack.open["a"] == 0)
        await wait_until_async(lambda: fleet.rack.keys_asked)
        asked = fleet.rack.asked.count("a")
        fleet.rack.keys_asked.clear()
        await wait_until_async(lambda: len(fleet.rack.keys_asked) >= 3)
        assert fleet.rack.asked.count("a") == asked
        assert fleet.get("a", VM.host_key) == str(KEY)
        del fleet.rack.failing["a"]
        fleet.rack.keys["a"] = KEY
        await wait_until_async(lambda: fleet.contact("a") == "ok")


async def test_where_its_engine_does_not_answer_nothing_is_placed_there(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
):
    away = True

    async def ask() -> None:
        if away:
            raise HostUnreachable("Slurm does not answer there: timed out")

    def scheduler(machine: Machine, host: Any) -> SchedulerClient | None:
        return (
            None
            if machine.engine is None
            else SchedulerClient(Runner(host), ask, lambda _: never())
        )

    async def never() -> str:
        raise AssertionError("no options are tried")

    monkeypatch.setattr(pollers, "scheduler_of", scheduler)
    fleet.add("own")
    fleet.add("slurm", engine={"name": "slurm"})
    async with fleet.polled():
        await wait_until_async(lambda: fleet.get("slurm", VM.problem))
        assert "Slurm does not answer" in fleet.get("slurm", VM.problem)
        assert fleet.get("slurm", VM.contact) == "new"
        away = False
        await wait_until_async(lambda: fleet.contact("slurm") == "ok")
    assert ["true"] in fleet.rack.probes


async def test_a_silent_machine_becomes_unreachable_and_recovers(fleet: Fleet):
    fleet.add("a")
    async with fleet.polled():
        await wait_until_async(lambda: fleet.contact("a") == "ok")
        fleet.rack.failing["a"] = OutcomeUnknown("no answer")
        await wait_until_async(lambda: fleet.get("a", VM.misses) == 1)
        fleet.database.run(
            lambda s: s.execute(update(VM).values(misses=2, facts={}))
        )  # misses count only where they lie apart
        await wait_until_async(lambda: fleet.contact("a") == "unreachable")
        assert fleet.get("a", VM.problem) == "no answer"
        del fleet.rack.failing["a"]
        await wait_until_async(lambda: fleet.contact("a") == "ok")
    assert [k for k in fleet.kinds() if k.startswith("vm.")] == [
        "vm.reachable",
        "vm.unreachable",
        "vm.reachable",
    ]


async def test_an_unusable_machine_row_does_not_end_polling(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
):
    def reach(machine: Machine) -> RackHost:
        if machine.ip_address == "bad":
            raise ValueError("no address")
        return fleet.rack.reach(machine)

    fleet.add("a", ip_address="bad")
    async with fleet.polled(reach=reach):
        await wait_until_async(lambda: caplog.text.count("polling machine a failed") >= 2)
        fleet.set("a", ip_address="127.0.0.1")
        await wait_until_async(lambda: fleet.contact("a") == "ok")


async def test_a_database_that_is_away_is_waited_for(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    fleet.add("a")
    away = True
    real = fleet.database.read_in_thread

    async def read(fn: Any) -> Any:
        if away:
            raise pollers.RunError("the database is away")
        return await real(fn)

    monkeypatch.setattr(fleet.database, "read_in_thread", read)
    async with fleet.polled():
        await wait_until_async(lambda: "the database is away" in caplog.text)
        away = False
        await wait_until_async(lambda: fleet.contact("a") == "ok")
    assert caplog.text.count("the database is away") == 1
