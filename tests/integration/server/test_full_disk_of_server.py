"""A full disk: nothing is acknowledged that cannot be stored, and once there is space again everything continues by itself."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx2
import pytest

from groupwise.api.schemas.training import GroupAnswer
from groupwise.server.run import engine_supervisor
from groupwise.server.serve import make_app
from tests.disks import fill, small_disk
from tests.unit.server.http_client import client_of
from tests.unit.server.serving import Served, letters, served

STEPS = 5
AGAIN = ("disk_full", "engine_recovering", "too_busy")


async def persist(client: httpx2.AsyncClient, path: str, body: object) -> httpx2.Response:
    """Until it is accepted."""
    async with asyncio.timeout(20):
        while True:
            answer = await client.post(path, json=body)
            if answer.status_code == 200:
                return answer
            assert answer.json()["code"] in AGAIN, answer.text
            await asyncio.sleep(0.01)


async def test_the_run_continues_after_a_full_disk_with_the_same_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_supervisor, "DISK_CHECK_SECONDS", 0.02)
    async with served(tmp_path / "whole") as server:
        await server.start()
        for step in range(STEPS):
            await server.round(step)
        calm = (await server.until(lambda seen: seen.phase == "finished")).fingerprint
    with small_disk(tmp_path / "disk", "8m") as disk:
        async with served(disk / "output") as server:
            await server.start()
            async with client_of(make_app(server.service, server.config, None)) as client:
                assert await _course(server, client, disk) == calm


async def _course(server: Served, client: httpx2.AsyncClient, disk: Path) -> str | None:
    for draw in range(2 * STEPS):
        answer = await persist(client, "/completions", {"prompt": "abc", "draw": draw})
        group = GroupAnswer.model_validate_json(answer.content)
        body = {"group_id": group.group_id, "rewards": letters(group)}
        if draw in (2, 6):
            fill(disk, 0)
            refused = await client.post("/rewards", json=body)
            assert (refused.status_code, refused.json()["code"]) == (503, "disk_full")
            assert refused.headers["Retry-After"]
            (disk / "ballast").unlink()
            assert (await client.get("/status")).json()["counters"]["open"] == 1
        engine = server.engines[-1]
        held = engine.hold("step", "begun" if draw == 3 else "done") if draw in (3, 7) else None
        await persist(client, "/rewards", body)
        if held:  # the step, or what is kept of it, meets the full disk
            await server.until(lambda seen: seen.counters.planned == 2)
            fill(disk, 0)
            held.set()
            async with asyncio.timeout(20):
                while not await _is_recovering(client):  # noqa: ASYNC110 — it has no event
                    await asyncio.sleep(0.005)
            (disk / "ballast").unlink()
    return (await server.until(lambda seen: seen.phase == "finished")).fingerprint


async def _is_recovering(client: httpx2.AsyncClient) -> bool:
    """As far as it can be told: on a full disk this is refused where it comes together with something to be kept."""
    response = await client.get("/status")
    return response.status_code == 200 and response.json()["phase"] == "recovering"
