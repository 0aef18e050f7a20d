"""A disk that is full while clients train through the Tinker API: nothing is told that could not be written down, nothing is
done twice, and with room again everything goes on by itself, to the same answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from groupwise.core.errors import StoreError
from groupwise.server.engine.saved_adapters import SavedFolders
from groupwise.server.ledger import writer
from groupwise.server.tinker import service
from groupwise.server.tinker.futures import LedgerUnavailable
from tests.disks import fill, small_disk
from tests.processes import wait_until_async
from tests.tinker_app import KEY, app
from tests.unit.server.tinker.test_engine_manager import CALLS, TIMEOUT_S, Loop, plain, undisturbed
from tests.unit.server.tinker.tinker_service import Disk, Server, serving

AGAIN = (LedgerUnavailable, StoreError)
PAUSE_S = 0.05


async def persist(loop: Loop, server: Server, number: int) -> None:
    """Send a call until it is taken."""
    async with asyncio.timeout(20):
        while True:
            try:
                return await loop.go(server.service, number, number + 1)
            except AGAIN:
                await asyncio.sleep(0.01)


async def expect_refusal(work: Awaitable[Any]) -> None:
    with pytest.raises(AGAIN):
        await work


async def test_tinker_clients_continue_after_a_full_disk_with_the_same_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(service, "ACCEPTED_WITHIN", 0.1)
    answers, state, _ = await undisturbed(tmp_path / "undisturbed")
    engine = Disk(SavedFolders(tmp_path / "saved"))  # its own disk has room
    with small_disk(tmp_path / "disk", "8m") as disk:
        async with serving(disk / "output", engine) as server:
            fill(disk)
            await told_to_come_again(server)
            await expect_refusal(server.service.registry.create_session(None))
            (disk / "ballast").unlink()
            loop = Loop(await server.service.registry.create_session(None))
            for number in range(CALLS):
                if number in (0, 2, 4):
                    await request_meets_it(loop, server, number, disk)
                elif number in (1, 3, 6):
                    await answer_meets_it(loop, server, number, disk)
                else:
                    await persist(loop, server, number)
            assert plain(await loop.answers(server.service), loop.session) == answers
            assert server.engine is not None
            assert server.engine.models[loop.model] == state
        async with serving(disk / "output", engine) as server:
            assert plain(await loop.answers(server.service), loop.session) == answers


async def told_to_come_again(server: Server) -> None:
    transport = httpx2.ASGITransport(app(server.service))
    async with httpx2.AsyncClient(transport=transport, headers={"X-API-Key": KEY}) as client:
        body = {"tags": [], "sdk_version": "0.38.0"}
        answer = await client.post("http://server/api/v1/create_session", json=body)
    assert (answer.status_code, answer.json()["code"]) == (503, "disk_full")
    assert answer.headers["Retry-After"]


async def request_meets_it(loop: Loop, server: Server, number: int, disk: Path) -> None:
    """A call is sent while the disk is full. Nothing is done before it is written down."""
    await loop.answers(server.service)
    done = server.disk.called
    fill(disk)
    await expect_refusal(loop.go(server.service, number, number + 1))
    await asyncio.sleep(PAUSE_S)
    assert server.disk.called == done
    (disk / "ballast").unlink()
    await persist(loop, server, number)


async def answer_meets_it(loop: Loop, server: Server, number: int, disk: Path) -> None:
    """The disk is full when a call comes to something. Its client hears of it when that is written down."""
    await loop.answers(
        server.service
    )  # else what an earlier call writes waits for the disk, and this one for that
    engine = server.disk
    engine.goes_on.clear()
    await persist(loop, server, number)
    fill(disk)
    before = engine.called
    engine.goes_on.set()
    await wait_until_async(lambda: engine.called != before)
    assert await server.service.answer(loop.ids[number], 3 * PAUSE_S) is None
    (disk / "ballast").unlink()
    assert await server.service.answer(loop.ids[number], TIMEOUT_S) is not None
