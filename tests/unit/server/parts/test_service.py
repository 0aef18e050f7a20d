"""The guarantees of parts, whatever their client and the network do.

A call is done once and in its order, however often and late it comes; who falls silent, and whose engine ends, is told so; the next loop
has an engine of its own, which hears only what it needs of a config.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from groupwise.api.schemas.parts import CallRequest
from groupwise.api.schemas.problems import Refusal
from groupwise.core.errors import RunError
from groupwise.server.parts import calls
from groupwise.server.parts.calls import KEPT_AFTER_DELIVERY, MAX_BODIES
from tests.fake_parts import SUMS, FakeCore, FakeParts
from tests.parts_server import HERE, NoRuns, PartsServer
from tests.processes import wait_until_async

ID, OTHER = "a" * 16, "b" * 16
OPEN = {"verb": "open", "kind": "training", "config": {"model": {"name": "tiny"}}, "run": "r"}
DISCARD = {"verb": "discard"}
JSON = {"content-type": "application/json"}
UPDATE = {"verb": "update", "params": {"learning_rate": 0.1}}
GENERATE = {
    "verb": "generate",
    "request": {"draw": 0, "prompt_ids": [1], "seeds": [7, 8], "params": {"max_tokens": 2}},
}
ROW: dict[str, Any] = {"prompt_ids": [1], "completion_ids": [2], "mask": [1], "advantage": "NaN"}
ROW |= {"sampling_logprobs": [-0.5], "scale": 1.0}
LOSS = {"loss": {"name": "dr_grpo"}, "denominators": {"policy": 1.0}}
LEARN = {"verb": "forward_backward", "rows": [ROW], **LOSS}


class Asking:
    """A client of one server."""

    def __init__(self, server: PartsServer) -> None:
        self.server = server
        self.http = httpx2.AsyncClient(transport=server.transport, base_url=HERE)

    @property
    def parts(self) -> FakeParts:
        return self.server.engines[-1].core.parts

    async def open(self, id: str = ID, owner: str = "me") -> httpx2.Response:
        return await self.http.put(f"/parts/{id}", json={"owner": owner})

    async def call(
        self, number: int, do: Mapping[str, Any], after: int | None = None, wait: float = 5.0
    ) -> httpx2.Response:
        body = {"after": after, "do": do}
        return await self.http.put(
            f"/parts/{ID}/calls/{number}", json=body, params={"wait": str(wait)}
        )

    async def answer(self, number: int, wait: float = 5.0) -> httpx2.Response:
        return await self.http.get(f"/parts/{ID}/calls/{number}", params={"wait": str(wait)})

    async def give_up(self, number: int) -> httpx2.Response:
        return await self.http.delete(f"/parts/{ID}/calls/{number}")


class Clock:
    """Stands still unless it is moved."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def asking(folder: Path, *, opened: bool = True, **more: Any) -> AsyncGenerator[Asking]:
    server = PartsServer(folder, make_core=FakeCore, **more)
    client = Asking(server)
    if opened:
        assert (await client.open()).status_code == 200
    yield client
    await client.http.aclose()
    await server.service.shut_down()


def code(response: httpx2.Response) -> str:
    return response.json()["code"]


async def test_a_call_that_comes_again_is_done_once(tmp_path: Path) -> None:
    async with asking(tmp_path) as ask:
        first, again = [await ask.call(1, LEARN, after=0) for _ in range(2)]
        assert first.status_code == again.status_code == 200
        assert first.content == again.content
        assert ask.parts.done == ["forward_backward"]
        assert first.json()["result"] == {**SUMS, "ratio/max": "Infinity"}
        other = await ask.call(1, DISCARD)
        assert (other.status_code, code(other)) == (409, "call_taken")


async def test_calls_that_overtake_each_other_are_done_in_order(tmp_path: Path) -> None:
    async with asking(tmp_path) as ask:
        held = ask.parts.held["forward_backward"]
        await ask.call(3, DISCARD, after=2, wait=0.0)
        await ask.call(2, UPDATE, after=1, wait=0.0)
        await ask.call(1, LEARN, after=0, wait=0.0)
        assert (await ask.call(4, GENERATE)).status_code == 200, "samples wait for nobody"
        assert ask.parts.done == ["generate"]
        held.set()
        assert (await ask.answer(3)).status_code == 200
        assert ask.parts.done == ["generate", "forward_backward", "update", "discard"]


