"""Two machines that are the same real Slurm, and a machine of the fleet: a job that Slurm refuses starts elsewhere, and each job runs
once."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from groupwise.jobs.fleet.store.database import connect
from groupwise.jobs.hosts import schedulers
from tests import slurm
from tests.cluster_fleet import ClusterFleet
from tests.fleet_databases import copied

pytestmark = pytest.mark.launch


@pytest.fixture
async def fleet(
    migrated_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ClusterFleet]:
    monkeypatch.setenv("SLURM_CONF", str(slurm.shared().configuration))
    monkeypatch.setattr(schedulers, "POLL_SECONDS", 0.3)
    database = connect(copied(migrated_file, tmp_path))
    made = ClusterFleet(database, tmp_path)
    try:
        yield made
    finally:
        await made.end()
        database.close()


async def test_a_row_that_slurm_refuses_keeps_no_job_from_another(fleet: ClusterFleet) -> None:
    fleet.add("refused", {"name": "slurm", "options": ["--partition=none-such"]})
    fleet.add("slurm", {"name": "slurm"})
    fleet.add("here")
    for name, row in (("never", "refused"), ("by-slurm", "slurm"), ("by-here", "here")):
        fleet.submit(name, resources={"gpus": 0, "vm": row})
    named = ["by-slurm", "by-here", "any-1", "any-2", "any-3"]
    for name in named[2:]:
        fleet.submit(name)
    fleet.begin()
    for name in named:
        await fleet.until_is(name, "completed")
    ends = [fleet.ends(name) for name in named]
    assert {each[-1] for each in ends} == {("succeeded", None, None)}
    assert {outcome for each in ends for outcome, *_ in each[:-1]} <= {"void"}
    await fleet.until(lambda: "void" in str(fleet.ends("never")), "Slurm would not have it")
    assert sorted(fleet.executions()) == sorted(named)
    assert (fleet.log("by-slurm"), fleet.log("by-here")) == ("on gpu\n", "on no node\n")
    await fleet.until_clean()
