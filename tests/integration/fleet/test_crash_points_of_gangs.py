"""A dispatcher dies beside every effect that it has on a job on several machines; `crash_points.py` says how."""

from __future__ import annotations

from pathlib import Path

import pytest

from groupwise.fleet.attempts.effects import Side
from groupwise.testing.fake_hosts import Script
from tests.fleet_rig import Rig
from tests.integration.fleet.crash_points import LONG, Scenario, die_beside_every_effect

pytestmark = pytest.mark.fleet


async def gang(rig: Rig) -> None:
    rig.submit("job", resources={"gpus": 1, "machines": 2})
    await rig.until(rig.has("job", "completed"))


async def gang_refused(rig: Rig) -> None:
    """One of two machines has no room left on its disk; it has again when the gang has been taken back."""
    rig.rack["b"].refuses = "disk_full"
    rig.rack.scripts["job"] = [LONG, Script()]
    rig.submit("job", resources={"gpus": 1, "machines": 2})
    await rig.until(lambda: any(r["what"] == "refused" for r in rig.rack.history))
    rig.rack["b"].refuses = None
    rig.rack.scripts["job"] = [Script()]
    await rig.until(rig.has("job", "completed"))


SCENARIOS: dict[str, Scenario] = {scenario.__name__: scenario for scenario in (gang, gang_refused)}


@pytest.mark.parametrize("side", Side)
@pytest.mark.parametrize("name", SCENARIOS)
async def test_a_dispatcher_may_die_beside_every_effect(
    name: str, side: Side, tmp_path: Path
) -> None:
    await die_beside_every_effect(SCENARIOS[name], side, tmp_path)