async def test_calls_that_are_given_up_do_not_block_others(tmp_path: Path) -> None:
    async with asking(tmp_path) as ask:
        learning, drawing = ask.parts.held["forward_backward"], ask.parts.held["generate"]
        await ask.call(1, LEARN, after=0, wait=0.0)
        await ask.call(2, GENERATE, wait=0.0)
        await wait_until_async(lambda: len(ask.parts.begun) == 2)
        assert (await ask.give_up(2)).json()["state"] == "given_up"
        assert ask.parts.cancelled == ["generate"], "its slots are free"
        assert (await ask.give_up(1)).status_code == 202, "half of a gradient is not a gradient"
        assert (await ask.give_up(3)).json()["state"] == "given_up", "it never came"
        last = asyncio.create_task(ask.call(4, DISCARD, after=3))
        learning.set()
        assert (await last).status_code == 200
        late = await ask.call(3, UPDATE, after=1)
        assert late.json()["state"] == "given_up"
        assert ask.parts.done == ["forward_backward", "discard"]
        assert not drawing.is_set()


async def test_a_call_that_was_given_up_still_waits_for_the_running_call(tmp_path: Path) -> None:
    async with asking(tmp_path) as ask:
        held = ask.parts.held["forward_backward"]
        await ask.call(1, LEARN, after=0, wait=0.0)
        await wait_until_async(lambda: ask.parts.begun)
        await ask.give_up(2)
        await ask.call(3, DISCARD, after=2, wait=0.0)
        assert (await ask.answer(3, wait=0.05)).status_code == 202
        assert ask.parts.begun == ["forward_backward"]
        held.set()
        assert (await ask.answer(3)).status_code == 200
        assert ask.parts.done == ["forward_backward", "discard"]


# 3. and 4.


async def test_a_silent_client_loses_its_session_and_gets_an_error(tmp_path: Path) -> None:
    clock = Clock()
    async with asking(tmp_path, clock=clock, silence=100.0) as ask:
        clock.now += 99
        assert (await ask.http.get(f"/parts/{ID}")).status_code == 200, "a word is enough"
        clock.now += 99
        assert code(await ask.open(OTHER, "you")) == "run_active"
        clock.now += 2
        assert (await ask.open(OTHER, "you")).status_code == 200
        gone = await ask.call(1, DISCARD)
        assert (gone.status_code, code(gone)) == (410, "parts_gone")
        assert "nothing was heard" in gone.json()["detail"]
        assert not (tmp_path / "parts" / ID).exists()
        assert (tmp_path / "parts" / OTHER).exists()


class Busy(NoRuns):
    """A run, or models, have the machine."""

    def __init__(self) -> None:
        super().__init__()
        self.run: object | None = None
        self.models = False

    def active_conductor(self) -> Any:
        return self.run

    async def make_room(self, for_user: str) -> None:
        assert for_user == "parts"
        if self.models:
            raise Refusal("run_active", "models are in memory")


async def test_a_run_and_models_keep_parts_away_and_parts_a_run(tmp_path: Path) -> None:
    busy = Busy()
    async with asking(tmp_path, opened=False, runs=busy) as ask:
        plan = {"kind": "supervised", "config": {"model": {"name": "tiny"}}}
        for change in ("run", "models"):
            setattr(busy, change, object())
            assert code(await ask.open()) == "run_active"
            assert code(await ask.http.post("/parts/plan", json=plan)) == "run_active"
            setattr(busy, change, None)
        assert (await ask.open()).status_code == 200
        with pytest.raises(Refusal, match=f"DELETE /parts/{ID}"):
            await ask.server.service.release_machine()
        assert ask.server.service.in_use().owner == "me"
        await ask.server.service.release_for_replacement()
        await ask.server.service.release_machine()
        gone = await ask.call(1, DISCARD)
        assert code(gone) == "parts_taken"
        assert "started in their place" in gone.json()["detail"]


# 5.


