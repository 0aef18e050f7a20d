"""Rows of a fleet behind which a real Slurm of two nodes begins jobs, beside a machine that begins them itself.

1. A job waits in Slurm's queue for as long as Slurm likes, and says what for; then it runs, and comes back as from every machine.
2. No more jobs are given to Slurm than the row has places.
3. What Slurm, or somebody, ends goes on from its checkpoint, and whose fault it was is told apart.
4. What is cancelled in the queue never begins, whoever cancels it.
5. However often a dispatcher dies on the way, or the controller is away, a job is executed once.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, update

from groupwise.fleet.attempts.effects import Death, Gateway, Hook, Side
from groupwise.fleet.dispatcher import GlobalJobDispatcher, Parts
from groupwise.fleet.files.artefacts import Collector
from groupwise.fleet.files.logs import LogMirror
from groupwise.fleet.files.mirror import CheckpointMirror
from groupwise.fleet.poller import Pace, Poller
from groupwise.fleet.queue import admission
from groupwise.fleet.queue.request import from_document
from groupwise.fleet.store.database import Database, connect
from groupwise.fleet.store.tables import Attempt, Job, Reservation
from groupwise.fleet.up import Hosts
from groupwise.fleet.verbs import jobs, machines
from groupwise.fleet.verbs.actor import Actor
from groupwise.hosts import engines
from groupwise.hosts.files import BlobStore
from tests import slurm
from tests.fleet_databases import copied
from tests.fleet_rig import NoChance, SilentBell, nothing, quick
from tests.integration.fleet.test_up import fleet_in, until
from tests.slurm import Cluster

pytestmark = pytest.mark.fleet
LONGEST = 60.0
"""Seconds for anything, on a machine with other work."""
SOMEBODY = Actor("user:test")
PACE = Pace(interval=0.3, longest=0.3, listed=0.1, spread=0.0, least=0.1)
SAYS = """\
import os, pathlib, sys
with open(sys.argv[1], "a") as file:
    file.write(os.environ["GROUPWISE_ATTEMPT"] + "\\n")
pathlib.Path("outputs").mkdir(exist_ok=True)
pathlib.Path("outputs/gpus").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
print("on", os.environ.get("SLURM_JOB_PARTITION", "no node"), flush=True)
"""
SAVES = """\
import hashlib, json, os, pathlib, signal, sys
if "RESUME_FROM" in os.environ:
    print("from", pathlib.Path(os.environ["RESUME_FROM"], "w").read_text(), os.environ["PREVIOUS_FAILURE"])
    sys.exit(0)
folder = pathlib.Path("outputs/checkpoints/step-1")
folder.mkdir(parents=True)
(folder / "w").write_bytes(b"one")
entry = {"size": 3, "sha256": hashlib.sha256(b"one").hexdigest()}
(folder / "manifest.json").write_text(json.dumps({"step": 1, "files": {"w": entry}}))
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
signal.pause()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with slurm.cluster() as found:
        yield found


