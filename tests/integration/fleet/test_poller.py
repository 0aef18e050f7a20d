"""The poller with machines of which a fifth is dead and a twentieth hangs, at shorter intervals than in production."""

import pytest

from benchmarks.fleet_polling import Shape, measure
from groupwise.jobs.fleet.poller import Pace
from tests.postgres import Postgres


@pytest.mark.soak(suite="fleet")
@pytest.mark.parametrize("hosts", [100, 500])
async def test_machines_that_do_not_answer_make_no_look_at_the_others_late(
    postgres: Postgres, hosts: int
):
    # Three times as often as by default, and time limits that are shorter by as much. A machine that times out takes
    # longer than the interval with what may be tried at once, so that all would be late if those that answer waited with them.
    pace = Pace(interval=5, longest=5, probe=3, answer=5, connect=1, unsure_at_once=hosts // 25)
    found = await measure(postgres.new_database(), Shape(hosts=hosts), pace, seconds=10)
    fine = hosts * 3 // 4
    assert found.contacts["ok"] == fine
    assert found.looks > fine  # of twice as many that should come in time
    assert found.cpu_per_second < 1.0
    assert found.lag_p99 < 5.0
    assert found.oldest < 15.0
