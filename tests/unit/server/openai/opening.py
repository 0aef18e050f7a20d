"""The OpenAI-compatible routes over a service with the fake engine, whose tokens appear one by one."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
from fastapi import FastAPI

from groupwise.api.schemas.keys import Keyring
from groupwise.core.types import Group, from_json
from groupwise.server.ledger import groups
from groupwise.server.openai.service import OpenAIService
from groupwise.server.routes.openai import attach_openai_errors, openai_routes
from groupwise.server.routes.responses import response_routes
from groupwise.server.serve import make_app
from tests.fake_engine import FakeEngine
from tests.unit.server.http_client import client_of
from tests.unit.server.serving import Served

CHAT = {"model": "latest", "messages": [{"role": "user", "content": "abc"}]}
TEXT = {"model": "latest", "prompt": "abc"}


class Open(Served):
    """Which has the routes, too."""

    def __init__(self, folder: Path, pace: float = 0.0, **config: Any) -> None:
        super().__init__(folder, **config)
        self.pace = pace
        self.openai = OpenAIService(self.service, self.ledger, self.config)

    async def _engine(self) -> FakeEngine:
        self.engines.append(FakeEngine(pace=self.pace))
        return self.engines[-1]

    @property
    def engine(self) -> FakeEngine:
        return self.engines[-1]

    def app(self, keys: Keyring | None = None) -> FastAPI:
        routes = (*openai_routes(self.openai), *response_routes(self.openai))
        app = make_app(self.service, self.config, keys, also=routes)
        attach_openai_errors(app)
        return app


@asynccontextmanager
async def open_service(
    folder: Path, kind: type[Open] = Open, **options: Any
) -> AsyncGenerator[Open]:
    """A service that has begun."""
    made = kind(folder, **options)
    await made.service.begin()
    try:
        yield made
    finally:
        await made.service.shut_down(5)
        await made.ledger.close()


class Client:
    """Posts to the routes, and reads what comes."""

    def __init__(self, http: httpx2.AsyncClient) -> None:
        self.http = http

    async def chat(self, **more: Any) -> Any:
        return await self.ok("/v1/chat/completions", {**CHAT, **more})

    async def text(self, **more: Any) -> Any:
        return await self.ok("/v1/completions", {**TEXT, **more})

    async def ok(self, path: str, body: Any, **more: Any) -> Any:
        answer = await self.http.post(path, json=body, **more)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def expect_refusal(self, status: int, path: str, body: Any, **more: Any) -> Any:
        answer = await self.http.post(path, json=body, **more)
        assert answer.status_code == status, answer.text
        return answer.json()["error"] if path.startswith("/v1") else answer.json()

    async def stream_chunks(self, path: str, body: Any, **more: Any) -> list[Any]:
        """The chunks, without the word that ends them."""
        answer = await self.http.post(path, json={**body, "stream": True}, **more)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    async def reward(self, id: str, *rewards: float | None, **more: Any) -> Any:
        return await self.ok("/rewards", {"group_id": id, "rewards": [*rewards], **more})


@asynccontextmanager
async def asking(folder: Path, **options: Any) -> AsyncGenerator[tuple[Open, Client]]:
    """A run that takes requests, and a client of it."""
    settings = {key: options.pop(key) for key in ("settings",) if key in options}
    async with open_service(folder, **options) as served:
        await served.start(**settings.get("settings", {}))
        async with client_of(served.app()) as http:
            yield served, Client(http)


async def record(served: Open, group: str) -> Group:
    kept = await served.ledger.do(groups.read_record, group)
    assert kept is not None
    return from_json(Group, kept)