class Fleet:
    """A poller and a dispatcher in this process, with real files and a real database."""

    def __init__(self, database: Database, folder: Path, cluster: Cluster) -> None:
        self.database = database
        self.folder = folder
        self.cluster = cluster
        self.told = folder / "told"
        """To which every execution adds a line."""
        self.hosts = Hosts()
        self._playing: dict[GlobalJobDispatcher | Poller, asyncio.Task[None]] = {}

    def add(self, name: str, engine: Mapping[str, Any] | None = None, **more: Any) -> None:
        new = machines.NewMachine(
            name, transport="local", workdir=str(self.folder / name), engine=engine, **more
        )
        self.database.run(lambda s: machines.add(s, SOMEBODY, new))

    def begin(self, hook: Hook = nothing) -> None:
        """A dispatcher, and the poller unless there is one."""
        if not any(isinstance(each, Poller) for each in self._playing):
            poller = Poller(self.database, pace=PACE, chance=NoChance())
            self._playing[poller] = asyncio.create_task(poller.run())
        gateway, store = Gateway(self.database, hook), BlobStore(self.folder / "blobs")
        parts = Parts(
            database=self.database,
            host=self.hosts,
            bell=SilentBell(),
            logs=LogMirror(self.folder / "logs", gateway),
            checkpoints=CheckpointMirror(store, gateway, keep=2),
            collector=Collector(self.folder / "artefacts", store, gateway),
            store=store,
        )
        dispatcher = GlobalJobDispatcher(parts, quick(), gateway=gateway)
        self._playing[dispatcher] = asyncio.create_task(dispatcher.run())

    async def end(self) -> None:
        for each, task in self._playing.items():
            each.stop() if isinstance(each, GlobalJobDispatcher) else task.cancel()
        await asyncio.gather(*self._playing.values(), return_exceptions=True)
        self._playing.clear()
        await self.hosts.close()

    async def until_dead(self) -> None:
        """The dispatcher whose hook says so."""
        [task] = [t for each, t in self._playing.items() if not isinstance(each, Poller)]
        await asyncio.wait([task], timeout=LONGEST)
        assert isinstance(task.exception(), BaseExceptionGroup | Death)
        self.database.run(lambda s: s.execute(update(Attempt).values(lease_until=0.0)))
        self._playing = {each: t for each, t in self._playing.items() if t is not task}

    # what people do

    def submit(self, job_id: str, script: str = SAYS, **more: Any) -> None:
        asked = {
            "arguments": [sys.executable, "-c", script, str(self.told)],
            "resources": {"gpus": 0},
            "checkpoints": ["outputs"],
            "artefacts": ["outputs"],
        }
        request = from_document({**asked, **more})
        self.database.run(
            lambda s: admission.submit(
                s, request, actor="user:test", project="default", job_id=job_id
            )
        )

    def partition(self, state: str) -> None:
        """DOWN: what is in its queue waits; UP."""
        self.cluster.run("scontrol", "update", "PartitionName=gpu", f"State={state}")

    # what is seen

    def job(self, job_id: str) -> dict[str, Any]:
        return self.database.read(lambda s: jobs.show(s, SOMEBODY, job_id))

    def machine(self, name: str) -> dict[str, Any]:
        return self.database.read(lambda s: machines.show(s, SOMEBODY, name))

    def attempts(self, job_id: str) -> list[dict[str, Any]]:
        """The oldest first."""
        return sorted(self.job(job_id)["attempts"], key=lambda each: each["epoch"])

    def states(self, job_id: str) -> list[str]:
        return [each["state"] for each in self.attempts(job_id)]

    def ends(self, job_id: str) -> list[tuple[str | None, str | None, bool | None]]:
        """Of its attempts: outcome, class of failure, whether that is charged."""
        found = self.attempts(job_id)
        return [(each["outcome"], each["failure_class"], each["charged"]) for each in found]

    def log(self, job_id: str) -> str:
        return (self.folder / "logs" / f"{job_id}.log").read_text()

    def queue(self, job_id: str, states: str = "all") -> list[str]:
        """Numbers of Slurm's jobs for it."""
        lines = self.cluster.run("squeue", "-h", "-t", states, "-o", "%i|%j|%Z").splitlines()
        ours = (line.split("|") for line in lines if str(self.folder) in line)
        return [number for number, name, _ in ours if name.startswith(f"{job_id}.")]

    def executions(self) -> list[str]:
        """Jobs, in the order in which they were executed."""
        lines = self.told.read_text().split() if self.told.exists() else []
        return [line.rpartition(".")[0] for line in lines]

    async def until(self, condition: Callable[[], Any], what: str) -> Any:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LONGEST):
                while not (found := condition()):  # noqa: ASYNC110  (of what other processes do)
                    await asyncio.sleep(0.05)
                return found
        rows = self.database.read(lambda s: [(j.job_id, j.status) for j in s.scalars(select(Job))])
        said = (self.cluster.folder / "controller.out").read_text()[-2000:]
        raise AssertionError(f"waited in vain for {what}: {rows}\n{said}")

    async def until_is(self, job_id: str, status: str) -> None:
        await self.until(lambda: self.job(job_id)["status"] == status, f"{job_id} is {status}")

    async def until_waits(self, job_id: str, word: str) -> str:
        def said() -> str:
            return "; ".join(self.job(job_id)["waiting"])

        return await self.until(lambda: word in said() and said(), f"{job_id} waits: {word}")

    async def until_clean(self) -> None:
        held = select(Reservation).where(Reservation.released_at.is_(None))
        await self.until(
            lambda: not self.database.read(lambda s: s.scalars(held).all()), "all is free"
        )


@pytest.fixture
async def fleet(
    cluster: Cluster, migrated_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Fleet]:
    monkeypatch.setenv("SLURM_CONF", str(cluster.configuration))
    monkeypatch.setattr(engines, "LOOK_SECONDS", 0.3)
    database = connect(copied(migrated_file, tmp_path))
    made = Fleet(database, tmp_path, cluster)
    try:
        yield made
    finally:
        await made.end()
        database.close()
        made.partition("UP")
        if numbers := cluster.run("squeue", "-h", "-o", "%i").split():
            cluster.run("scancel", *numbers)


