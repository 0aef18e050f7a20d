"""Machines of a fleet that start jobs on a real Ray.

1. A job waits for what Ray has not free, and says what for; then it runs, and comes back as from every machine.
2. The token comes from the machine that asks, and stands in no table and no argument.
3. What Ray, or somebody, ends goes on from its checkpoint; what takes too long is ended by its own limit.
4. What is cancelled before it began never begins.
5. However often a dispatcher dies on the way, or Ray itself with all that it knows, a job is executed once.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from groupwise.jobs.fleet.operations import jobs
from groupwise.jobs.fleet.poller import Pace
from groupwise.jobs.fleet.store.database import connect
from groupwise.jobs.hosts import schedulers
from tests import ray_cluster
from tests.cluster_fleet import SAVES, ClusterFleet
from tests.fleet_databases import copied
from tests.in_process_fleet import SOMEBODY
from tests.ray_cluster import Ray

pytestmark = pytest.mark.launch
PACE = Pace(interval=1.0, longest=1.0, listed=0.1, spread=0.0, least=0.1)
"""Each question to Ray is two processes: asked more often, they take the time of what is tested."""


@pytest.fixture
def cluster() -> Ray:
    """Which all tests share: nothing else is in use there."""
    found = ray_cluster.shared()
    found.idle()
    return found


@pytest.fixture
async def fleet(
    cluster: Ray, migrated_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ClusterFleet]:
    monkeypatch.setenv("RAY_AUTH_TOKEN", cluster.token)
    monkeypatch.setattr(schedulers, "POLL_SECONDS", PACE.interval)
    database = connect(copied(migrated_file, tmp_path))
    said = cluster.folder / "said"
    made = ClusterFleet(database, tmp_path, lambda: said.read_text()[-2000:], PACE)
    try:
        yield made
    finally:
        await made.end()
        database.close()


def row(cluster: Ray, *options: str, gpus: int = 0) -> dict[str, object]:
    return {"name": "ray", "address": cluster.address, "gpus": gpus, "options": list(options)}


async def test_a_job_waits_says_what_for_and_comes_back(fleet: ClusterFleet, cluster: Ray) -> None:
    fleet.add("ray", row(cluster, "apart=1", gpus=2))
    fleet.begin()
    await fleet.until_looked_at("ray")
    fleet.submit("first", SAVES, resources={"gpus": 2, "cpus": 2})
    await fleet.until_saved()
    fleet.submit("job", resources={"gpus": 2, "ram_mb": 100})
    said = await fleet.until_waits("job", "pending")
    assert "placed on ray: " in said
    assert "1 CPU, 2 GPU, 0.1G" in said
    assert fleet.states("job") == ["launching"]
    seen = fleet.machine("ray")
    assert (seen["total_slots"], seen["available_slots"], seen["gpus"]) == (8, 6, [])
    fleet.database.run(lambda s: jobs.cancel(s, SOMEBODY, "first"))
    await fleet.until_is("first", "cancelled")
    await fleet.until_is("job", "completed")
    await fleet.until_clean()
    assert fleet.log("job") == "on a node of Ray\n"
    [gpus] = (fleet.folder / "artefacts" / "job").rglob("gpus")
    assert gpus.read_text() == "0,1"
    kept = [path for path in fleet.folder.rglob("*") if path.is_file()]
    assert [path for path in kept if cluster.token.encode() in path.read_bytes()] == []


@pytest.mark.soak(suite="launch")
async def test_stopped_by_hand_or_for_its_time_and_cancelled(
    fleet: ClusterFleet, cluster: Ray
) -> None:
    """Three at once: each has its own end."""
    fleet.add("ray", row(cluster))
    fleet.add("none", row(cluster, "none-such=1"))
    here = {"gpus": 0, "vm": "ray"}
    fleet.submit("saves", SAVES, resources=here)
    late = {"limits": {"time_seconds": 1.0}, "retry": {"charged": 0}, "resources": here}
    fleet.submit("late", "import signal; signal.pause()", **late)
    fleet.submit("never", resources={"gpus": 0, "vm": "none"})
    fleet.begin()
    await fleet.until_waits("never", "pending")
    fleet.database.run(lambda s: jobs.cancel(s, SOMEBODY, "never"))
    await fleet.until_saved()
    cluster.stop("saves")
    await fleet.until_is("saves", "completed")
    assert fleet.log("saves") == "from one preemption\n"
    assert fleet.ends("saves") == [("failed", "preemption", False), ("succeeded", None, None)]
    await fleet.until_is("never", "cancelled")
    assert fleet.ends("never") == [("void", None, None)]
    await fleet.until(lambda: fleet.ends("late")[0][1], "its time is up")
    assert fleet.ends("late")[0][:2] == ("failed", "time_limit")
    await fleet.until_clean()


@pytest.mark.parametrize("nth", [pytest.param(1, marks=pytest.mark.soak(suite="launch")), 2])
async def test_a_dispatcher_that_dies_on_the_way_to_ray(
    fleet: ClusterFleet, cluster: Ray, nth: int
) -> None:
    """Laid out and asked for; submitted, and nobody has heard that."""
    fleet.add("ray", row(cluster))
    fleet.submit("job")
    fleet.begin(fleet.death("job", "host.run", nth))
    await fleet.until_dead()
    fleet.begin()
    await fleet.until_is("job", "completed")
    assert fleet.executions() == ["job"]
    assert len(fleet.attempts("job")) == 1
    mine = [each for each in cluster.jobs("job") if str(fleet.folder) in each["entrypoint"]]
    assert [each["status"] for each in mine] == ["SUCCEEDED"]


@pytest.mark.soak(suite="launch")
async def test_with_ray_goes_all_that_it_knew_and_nothing_is_lost_or_begins_twice(
    fleet: ClusterFleet, cluster: Ray
) -> None:
    fleet.add("ray", row(cluster))
    fleet.add("new", row(cluster, "new=1"))
    fleet.submit("saves", SAVES, resources={"gpus": 0, "vm": "ray"})
    fleet.submit("waits", "print('it ran')", resources={"gpus": 0, "vm": "new"})
    fleet.begin()
    await fleet.until_waits("waits", "pending")
    await fleet.until_saved()
    await asyncio.to_thread(cluster.end)
    try:
        await fleet.until_waits("waits", "Ray does not answer")
        await fleet.until(lambda: fleet.machine("new")["problem"], "somebody is told")
        assert cluster.token not in json.dumps(fleet.machine("new"))
    finally:
        await asyncio.to_thread(cluster.start, new=1)
        await asyncio.to_thread(cluster.start_node)
    for name in ("waits", "saves"):
        await fleet.until_is(name, "completed")
    assert fleet.log("waits") == "it ran\n"
    assert fleet.ends("waits") == [("succeeded", None, None)]
    assert [each[0] for each in fleet.ends("saves")] == ["failed", "succeeded"]
    assert fleet.log("saves").startswith("from one ")
    await fleet.until_clean()
