"""The one-call loop against a small server that takes a step for every two rewarded groups."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from groupwise.api.client.async_training_client import AsyncTrainingClient
from groupwise.api.client.errors import RunFinished
from groupwise.api.client.loop import TrainingSummary, train, train_async
from groupwise.api.client.training_client import TrainingClient
from groupwise.api.schemas.problems import Refusal
from groupwise.core.errors import TaskError

EXAMPLES = [{"prompt": f"p{i}", "answer": i} for i in range(3)]


class Server(httpx2.AsyncByteStream):
    """Two groups make a step; itself the stream of its events."""

    def __init__(self, *, max_steps: int = 100, steps: str = "auto") -> None:
        self.max_steps = max_steps
        self.phase = "running"
        self.mode = steps
        self.draws: list[int] = []
        self.prompts: dict[int, str] = {}
        self.rewards: dict[str, list[float | None]] = {}
        self.given_up: list[str] = []
        self.events: list[dict[str, Any]] = []
        self.stale = 0
        self.expire: set[str] = set()
        self.done = 0
        self.changed = asyncio.Condition()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        sent = 0
        while True:
            async with self.changed:
                while len(self.events) <= sent:
                    await self.changed.wait()
            while sent < len(self.events):
                data = json.dumps({"id": sent + 1, "at": 0, **self.events[sent]})
                sent += 1
                yield f"data: {data}\n\n".encode()

    async def answer(self, request: httpx2.Request) -> httpx2.Response:
        body = json.loads(request.content or b"{}")
        match request.method, request.url.path:
            case _, "/events":
                return httpx2.Response(200, stream=self)
            case _, "/status":
                found = self.status()
            case "DELETE", path:
                self.given_up.append(path.rpartition("/")[2])
                found = {"status": "given_up", "group_id": self.given_up[-1]}
            case _, "/completions":
                found = self.completions(body["draw"], body["prompt"])
            case _:
                return await self.take_rewards(body["group_id"], body["rewards"])
        return httpx2.Response(200, json=found)

    def status(self) -> dict[str, Any]:
        known = {"phase": self.phase, "run_id": "run", "step": self.done}
        known |= {"max_steps": self.max_steps}
        settings = {"groups_per_step": 2, "training_settings": {"steps": self.mode}}
        return {**known, **settings, "counters": {"stale": self.stale}, "last_event_id": 0}

    def completions(self, draw: int, prompt: str) -> dict[str, Any]:
        self.draws.append(draw)
        self.prompts[draw] = prompt
        drawn = {"completions": ["x", "yy"], "completion_tokens": [[1], [2, 3]]}
        drawn |= {"prompt": prompt, "finish_reasons": ["stop", "length"], "draw": draw}
        policy = {"model_version": ["run", self.done], "fingerprint": "f"}
        return {"group_id": f"g-{draw}", "expires_at": 1.5, **drawn, **policy}

    async def take_rewards(self, group_id: str, rewards: list[float | None]) -> httpx2.Response:
        if group_id in self.expire:
            self.expire.discard(group_id)
            refused = Refusal("lease_expired").problem()
            return httpx2.Response(410, content=refused.model_dump_json())
        self.rewards[group_id] = rewards
        async with self.changed:
            if (len(self.rewards) - self.stale) // 2 > self.done:
                metrics = {"reward": float(self.done), "kl": None}
                step = {"kind": "step", "run_id": "run", "step": self.done, "metrics": metrics}
                self.events.append(step)
                self.done += 1
                if self.done == self.max_steps:
                    self.events.append({"kind": "finished", "run_id": "run"})
                self.changed.notify_all()
        answer = {"group_id": group_id, "model_version": ["run", 0], "status": "accepted"}
        return httpx2.Response(200, json=answer)


def lengths(prompts: list[str], completions: list[str], answer: list[int]) -> list[float]:
    assert len(prompts) == len(completions) == len(answer)
    return [len(text) + float(given) for text, given in zip(completions, answer, strict=True)]


async def trained(server: Server, function: Any = lengths, **more: Any) -> TrainingSummary:
    async with AsyncTrainingClient(
        "http://s", transport=httpx2.MockTransport(server.answer)
    ) as client:
        return await train_async(client, EXAMPLES, function, **{"progress": False, **more})


@pytest.mark.parametrize("concurrency", [1, 3, 64])
async def test_it_posts_what_the_steps_need_and_no_more(concurrency: int) -> None:
    server = Server()
    summary = await trained(server, steps=3, concurrency=concurrency)
    assert summary.rewards == {0: 0.0, 1: 1.0, 2: 2.0}
    assert sorted(server.draws) == list(range(6))
    assert server.prompts == {draw: f"p{draw % 3}" for draw in range(6)}
    assert {name: values[0] for name, values in server.rewards.items()} == {
        f"g-{draw}": 1.0 + draw % 3 for draw in range(6)
    }
    assert server.given_up == []


async def test_cancelling_gives_up_what_is_under_way() -> None:
    server, asked = Server(), asyncio.Event()

    async def endless(**_: Any) -> list[float]:
        asked.set()
        await asyncio.Event().wait()
        return []

    task = asyncio.create_task(trained(server, endless, steps=1, concurrency=1))
    await asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert server.given_up == ["g-0"]


async def test_it_ends_where_the_run_does_and_asks_again_for_what_expired() -> None:
    async def some(completions: list[str], **_: Any) -> list[float | None]:
        return [None, 1.0]

    server = Server(max_steps=2)
    server.expire = {"g-1"}
    summary = await trained(server, some, steps=50, concurrency=1)
    assert sorted(summary.rewards) == [0, 1]
    assert list(server.rewards.values()) == [[None, 1.0]] * 4
    assert server.draws[:3] == [0, 1, 1]


async def test_unscored_groups_are_given_up_and_three_in_a_row_end_the_loop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def odd(answer: list[int], **_: Any) -> list[float]:
        if answer[0] == 1:
            raise ValueError("no such word")
        return [1.0, 2.0]

    def broken(**_: Any) -> list[float]:
        raise ValueError("no such word")

    server = Server()
    with caplog.at_level(logging.WARNING):
        summary = await trained(server, odd, steps=2, concurrency=1)
    assert (summary.failed_groups, server.rewards["g-1"]) == (1, [None, None])
    assert "no such word" in caplog.text
    server = Server()
    with pytest.raises(TaskError, match="3 groups in a row") as caught:
        await trained(server, broken, steps=5, concurrency=1)
    assert "no such word" in str(caught.value)
    assert server.given_up == ["g-2"]


async def test_groups_that_the_server_lost_are_made_up_for() -> None:
    server = Server()

    async def lose() -> None:
        async with server.changed:
            await server.changed.wait_for(lambda: server.done == 1)
            server.stale = 1
            server.events.append({"kind": "groups", "message": "1 group is stale"})
            server.changed.notify_all()

    await asyncio.gather(lose(), trained(server, steps=2, concurrency=1))
    assert len(server.rewards) == 5


@pytest.mark.parametrize(("phase", "done"), [("stopped", 1), ("finished", 4), ("running", 4)])
async def test_a_run_that_takes_no_more_ends_it_at_once(phase: str, done: int) -> None:
    server = Server(max_steps=4)
    server.phase, server.done = phase, done
    with pytest.raises(RunFinished, match=f"after {done} of 4 steps"):
        await asyncio.wait_for(trained(server, steps=1), 5)
    assert server.draws == []


def test_the_synchronous_client_does_it_too_and_shows_it_with_what_the_server_warns_of(
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = Server()
    server.events += [
        {"kind": "checkpoint", "message": "resume_from: r@10"},
        {"kind": "warning", "message": "completions repeat themselves"},
    ]
    with TrainingClient("http://s", transport=httpx2.MockTransport(server.answer)) as client:
        summary = train(client, EXAMPLES, lengths, steps=2)
    assert summary.rewards == {0: 0.0, 1: 1.0}
    said = capsys.readouterr().err
    assert "step 2/2" in said
    assert "completions repeat themselves" in said
    assert "r@10" not in said
