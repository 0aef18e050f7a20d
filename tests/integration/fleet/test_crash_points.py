"""A dispatcher dies beside every effect that it has on a job on one machine; `crash_points.py` says how."""

from __future__ import annotations

from pathlib import Path

import pytest

from groupwise.fleet.attempts.effects import Side
from groupwise.fleet.store.tables import Checkpoint
from groupwise.fleet.verbs import jobs
from groupwise.testing.fake_hosts import Fault, Script
from tests.fleet_rig import SOMEBODY, Rig
from tests.integration.fleet.crash_points import Scenario, die_beside_every_effect

pytestmark = pytest.mark.fleet


async def plain(rig: Rig) -> None:
    rig.submit("job")
    await rig.until(rig.has("job", "completed"))


async def fails_first(rig: Rig) -> None:
    rig.rack.scripts["job"] = [Script(code=1), Script()]
    rig.submit("job")
    await rig.until(rig.has("job", "completed"))
    assert [a.outcome for a in rig.attempts("job")] == ["failed", "succeeded"]


async def answer_lost(rig: Rig) -> None:
    rig.rack["a"].fail("launch", Fault.ANSWER_LOST)
    await plain(rig)


async def refused(rig: Rig) -> None:
    rig.rack.scripts["job"] = [Script(refusal="gpu_busy"), Script()]
    rig.submit("job")
    await rig.until(rig.has("job", "completed"))


async def turned_down(rig: Rig) -> None:
    """The runner has no room on its disk; nothing was claimed."""
    rig.rack["a"].fail("launch", Fault.REFUSED)
    await plain(rig)


async def waits_for_room(rig: Rig) -> None:
    """Both want all that the fleet has; who dies may have placed one, and not have marked the other one yet."""
    rig.rack.scripts["job"] = [Script(ticks=3)]
    rig.submit("job", resources={"gpus": 1, "vm": "a"})
    rig.submit("later", resources={"gpus": 1, "vm": "a"}, priority=-1)
    await rig.until(rig.has("later", "completed"))


async def files(rig: Rig) -> None:
    sha256 = rig.store.put(b"print(1)")
    rig.submit("job", files={"train.py": (sha256, 0o644, 8)})
    await rig.until(rig.has("job", "completed"))


async def checkpoint_damaged(rig: Rig) -> None:
    """The newest one has rotted on the disk; the one before is whole."""
    rig.submit("job", hold=True)
    for step in (10, 20):
        sha256 = rig.store.put(str(step).encode())
        row = Checkpoint(
            job_id="job", generation=0, epoch=0, path=f"outputs/{step}", step=step,
            manifest={f"outputs/{step}/w.bin": [sha256, 0o644, 2]}, mirrored_at=1.0,
        )  # fmt: skip
        rig.database.run(lambda s, row=row: s.add(row))
    rotten = rig.store.path(sha256)
    rotten.chmod(0o644)
    rotten.write_bytes(b"??")
    rig.database.run(lambda s: jobs.release(s, SOMEBODY, "job"))
    await rig.until(rig.has("job", "completed"))
    ended = [(a.failure_class, (a.resume_from or {})["step"]) for a in rig.attempts("job")]
    # Whoever goes on may find it void and not know why: then it is tried once more.
    assert [each for each in ended if each != (None, 20)] == [("not_provided", 20), (None, 10)]


SCENARIOS: dict[str, Scenario] = {
    scenario.__name__: scenario
    for scenario in (
        *(plain, fails_first, answer_lost, refused, turned_down, waits_for_room, files),
        checkpoint_damaged,
    )
}


@pytest.mark.parametrize("side", Side)
@pytest.mark.parametrize("name", SCENARIOS)
async def test_a_dispatcher_may_die_beside_every_effect(
    name: str, side: Side, tmp_path: Path
) -> None:
    await die_beside_every_effect(SCENARIOS[name], side, tmp_path)