async def test_a_job_waits_says_what_for_and_comes_back(fleet: Fleet) -> None:
    fleet.add("slurm", {"name": "slurm", "gpus": 2, "options": ["--cpus-per-task=1"]})
    fleet.partition("DOWN")
    fleet.begin()
    await fleet.until(lambda: fleet.machine("slurm")["state"] == "ok", "the first look")
    fleet.submit("job", resources={"gpus": 2})
    said = await fleet.until_waits("job", "pending")
    assert "it was placed on slurm: job " in said
    assert "of Slurm is pending (PartitionDown)" in said
    assert fleet.states("job") == ["launching"]
    seen = fleet.machine("slurm")
    assert (seen["total_slots"], seen["available_slots"], seen["gpus"]) == (8, 7, [])
    fleet.partition("UP")
    await fleet.until_is("job", "completed")
    await fleet.until_clean()
    assert fleet.job("job")["waiting"] == []
    assert fleet.log("job") == "on gpu\n"
    [gpus] = (fleet.folder / "artefacts" / "job").rglob("gpus")
    assert gpus.read_text() == "0,1"
    assert fleet.machine("slurm")["available_slots"] == 8


async def test_no_more_are_in_slurm_than_there_are_places(fleet: Fleet) -> None:
    fleet.add("slurm", {"name": "slurm", "slots": 2})
    fleet.partition("DOWN")
    for name in ("a", "b", "c"):
        fleet.submit(name)
    fleet.begin()
    await fleet.until_waits("b", "pending (")
    assert "all 2 places for jobs of Slurm are taken" in await fleet.until_waits("c", "places")
    assert fleet.queue("c") == []
    fleet.partition("UP")
    for name in ("a", "b", "c"):
        await fleet.until_is(name, "completed")
    assert sorted(fleet.executions()) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("how", "failure", "charged"), [("kill", "killed", True), ("scancel", "preemption", False)]
)
async def test_ended_by_somebody_it_goes_on_from_its_checkpoint(
    fleet: Fleet, how: str, failure: str, charged: bool
) -> None:
    fleet.add("slurm", {"name": "slurm"})
    fleet.submit("job", SAVES)
    fleet.begin()
    await fleet.until(lambda: fleet.told.exists() and fleet.told.read_text(), "it has saved")
    if how == "kill":
        os.kill(int(fleet.told.read_text()), 9)
    else:
        fleet.cluster.run("scancel", *fleet.queue("job"))
    await fleet.until_is("job", "completed")
    assert fleet.log("job") == f"from one {failure}\n"
    assert fleet.ends("job") == [("failed", failure, charged), ("succeeded", None, None)]
    assert len(fleet.queue("job")) == 2


async def test_cancelled_by_slurms_own_means_in_the_queue_it_is_given_to_it_again(
    fleet: Fleet,
) -> None:
    fleet.add("slurm", {"name": "slurm"})
    fleet.partition("DOWN")
    fleet.submit("job")
    fleet.begin()
    await fleet.until_waits("job", "pending")
    fleet.cluster.run("scancel", *fleet.queue("job"))
    await fleet.until(lambda: len(fleet.job("job")["attempts"]) == 2, "another attempt")
    fleet.partition("UP")
    await fleet.until_is("job", "completed")
    assert fleet.ends("job") == [("void", "preemption", False), ("succeeded", None, None)]
    assert fleet.executions() == ["job"]
    assert fleet.job("job")["retry_count"] == 0


async def test_cancelled_in_the_queue_it_never_begins(fleet: Fleet) -> None:
    fleet.add("slurm", {"name": "slurm"})
    fleet.partition("DOWN")
    fleet.submit("job")
    fleet.begin()
    await fleet.until_waits("job", "pending")
    fleet.database.run(lambda s: jobs.cancel(s, SOMEBODY, "job"))
    await fleet.until_is("job", "cancelled")
    await fleet.until_clean()
    assert fleet.queue("job", "pending,running") == []
    assert fleet.ends("job") == [("void", None, None)]
    fleet.partition("UP")
    fleet.submit("other")
    await fleet.until_is("other", "completed")
    assert fleet.executions() == ["other"]


@pytest.mark.parametrize(
    ("effect", "nth"),
    [
        ("host.launch", 1),
        pytest.param("host.run", 1, marks=pytest.mark.soak),
        pytest.param("host.run", 2, marks=pytest.mark.soak),
    ],
)
async def test_a_dispatcher_that_dies_on_the_way_to_slurm(
    fleet: Fleet, effect: str, nth: int
) -> None:
    """Laid out; Slurm asked whether it has it; submitted, and nobody has heard that."""
    fleet.add("slurm", {"name": "slurm"})
    fleet.submit("job")
    seen = 0

    def dies(name: str, side: Side) -> None:
        nonlocal seen
        if name == effect and side is Side.AFTER:
            # what is asked of Slurm before anything was launched is asked by reconciling
            seen += fleet.job("job")["status"] == "running"
            if seen == nth:
                raise Death

    fleet.begin(dies)
    await fleet.until_dead()
    fleet.begin()
    await fleet.until_is("job", "completed")
    assert fleet.executions() == ["job"]
    assert len(fleet.job("job")["attempts"]) == 1
    assert len(fleet.queue("job")) == 1