async def test_the_engine_gets_only_the_parts_of_a_config_that_it_needs(tmp_path: Path) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    kept = {"lora": {"r": 2}, "run": {"processes": 2, "threads": 2}}
    model = {"name": "mine", "adapter": "/etc", "chat_template": "/etc/passwd", "dtype": "float32"}
    private = {"data": {"dataset_name": "/etc/passwd"}, "task": {"secret": 1}}
    elsewhere = {"dir": "/", "server": "http://elsewhere", **kept["run"]}
    async with asking(tmp_path) as ask:
        missing = await ask.call(1, {**OPEN, "adapter": "sent"})
        assert (missing.status_code, code(missing)) == (404, "unknown_file")
        config = {**private, "model": model, "lora": kept["lora"], "run": elsewhere}
        await ask.call(2, {**OPEN, "config": config})
        (order,) = ask.parts.orders
        mine = str((tmp_path / "models" / "mine").resolve())
        gone = dict.fromkeys(("adapter", "adapter_revision", "chat_template"))
        expected_config = {"model": {"name": mine, "dtype": "float32", **gone}, **kept}
        assert json.loads(json.dumps(order.config)) == expected_config
        assert order.folder == str(tmp_path / "parts" / ID)
        await ask.http.put(f"/parts/{ID}/files/sent/adapter_config.json", content=b"{}")
        await ask.call(3, {**OPEN, "adapter": "sent", "model": "sent"})
        place = str(tmp_path / "parts" / ID / "sent")
        sent = ask.parts.orders[1].config["model"]
        assert (sent["adapter"], sent["name"]) == (place, place)
        escape = await ask.call(4, {**OPEN, "weights": "../../models"})
        assert (escape.status_code, code(escape)) == (422, "invalid_request")
        late = await ask.http.put(f"/parts/{ID}/files/sent/more", content=b"{}")
        assert code(late) == "invalid_request", "what was loaded stays as it was checked"
        policy = {"run": "r", "version": 0, "fingerprint": "f", "kind": "adapter", "path": "/etc"}
        assert code(await ask.call(5, {"verb": "load", "policy": policy})) == "invalid_request"


async def test_calls_beyond_the_limits_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "MAX_CALLS", 64)
    async with asking(tmp_path / "impatient", longest_wait=0.01) as ask:
        outcome = (await ask.call(9, DISCARD, after=8)).json()
        assert outcome["state"] == "failed", "it waits for the one before it only so long"
        assert "The call 8" in outcome["error"]["message"]
    async with asking(tmp_path / "small", most_bytes=1 << 16) as ask:
        rows = [ROW] * 500
        sent = [
            await ask.call(n, {**LEARN, "rows": rows}, after=99, wait=0.0) for n in range(10, 23)
        ]
        statuses = [each.status_code for each in sent]
        assert {*statuses} == {202, 429}
        assert statuses.count(202) >= MAX_BODIES
    async with asking(tmp_path / "other") as ask:
        _ = ask.parts.held["discard"]
        request = CallRequest.model_validate({"do": DISCARD})
        for number in range(1, 65):
            await ask.server.service.call(ID, number, request, b"", 0.0)
        refused = await ask.call(65, DISCARD, wait=0.0)
        assert (refused.status_code, code(refused)) == (429, "too_busy")
        assert code(await ask.give_up(66)) == "too_busy"
        twice = b'{"after": 0, "after": 0, "do": {"verb": "discard"}}'
        sent = await ask.http.put(f"/parts/{ID}/calls/67", content=twice, headers=JSON)
        assert code(sent) == "invalid_request"


async def test_an_answer_that_was_reported_and_lost_is_reported_again_however_late(
    tmp_path: Path,
) -> None:
    clock = Clock()
    async with asking(tmp_path, clock=clock, silence=1e9) as ask:
        first = await ask.call(1, UPDATE, after=0)
        clock.now += 100 * KEPT_AFTER_DELIVERY
        ask.server.service.forget_delivered()
        assert (await ask.call(1, UPDATE, after=0)).content == first.content
        assert ask.parts.done == ["update"]
        await ask.call(2, DISCARD, after=1)  # the client has the answer
        ask.server.service.forget_delivered()
        late = await ask.call(1, UPDATE, after=0)
        assert (late.status_code, code(late)) == (404, "unknown_call"), "never done twice"
        assert code(await ask.give_up(1)) == "unknown_call"
        assert ask.parts.done == ["update", "discard"]
        held = ask.parts.held["update"]
        begun = await ask.call(3, UPDATE, after=2, wait=0.0)
        assert (begun.status_code, begun.json()["state"]) == (202, "working")
        waiting = asyncio.create_task(ask.answer(3))
        held.set()
        assert (await waiting).json()["result"] == {"grad_norm": "NaN", "applied": False}
        assert ask.parts.begun.count("update") == 2


