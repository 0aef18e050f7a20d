"""The real `openai` package, sync and async, against the routes behind uvicorn, over the fake engine.

The server runs in a thread, as it would in a process of its own: the sync client blocks.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx2
import openai
import pytest

from groupwise.wire.keys import Keyring
from tests.unit.server.asking import client_of, listening
from tests.unit.server.openai.opening import Client, Open, opened
from tests.unit.server.openai.test_routes import shown, texts_of

KEY = "a-key-for-tests-0123456789"
CHAT: Any = [{"role": "user", "content": "abc"}]
SETTINGS = {"max_completion_length": 12, "groups_per_step": 1, "staleness": 1, "max_steps": 24}
GROUP = 4
"""Completions that the run's groups have."""


class Server:
    """One in a thread, with a run that takes requests."""

    def __init__(self, folder: Path, settings: Any = SETTINGS, **config: Any) -> None:
        self.url = ""
        self._settings = settings
        self._http = httpx2.Client()
        self.served: Open
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        work = self._serve(folder, config)
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(work,))
        self._thread.start()
        assert self._ready.wait(20)

    async def _serve(self, folder: Path, config: dict[str, Any]) -> None:
        async with opened(folder, **{"pace": 0.005, **config}) as self.served:
            await self.served.start(**self._settings)
            async with listening(self.served.app(Keyring(plain=KEY))) as port:
                self.url = f"http://127.0.0.1:{port}"
                self._ready.set()
                await self._end.wait()

    def do(self, work: Any) -> Any:
        """Have something awaited in its loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    def close(self) -> None:
        self._http.close()
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()
        self._loop.close()

    def client(self, **more: Any) -> openai.OpenAI:
        return openai.OpenAI(**{"base_url": f"{self.url}/v1", "api_key": KEY, **more})

    def post(self, path: str, body: Any) -> Any:
        answer = self._http.post(f"{self.url}{path}", json=body, headers={"X-API-Key": KEY})
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture
def server(tmp_path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    made.close()


@pytest.fixture
def client(server) -> Iterator[openai.OpenAI]:
    with server.client() as made:
        yield made


def test_models(client):
    newest, latest = client.models.list().data
    assert (newest.id, latest.id) == (f"{newest.owned_by}@0", "latest")
    assert client.models.retrieve(newest.id) == newest


def test_chat(client):
    def ask(**more: Any) -> Any:
        return client.chat.completions.create(model="latest", messages=CHAT, **more)

    three = ask(n=3, seed=7, logprobs=True)
    texts = [choice.message.content for choice in three.choices]
    assert len({*texts}) == 3
    assert texts == [choice.message.content for choice in ask(n=3, seed=7).choices]
    assert texts != [choice.message.content for choice in ask(n=3, seed=8).choices]
    for choice in three.choices:
        tokens = [each.token for each in choice.logprobs.content]
        assert "".join(tokens).removesuffix("\n") == choice.message.content
        assert all(each.logprob < 0 for each in choice.logprobs.content)
    assert three.usage.total_tokens == 3 + sum(len(each.token_ids) for each in three.choices)
    assert three.model == "{}@{}".format(*three.policy_version)
    raw = client.chat.completions.with_raw_response.create(model="latest", messages=CHAT)
    assert raw.headers["x-request-id"]
    assert raw.parse().choices[0].message.role == "assistant"


def test_texts(client):
    answer = client.completions.create(
        model="latest", prompt=["abc", "b"], n=2, logprobs=0, extra_body={"top_k": 5}
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].logprobs.token_logprobs
    assert {choice.finish_reason for choice in answer.choices} <= {"stop", "length"}


def test_streams(client):
    def ask(**more: Any) -> Any:
        return client.chat.completions.create(
            model="latest", messages=CHAT, n=2, seed=1, max_tokens=10, **more
        )

    whole = ask()
    with ask(stream=True, stream_options={"include_usage": True}) as stream:
        texts, ends, chunks = ["", ""], 0, list(stream)
    for chunk in chunks[:-1]:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends += choice.finish_reason is not None
    assert texts == [choice.message.content for choice in whole.choices]
    assert (ends, chunks[-1].choices, chunks[-1].usage) == (2, [], whole.usage)
    pieces = client.completions.create(model="latest", prompt="abc", seed=1, stream=True)
    one = client.completions.create(model="latest", prompt="abc", seed=1)
    assert "".join(piece.choices[0].text for piece in pieces) == one.choices[0].text


def test_errors_are_the_clients_own(server, client):
    ask = client.chat.completions.create
    with pytest.raises(openai.NotFoundError, match="latest") as missing:
        ask(model="gpt-4o", messages=CHAT)
    assert missing.value.code == "unknown_model"
    with pytest.raises(openai.BadRequestError, match="frequency_penalty") as bad:
        ask(model="latest", messages=CHAT, frequency_penalty=1)
    assert (bad.value.param, bad.value.type) == ("frequency_penalty", "invalid_request_error")
    with server.client(api_key="wrong") as stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    server.post("/stop", {})
    with pytest.raises(openai.ConflictError, match="max_steps are done") as over:
        ask(model="latest", messages=CHAT)
    assert over.value.response.headers["x-should-retry"] == "false"


def test_a_full_room_is_a_rate_limit_that_is_tried_again(server, client):
    def ask(client: openai.OpenAI) -> Any:
        return client.completions.create(
            model="latest", prompt="a", n=2, extra_headers={"X-Groupwise-Store": "true"}
        )

    first, second = ask(client), ask(client)
    with pytest.raises(openai.RateLimitError), server.client(max_retries=0) as impatient:
        ask(impatient)
    with ThreadPoolExecutor(1) as beside:
        waiting = beside.submit(ask, client)
        for each in (first, second):
            server.post("/rewards", {"group_id": each.id, "rewards": [1, 0]})
        assert waiting.result(20).group_id not in (first.group_id, second.group_id)


async def test_async(server):
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY) as client:

        async def ask(seed: int) -> str:
            answer = await client.chat.completions.create(
                model="latest", messages=CHAT, seed=seed, max_tokens=8
            )
            return answer.choices[0].message.content or ""

        async def stream(seed: int) -> str:
            pieces = await client.chat.completions.create(
                model="latest", messages=CHAT, seed=seed, max_tokens=8, stream=True
            )
            return "".join([piece.choices[0].delta.content or "" async for piece in pieces])

        seeds = range(12)
        whole = await asyncio.gather(*map(ask, seeds))
        assert await asyncio.gather(*map(stream, seeds)) == whole
        assert len({*whole}) > 6
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("gpt-4o")


def test_an_agent_learns(tmp_path):
    """A loop as it stands in many programs; `store` and the post are all that was added to it."""
    settings = {**SETTINGS, "staleness": 0, "learning_rate": 6.0}
    server = Server(tmp_path, settings, pace=0.0, completions_wait=20.0)
    means: list[float] = []
    try:
        with server.client() as client:
            for _ in range(SETTINGS["max_steps"]):
                rewards: list[float] = []
                for _ in range(GROUP):
                    answer = client.chat.completions.create(
                        model="latest", messages=CHAT, store=True
                    )
                    rewards.append((answer.choices[0].message.content or "").count("a"))
                    server.post("/rewards", {"group_id": answer.id, "rewards": [rewards[-1]]})
                means.append(fmean(rewards))
        last = server.do(server.served.until(lambda status: status.phase == "finished"))
    finally:
        server.close()
    assert fmean(means[-8:]) > fmean(means[:8]) + 3, means
    assert last.step == SETTINGS["max_steps"]
    assert last.completion_requests_served == GROUP * SETTINGS["max_steps"]


class OpenReal(Open):
    """With the engine that has a model."""

    async def _engine(self) -> Any:
        from groupwise.server.engine.core import EngineCore

        return EngineCore()


async def test_a_real_model_streams_what_it_answers(tmp_path, monkeypatch):
    monkeypatch.setattr("groupwise.server.openai.service.POLL", 1e-3)  # it writes a token in less
    served = OpenReal(tmp_path)
    await served.service.begin()
    try:
        await served.start(max_completion_length=24)
        async with client_of(served.app()) as http:
            client = Client(http)
            body = {"model": "latest", "messages": CHAT, "n": 4, "temperature": 1.5, "seed": 2}
            path = "/v1/chat/completions"
            whole = await client.ok(path, {**body, "logprobs": True})
            texts = shown(whole)
            stop = next(text[3:5] for text in texts if len(text) > 8)
            for more in ({}, {"stop": stop}):
                expected = shown(await client.ok(path, {**body, **more}))
                pieces = await client.streamed(path, {**body, **more})
                assert texts_of(pieces, 4) == expected
                assert len(pieces) > 12
            assert expected == [text.partition(stop)[0] for text in texts]
            for choice in whole["choices"]:
                told = choice["logprobs"]["content"]
                assert len(told) == len(choice["token_ids"])
    finally:
        await served.service.shut_down(5)
        await served.ledger.close()
