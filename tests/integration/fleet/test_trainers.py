"""Trainers that do not import groupwise, on real machines: their checkpoints are marked as complete by `seal`."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import select

from groupwise.jobs.fleet.store.tables import Checkpoint
from tests.integration.fleet.whole_fleet import WholeFleet, whole_fleet
from tests.postgres import Postgres

EXAMPLES = Path(__file__).parents[3] / "examples" / "10_fleet"
TORCHRUN = (
    'exec torchrun --nnodes "$NNODES" --node-rank "$NODE_RANK" --nproc-per-node 1 '
    '--master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" ddp.py'
)


@pytest.fixture
def fleet(network_of_the_fleet: None, postgres: Postgres) -> Iterator[WholeFleet]:
    with whole_fleet(postgres) as made:
        for host in made.hosts.values():
            host.gpus(1)
        made.add_machines()
        made.start("up")
        made.until_polled()
        yield made


@pytest.mark.soak(suite="fleet")  # two machines import torch, and begin once more
def test_a_gang_under_torchrun_meets_and_continues_from_what_it_sealed(fleet: WholeFleet) -> None:
    job_id = fleet.submit(
        *("--machines", "2", "--gpus", "1", "--file", str(EXAMPLES / "ddp.py")),
        *("--env", "OMP_NUM_THREADS=1", "--env", "FAIL_AT=5"),
        *("--env", "GLOO_SOCKET_IFNAME=e0", "--", "sh", "-c", TORCHRUN),
    )
    fleet.ended(job_id)
    first, second = fleet.attempts(job_id)
    assert (first.outcome, second.outcome) == ("failed", "succeeded")
    steps = fleet.rows(select(Checkpoint.step).where(Checkpoint.job_id == job_id))
    assert sorted(steps) == [4, 8]
    for rank in (0, 1):
        said = fleet.cli("logs", job_id, "--rank", str(rank)).stdout
        assert "goes on after step 4" in said
        assert f"rank {rank} of 2: the same weights" in said
