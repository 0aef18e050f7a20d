"""A fleet that runs jobs on a real Slurm cluster of two nodes and on one machine of its own.

1. A job waits in Slurm's queue for as long as Slurm likes, and says what for; then it runs, and comes back as from every machine.
2. What Slurm, or somebody, ends goes on from its checkpoint, and whose fault it was is told apart.
3. However often a dispatcher dies on the way, or the controller is away, a job is executed once.
"""

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from groupwise.jobs.fleet.store.database import Database, connect
from groupwise.jobs.hosts import schedulers
from tests import slurm
from tests.cluster_fleet import SAVES, SAYS, ClusterFleet
from tests.fleet_databases import copied
from tests.slurm import Cluster

SOAK = pytest.mark.soak(suite="fleet")
"""Most of them: Slurm takes its time, and two cores all of theirs."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with slurm.cluster() as found:
        yield found


class Fleet(ClusterFleet):
    """With the Slurm behind its rows."""

    def __init__(self, database: Database, folder: Path, cluster: Cluster) -> None:
        super().__init__(
            database, folder, lambda: (cluster.folder / "controller.out").read_text()[-2000:]
        )
        self.cluster = cluster

    def partition(self, state: str) -> None:
        """DOWN: what is in its queue waits; UP."""
        self.cluster.run("scontrol", "update", "PartitionName=gpu", f"State={state}")

    def queue(self, job_id: str, states: str = "all") -> list[str]:
        """Numbers of Slurm's jobs for it."""
        lines = self.cluster.run("squeue", "-h", "-t", states, "-o", "%i|%j|%Z").splitlines()
        ours = (line.split("|") for line in lines if str(self.folder) in line)
        return [number for number, name, _ in ours if name.startswith(f"{job_id}.")]


@pytest.fixture
async def fleet(
    cluster: Cluster, migrated_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Fleet]:
    monkeypatch.setenv("SLURM_CONF", str(cluster.configuration))
    monkeypatch.setattr(schedulers, "POLL_SECONDS", 0.3)
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
    await fleet.until_looked_at("slurm")
    fleet.submit("job", resources={"gpus": 2})
    said = await fleet.until_waits("job", "pending")
    assert "placed on slurm: " in said
    assert "pending (PartitionDown)" in said
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


@pytest.mark.parametrize(
    ("how", "failure", "charged"),
    [pytest.param("kill", "killed", True, marks=SOAK), ("scancel", "preemption", False)],
)
async def test_a_job_that_was_cancelled_by_hand_continues_from_its_checkpoint(
    fleet: Fleet, how: str, failure: str, charged: bool
) -> None:
    fleet.add("slurm", {"name": "slurm"})
    fleet.submit("job", SAVES)
    fleet.begin()
    await fleet.until_saved()
    if how == "kill":
        os.kill(int(fleet.told.read_text()), 9)
    else:
        fleet.cluster.run("scancel", *fleet.queue("job"))
    await fleet.until_is("job", "completed")
    assert fleet.log("job") == f"from one {failure}\n"
    assert fleet.ends("job") == [("failed", failure, charged), ("succeeded", None, None)]
    assert len(fleet.queue("job")) == 2


@pytest.mark.parametrize(
    ("effect", "nth"),
    [
        ("host.launch", 1),
        pytest.param("host.run", 1, marks=SOAK),
        pytest.param("host.run", 2, marks=SOAK),
    ],
)
async def test_a_dispatcher_that_dies_on_the_way_to_slurm(
    fleet: Fleet, effect: str, nth: int
) -> None:
    """Laid out; Slurm asked whether it has it; submitted, and nobody has heard that."""
    fleet.add("slurm", {"name": "slurm"})
    fleet.submit("job")
    fleet.begin(fleet.death("job", effect, nth))
    await fleet.until_dead()
    fleet.begin()
    await fleet.until_is("job", "completed")
    assert fleet.executions() == ["job"]
    assert len(fleet.job("job")["attempts"]) == 1
    assert len(fleet.queue("job")) == 1


@SOAK  # its clients wait long before they give up
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