@pytest.mark.soak  # its clients wait long before they give up
async def test_while_the_controller_is_away_nothing_is_lost_and_nothing_begins_twice(
    fleet: Fleet,
) -> None:
    fleet.add("slurm", {"name": "slurm"})
    go = fleet.folder / "go"
    waits = f"import os, time\nwhile not os.path.exists({str(go)!r}):\n    time.sleep(0.05)\n"
    fleet.submit("runs", waits + SAYS)
    fleet.begin()
    await fleet.until(lambda: fleet.states("runs") == ["running"], "it runs")
    fleet.partition("DOWN")
    fleet.submit("waits")
    await fleet.until_waits("waits", "pending")
    fleet.cluster.kill("controller")
    try:
        await fleet.until_waits("waits", "Slurm does not answer")
        await fleet.until(lambda: fleet.machine("slurm")["problem"], "somebody is told")
        go.touch()
        await fleet.until_is("runs", "completed")
        assert fleet.states("waits") == ["launching"]
    finally:
        fleet.cluster.start("controller")
        fleet.cluster.until_ready()
    fleet.partition("UP")
    await fleet.until_is("waits", "completed")
    await fleet.until(lambda: fleet.machine("slurm")["state"] == "ok", "it answers again")
    assert fleet.executions() == ["runs", "waits"]
    *others, last = fleet.ends(
        "waits"
    )  # a controller that was killed may have lost what it had just got
    assert last == ("succeeded", None, None)
    assert set(others) <= {("void", "preemption", False)}


async def test_what_slurm_would_not_have_is_told_and_goes_elsewhere(fleet: Fleet) -> None:
    fleet.add("slurm", {"name": "slurm", "options": ["--partition=none-such"]})
    fleet.begin()
    await fleet.until(lambda: fleet.machine("slurm")["state"] == "ok", "the first look")
    fleet.submit("job")
    await fleet.until(lambda: fleet.ends("job")[:1] == [("void", "launch_failure", False)], "no")
    assert "invalid partition" in fleet.attempts("job")[0]["evidence"]["because"]
    fleet.add("here", cpu_slots=1)
    await fleet.until_is("job", "completed")
    assert fleet.log("job") == "on no node\n"


async def test_two_clusters_rows_and_a_machine_work_beside_each_other(fleet: Fleet) -> None:
    fleet.add("here", cpu_slots=1, labels={"kind": "own"})
    fleet.add("a", {"name": "slurm", "slots": 1, "gpus": 2})
    fleet.add("b", {"name": "slurm", "slots": 1, "options": ["--partition=urgent"]})
    go = fleet.folder / "go"
    waits = f"import os, time\nwhile not os.path.exists({str(go)!r}):\n    time.sleep(0.05)\n"
    fleet.begin()
    for name in ("here", "a", "b"):
        await fleet.until(lambda name=name: fleet.machine(name)["state"] == "ok", name)
    fleet.submit("first", waits + SAYS)
    await fleet.until(lambda: fleet.job("first")["assigned_vm"], "a place for the first")
    fleet.submit("wide", waits + SAYS, resources={"gpus": 1})
    fleet.submit("third", waits + SAYS)
    for name in ("wide", "third"):
        await fleet.until(lambda name=name: fleet.job(name)["assigned_vm"], name)
    assert [fleet.job(n)["assigned_vm"] for n in ("first", "wide", "third")] == ["here", "a", "b"]
    go.touch()
    for name, said in (("first", "no node"), ("wide", "gpu"), ("third", "urgent")):
        await fleet.until_is(name, "completed")
        assert fleet.log(name) == f"on {said}\n"
    await fleet.until_clean()
    assert sorted(fleet.executions()) == ["first", "third", "wide"]


@pytest.mark.soak  # a fleet in a process of its own, with its usual pauses
def test_as_a_person_types_it(cluster: Cluster, tmp_path: Path) -> None:
    with fleet_in(tmp_path / "fleet") as typed:
        typed.environment |= {"SLURM_CONF": str(cluster.configuration)}
        typed.up()
        row = ("--engine", "slurm", "--gpus-per-job", "2", "--workdir", str(tmp_path / "shared"))
        assert typed.call("vm", "add", "cluster", *row).returncode == 0
        until(lambda: '"state": "ok"' in typed.call("vm", "show", "cluster", "--json").stdout, "ok")
        script = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
        job_id = typed.submit("--vm", "cluster", "--gpus", "2", "--", "python3", "-c", script)
        typed.until(job_id, "completed")
        assert typed.call("logs", job_id).stdout == "0,1\n"
        assert "8/8 slots" in typed.call("vm", "list").stdout
        seen = typed.call("doctor", "--vm", "cluster").stdout
        assert "8 places for jobs; it would: " in seen
        assert typed.call("vm", "remove", "cluster").returncode == 0