async def test_the_same_owner_takes_over_and_calls_under_way_hear_of_it(tmp_path: Path) -> None:
    left = tmp_path / "parts" / "of-an-earlier-server"
    left.mkdir(parents=True)
    async with asking(tmp_path, opened=False) as ask:
        await ask.server.service.begin()
        assert not left.exists()
        for _ in range(2):
            assert (await ask.open()).json()["ready"] is False
        await ask.call(1, OPEN)
        assert (await ask.open()).json()["ready"]
        assert len(ask.server.engines) == 1
        _ = ask.parts.held["update"]
        waiting = asyncio.create_task(ask.call(2, UPDATE))
        await wait_until_async(lambda: "update" in ask.parts.begun)
        assert (await ask.open(OTHER, "me")).status_code == 200
        assert code(await waiting) == "parts_taken", "its loop is not to go on by itself"
        assert len(ask.server.engines) == 2
        assert code(await ask.open(ID, "me")) == "parts_taken", "what has ended does not come back"
        for _ in range(2):
            assert (await ask.http.delete(f"/parts/{OTHER}")).status_code == 200
        assert code(await ask.http.delete(f"/parts/{'c' * 16}")) == "unknown_parts"


async def test_all_waiting_calls_fail_when_the_engine_ends(
    tmp_path: Path,
) -> None:
    runs = NoRuns()
    async with asking(tmp_path, runs=runs) as ask:
        _ = ask.parts.held["update"]
        waiting = asyncio.create_task(ask.call(1, UPDATE))
        await wait_until_async(lambda: ask.parts.begun)
        async with runs.machine_lock:
            ask.server.engines[0].lost = "it was killed"
            ask.parts.held["update"].set()
            lost = await waiting
            assert (lost.status_code, code(lost)) == (410, "parts_gone")
            assert "it was killed" in lost.json()["detail"]
            assert code(await ask.call(2, DISCARD)) == "parts_gone"
        await wait_until_async(lambda: not (tmp_path / "parts" / ID).exists())
        assert (await ask.open(OTHER, "me")).status_code == 200
        ask.server.engines[1].lost = "it was killed"
        ask.server.service.notice_loss()
        assert code(await ask.http.get(f"/parts/{OTHER}")) == "parts_gone", "though nobody asked"


async def test_an_engine_that_cannot_be_begun_is_reported_and_tried_again(tmp_path: Path) -> None:
    async with asking(tmp_path, opened=False) as ask:
        ask.server.fails = [RunError("no memory for a process")] * 2
        plan = {"kind": "supervised", "config": {"model": {"name": "tiny"}}}
        for refused in (await ask.open(), await ask.http.post("/parts/plan", json=plan)):
            assert (refused.status_code, code(refused)) == (503, "engine_recovering")
            assert "no memory" in refused.json()["detail"]
        assert (await ask.open()).status_code == 200


async def test_models_that_may_not_be_loaded(tmp_path: Path) -> None:
    async with asking(tmp_path) as ask:
        for number, (message, model) in enumerate(
            (
                ("may not be loaded", {"name": "/etc"}),
                ("may not be loaded", {"name": "../models"}),
                ("would run code", {"name": "tiny", "trust_remote_code": True}),
                ("revision", {"name": "tiny", "revision": "refs/pr/1"}),
            ),
            1,
        ):
            response = await ask.call(number, {**OPEN, "config": {"model": model}})
            plan = {"kind": "training", "config": {"model": model}}
            planned = await ask.http.post("/parts/plan", json=plan)
            assert (message in response.text, message in planned.text) == (True, True)
        plan = {"kind": "training", "config": {}, "described": ""}
        planned = await ask.http.post("/parts/plan", json=plan)
        assert planned.json()["detail"] == "the model: its config.json is empty."
        assert (ask.parts.orders, ask.parts.planned) == ([], [])
