"""A disk that is full while clients train by verbs: nothing is told that could not be written down, nothing is done twice, and with room
again everything goes on by itself, to the same answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from groupwise.server.verbs import journal, requests, service
from groupwise.server.verbs.stored import SavedFolders
from tests.disks import fill, small_disk
from tests.unit.server.verbs.hosting import Disk, Server, created, gradient, serving, update
from tests.verb_server import KEY, app

AGAIN = {"disk_full", "not_kept"}
SESSION = {"tags": [], "sdk_version": "0.38.0"}
CALLS = 8


class Client:
    """Of the routes, which sends everything again until it is taken, as the real one does."""

    def __init__(self, http: httpx2.AsyncClient) -> None:
        self._http = http
        self.session = ""
        self.ids: list[str] = []

    async def post(self, path: str, body: Any) -> httpx2.Response:
        content = body if isinstance(body, bytes) else json.dumps(body)
        return await self._http.post(path, content=content)

    async def refused(self, path: str, body: Any) -> None:
        """That it is told to come again."""
        answer = await self.post(path, body)
        assert answer.status_code == 503, answer.text
        assert answer.json()["code"] in AGAIN
        assert answer.headers["Retry-After"]

    async def persist(self, path: str, body: Any) -> Any:
        async with asyncio.timeout(20):
            while (answer := await self.post(path, body)).status_code != 200:
                assert answer.json()["code"] in AGAIN, answer.text
                await asyncio.sleep(0.01)
        return answer.json()

    async def open(self) -> None:
        self.session = (await self.persist("create_session", SESSION))["session_id"]

    def call(self, number: int) -> tuple[str, Any]:
        """The so-many-th call of the model."""
        model = f"{self.session}:train:0"
        if number == 0:
            return "create_model", created(self.session).model_dump(mode="json")
        if number == 4:
            saved = requests.SaveWeights(model_id=model, seq_id=number, path="one")
            return "save_weights", saved.model_dump(mode="json")
        if number % 3 == 0:
            return "optim_step", update(model, number).model_dump(mode="json")
        return "forward_backward", gradient(model, number, 10 * number)

    async def done(self, server: Server) -> int:
        """Calls of the engine, after all that was taken has been answered."""
        await self.answers()
        return server.disk.called

    async def send(self, number: int) -> None:
        taken = await self.persist(*self.call(number))
        self.ids[number:] = [taken["request_id"]]

    async def answer(self, number: int) -> bytes | None:
        """None: it is to be asked for again."""
        answer = await self.post("retrieve_future", {"request_id": self.ids[number]})
        assert answer.status_code in (200, 408), answer.text
        told = answer.content.replace(self.session.encode(), b"s")
        return told if answer.status_code == 200 else None

    async def answers(self) -> list[bytes]:
        found: list[bytes] = []
        async with asyncio.timeout(20):
            while len(found) < len(self.ids):
                if (answer := await self.answer(len(found))) is not None:
                    found.append(answer)
        return found


@asynccontextmanager
async def client_of(server: Server) -> AsyncGenerator[Client]:
    transport = httpx2.ASGITransport(app(server.service, poll=0.05))
    headers = {"X-API-Key": KEY}
    async with httpx2.AsyncClient(
        transport=transport, base_url="http://server/api/v1/", headers=headers
    ) as http:
        yield Client(http)


async def undisturbed(folder: Path) -> tuple[list[bytes], list[str]]:
    async with serving(folder, Disk(SavedFolders(folder))) as server, client_of(server) as client:
        await client.open()
        for number in range(CALLS):
            await client.send(number)
        return await client.answers(), state_of(server)


def state_of(server: Server) -> list[str]:
    """What was done to the one model."""
    assert server.engine is not None
    (state,) = server.engine.models.values()
    return state


async def test_nothing_is_told_and_everything_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "AGAIN", 0.02)
    monkeypatch.setattr(service, "KEPT_WITHIN", 0.1)
    answers, state = await undisturbed(tmp_path / "undisturbed")
    engine = Disk(SavedFolders(tmp_path / "saved"))  # its own disk has room
    with small_disk(tmp_path / "disk", "8m") as disk:
        async with serving(disk / "output", engine) as server, client_of(server) as client:
            fill(disk)
            await client.refused("create_session", SESSION)
            (disk / "ballast").unlink()
            await client.open()
            for number in range(CALLS):
                if number in (0, 2, 4):
                    await request_meets_it(client, server, number, disk)
                elif number in (1, 3, 6):
                    await answer_meets_it(client, server, number, disk)
                else:
                    await client.send(number)
            assert await client.answers() == answers
            assert state_of(server) == state
        async with serving(disk / "output", engine) as server, client_of(server) as again:
            again.session, again.ids = client.session, client.ids
            assert await again.answers() == answers


async def request_meets_it(client: Client, server: Server, number: int, disk: Path) -> None:
    """A call is sent while the disk is full. Nothing is done before it is written down."""
    done = await client.done(server)
    fill(disk)
    await client.refused(*client.call(number))
    assert await client.done(server) == done
    (disk / "ballast").unlink()
    await client.send(number)


async def answer_meets_it(client: Client, server: Server, number: int, disk: Path) -> None:
    """The disk is full when a call comes to something. Its client hears of it when that is written down."""
    engine = server.disk
    engine.goes_on.clear()
    await client.send(number)
    fill(disk)
    before = engine.called
    engine.goes_on.set()
    async with asyncio.timeout(20):
        while engine.called == before:  # noqa: ASYNC110 — it has no event
            await asyncio.sleep(0.01)
    for _ in range(3):
        assert await client.answer(number) is None
    (disk / "ballast").unlink()
    await client.answers()
