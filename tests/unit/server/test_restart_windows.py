"""The server is ended at every await of a start and of a checkpoint that a client saves: the client gets the same answer as without.

`at once` and `late` as in test_shutdown_window.py, which does the same to the course of a training.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from groupwise.api.client.loop import train_async
from groupwise.server.ledger.runs import list_runs
from tests.unit.server.restarting_server import RestartingServer
from tests.unit.server.serving import SETTINGS
from tests.unit.server.test_shutdown_window import EXAMPLES, LATE, LONGEST, of_letters

STEPS, SAVED_AFTER = 2, 1
During = Literal["start", "save"]


@dataclass(slots=True)
class Outcome:
    """What came of a course."""

    points: list[str] = field(default_factory=list[str])
    refused: set[int] = field(default_factory=set[int])
    """Statuses of refusals."""
    fingerprints: list[str] = field(default_factory=list[str])
    checkpoints: list[tuple[str | None, int]] = field(default_factory=list[tuple[str | None, int]])
    """Name and step of those that have a name."""


async def course(folder: Path, during: During, at: int | None, *, late: bool) -> Outcome:
    """Start, train, save, train to the end, with a restart at one point of the window."""
    outcome = Outcome()
    restarts: list[asyncio.Task[None]] = []
    window: During | None = None

    async def passed(name: str) -> None:
        if window != during:
            return
        outcome.points.append(name)
        if at is not None and len(outcome.points) == at + 1:
            restarts.append(asyncio.create_task(transport.restart()))
            await asyncio.sleep(LATE if late else 0)

    transport = RestartingServer(folder, passed)
    await transport.begin()
    async with asyncio.timeout(LONGEST), transport.client() as client:
        window = "start"
        started = await client.start(**{**SETTINGS, "max_steps": STEPS, "save_steps": 1})
        window = None
        await asyncio.gather(*restarts)
        await train_async(client, EXAMPLES, of_letters, steps=SAVED_AFTER, progress=False)
        window = "save"
        saved = await client.save_checkpoint("mine")
        window = None
        await asyncio.gather(*restarts)
        assert (saved.name, saved.step, saved.run_id) == ("mine", SAVED_AFTER, started.run_id)
        await train_async(client, EXAMPLES, of_letters, steps=STEPS, progress=False)
        listed = (await client.checkpoints()).checkpoints
        outcome.checkpoints = [(each.name, each.step) for each in listed if each.name]
    last = transport.server
    assert last is not None
    await last.until(lambda status: status.phase == "finished")
    assert [row.run for row in await last.ledger.do(list_runs)] == [started.run_id]
    assert [path.name for path in (folder / "runs").iterdir()] == [started.run_id], (
        "a start that was broken off leaves nothing"
    )
    await transport.end()
    await last.ledger.close()
    record = json.loads((folder / "runs" / started.run_id / "run.json").read_text())
    outcome.fingerprints = [manifest["fingerprint_out"] for manifest in record["manifests"]]
    outcome.refused = {status for _, status in transport.refused}
    return outcome


@pytest.mark.parametrize("late", [False, True], ids=["at_once", "late"])
@pytest.mark.parametrize("during", ["start", "save"])
def test_a_client_is_answered_through_a_restart_at_every_point(
    during: During, late: bool, tmp_path: Path
) -> None:
    undisturbed = asyncio.run(course(tmp_path / "undisturbed", during, None, late=False))
    assert {"open:begun", "start_run:after"} <= {*undisturbed.points} or during == "save"
    assert {"save:begun", "keep_checkpoint:after"} <= {*undisturbed.points} or during == "start"
    for at, point in enumerate(undisturbed.points):
        outcome = asyncio.run(course(tmp_path / str(at), during, at, late=late))
        where = f"a restart at {point} (point {at})"
        assert outcome.refused <= {409, 429, 503}, where
        assert outcome.fingerprints == undisturbed.fingerprints, where
        assert outcome.checkpoints == undisturbed.checkpoints == [("mine", SAVED_AFTER)], where
