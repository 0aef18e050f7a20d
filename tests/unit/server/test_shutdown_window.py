"""The server is ended at every await of a step and around it, while `train` runs: the loop continues by itself, and the policy is the same.

Points are counted over the whole course: each operation of the ledger, before and after, and each point of each call to the engine. A
test restarts the server at one of them. `at once`: the call goes on while the server ends. `late`: it goes on when everything else has
ended, as a request does that was under way.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from groupwise.api.client.loop import train_async
from tests.unit.server.restarting_server import PointedServer, RestartingServer
from tests.unit.server.serving import SETTINGS, expect_refusal

STEPS = 3
EXAMPLES = [{"prompt": text} for text in ("abc", "ab", "cab")]
LONGEST = 20.0
"""Seconds until a course counts as hung."""
PARTS = 12
"""The points are divided into this many tests; by default one of them runs, the others in the soak."""
LATE = 0.05
"""Seconds for which a late call is held: longer than the fake engine needs for a shutdown."""


def of_letters(completions: list[str], **_: Any) -> list[float]:
    return [float(text.count("a")) for text in completions]


class Course:
    """One training from start to finish, with a restart at one point."""

    def __init__(self, folder: Path, at: int | None, *, late: bool) -> None:
        self.points: list[str] = []
        self.transport = RestartingServer(folder, self._pass)
        self._folder = folder
        self._at = at
        self._late = late
        self._counting = False
        self._restart: asyncio.Task[None] | None = None

    async def _pass(self, name: str) -> None:
        if not self._counting:
            return
        self.points.append(name)
        if self._at is not None and len(self.points) == self._at + 1:
            self._restart = asyncio.create_task(self.transport.restart())
            await asyncio.sleep(LATE if self._late else 0)

    async def run(self) -> list[str]:
        """Fingerprints of the policies after each step."""
        server = await self.transport.begin()
        run = await server.start(max_steps=STEPS, save_steps=1)
        self._counting = True
        async with self.transport.client() as client:
            summary = await asyncio.wait_for(
                train_async(
                    client, EXAMPLES, of_letters, steps=STEPS, concurrency=2, progress=False
                ),
                LONGEST,
            )
        self._counting = False
        assert sorted(summary.metrics) == list(range(STEPS))
        if self._restart is not None:
            await asyncio.wait_for(self._restart, LONGEST)
        last = self.transport.server
        assert last is not None
        status = await last.until(lambda seen: seen.phase == "finished")
        assert (status.step, status.counters.trained) == (
            STEPS,
            STEPS * SETTINGS["groups_per_step"],
        )
        await self.transport.end()
        await last.ledger.close()
        record = json.loads((self._folder / "runs" / run / "run.json").read_text())
        return [each["fingerprint_out"] for each in record["manifests"]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[str]]:
    """The points of a course without a restart, and its policies."""
    course = Course(tmp_path_factory.mktemp("undisturbed"), None, late=False)
    fingerprints = asyncio.run(course.run())
    return course.points, fingerprints


@pytest.mark.parametrize("late", [False, True], ids=["at_once", "late"])
@pytest.mark.parametrize(
    "part",
    [0, *(pytest.param(part, marks=pytest.mark.soak(suite="kills")) for part in range(1, PARTS))],
)
def test_a_loop_survives_a_restart_at_every_point(
    part: int, late: bool, tmp_path: Path, undisturbed: tuple[list[str], list[str]]
) -> None:
    points, expected = undisturbed
    assert {"step:before_write", "sample:begun", "keep_groups:after", "note_trained:after"} <= {
        *points
    }
    for at in range(part, len(points), PARTS):
        folder = tmp_path / str(at)
        folder.mkdir()
        course = Course(folder, at, late=late)
        outcome = asyncio.run(course.run())
        statuses = {status for _, status in course.transport.refused}
        assert statuses <= {429, 503}, f"a restart at {course.points[at]} (point {at})"
        assert outcome == expected, f"a restart at {course.points[at]} (point {at})"


async def test_a_sampler_that_is_closed_under_a_request_is_no_fault_of_the_client(
    tmp_path: Path,
) -> None:
    async def passed(_: str) -> None:
        pass

    server = PointedServer(tmp_path, passed)
    await server.service.begin()
    await server.start()
    server.engines[0].hold("sample")
    asking = asyncio.create_task(expect_refusal("shutting_down", server.ask()))
    while not server.engines[0].calls["sample"]:  # noqa: ASYNC110 — it has no event
        await asyncio.sleep(0.001)
    await server.service.shut_down(5)
    assert (await asking).kind.retry
    await server.ledger.close()
