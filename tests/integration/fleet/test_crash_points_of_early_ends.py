"""A dispatcher dies beside every effect on a job that does not end by itself; `crash_points.py` says how."""

from __future__ import annotations

from pathlib import Path

import pytest

from groupwise.fleet.attempts.effects import Side
from groupwise.testing.fake_hosts import Script
from tests.fleet_rig import Rig
from tests.integration.fleet.crash_points import LONG, Scenario, die_beside_every_effect

pytestmark = pytest.mark.fleet


async def cancelled(rig: Rig) -> None:
    rig.rack.scripts["job"] = [LONG]
    rig.submit("job")
    await rig.until(lambda: rig.rack.running() != [])
    rig.cancel("job")
    await rig.until(rig.has("job", "cancelled"))
    assert rig.rack.running() == []


async def supervisor_lost(rig: Rig) -> None:
    rig.rack.scripts["job"] = [LONG, Script()]
    rig.submit("job")
    await rig.until(lambda: rig.rack.running() != [])
    ((job, epoch),) = rig.rack.running()
    rig.rack["a"].kill_supervisor(job, epoch)
    await rig.until(rig.has("job", "completed"))


async def lost(rig: Rig) -> None:
    rig.rack.scripts["job"] = [LONG, Script()]
    rig.submit("job")
    await rig.until(lambda: rig.rack.running() != [])
    rig.rack["a"].power_off()
    rig.lose("a")
    await rig.until(rig.has("job", "completed"))


SCENARIOS: dict[str, Scenario] = {
    scenario.__name__: scenario for scenario in (cancelled, supervisor_lost, lost)
}


@pytest.mark.parametrize("side", Side)
@pytest.mark.parametrize("name", SCENARIOS)
async def test_a_dispatcher_may_die_beside_every_effect(
    name: str, side: Side, tmp_path: Path
) -> None:
    await die_beside_every_effect(SCENARIOS[name], side, tmp_path)
