"""Requests that come twice under one Idempotency-Key, to a service with a ledger: what was done is not done again."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from groupwise.server.ledger.transaction import Transaction
from groupwise.server.routes.context import REPLAYED
from groupwise.server.serve import make_app
from tests.unit.server.http_client import client_of
from tests.unit.server.serving import Served, served

NAME = {"Idempotency-Key": "once"}


@asynccontextmanager
async def asking(folder: Path) -> AsyncGenerator[tuple[Served, httpx2.AsyncClient]]:
    """A service, and a client of the routes before it."""
    async with served(folder) as server:
        app = make_app(server.service, server.config, None)
        async with client_of(app) as client:
            yield server, client


async def rewarded(server: Served) -> str:
    group = await server.ask()
    await server.reward(group)
    return group.group_id


@pytest.mark.parametrize("wait", [True, False])
async def test_a_step_that_comes_again_is_not_another_step(wait: bool, tmp_path: Path) -> None:
    async with asking(tmp_path) as (server, client):
        await server.start(steps="manual", staleness=1, groups_per_step=1)
        group = await rewarded(server)
        first = await client.post("/step", json={"wait": wait}, headers=NAME)
        assert (first.status_code, first.json()["group_ids"]) == (200, [group])
        empty = await client.post("/step", json={"wait": wait}, headers=NAME)
        await rewarded(server)
        again = await client.post("/step", json={"wait": wait}, headers=NAME)
        assert first.content == empty.content == again.content
        assert again.headers[REPLAYED] == "true"
        await server.until(lambda seen: seen.step == 1)
        other = await client.post("/step", json={"wait": not wait}, headers=NAME)
        assert other.json()["code"] == "idempotency_key_reused"
        assert (await server.service.status()).counters.rewarded == 1


async def test_a_checkpoint_that_stood_before_the_server_ended_is_answered_by_the_next(
    tmp_path: Path,
) -> None:
    def unsaid(transaction: Transaction) -> None:
        transaction.execute("DELETE FROM answers")
        transaction.execute("DELETE FROM events WHERE kind = 'checkpoint'")

    async with asking(tmp_path) as (server, client):
        await server.start()
        first = await client.post("/checkpoints", json={"name": "kept"}, headers=NAME)
        await server.ledger.do(unsaid)  # as if it had been killed before it wrote this
    async with asking(tmp_path) as (server, client):
        again = await client.post("/checkpoints", json={"name": "kept"}, headers=NAME)
        assert (again.status_code, again.content) == (200, first.content)
        events = await server.service.events(0, 100)
        addresses = [e.data["address"] for e in events if e.kind == "checkpoint"]
        assert addresses.count("kept") == 1
        other = {"Idempotency-Key": "another"}
        taken = await client.post("/checkpoints", json={"name": "kept"}, headers=other)
        assert taken.json()["code"] == "checkpoint_exists"


@pytest.mark.parametrize("ask", ["a step", "rewards", "rewards of several"])
async def test_a_retry_after_a_timed_out_wait_waits_for_the_same_step(
    ask: str, tmp_path: Path
) -> None:
    def whole(answer: httpx2.Response) -> dict[str, Any]:
        """Of the one group."""
        body = answer.json()
        return body["groups"][0] if "groups" in body else body

    async with asking(tmp_path) as (server, client):
        await server.start(groups_per_step=1)
        held = server.engines[0].hold("step")
        group = await server.ask()
        rewards = {"group_id": group.group_id, "rewards": [1.0, 0.0, 0.0, 0.0]}
        if ask == "a step":
            await server.reward(group, include="hold")
            body: dict[str, Any] = {"group_ids": [group.group_id]}
        else:
            body = {"wait": True, **(rewards if ask == "rewards" else {"groups": [rewards]})}
        where = "/step" if ask == "a step" else "/rewards"

        async def post() -> httpx2.Response:
            return await client.post(where, json={**body, "timeout": 0.05}, headers=NAME)

        in_vain = await post()
        assert (in_vain.status_code, whole(in_vain)["status"]) == (202, "accepted")
        assert (await post()).content == in_vain.content
        held.set()
        await server.until(lambda seen: seen.step == 1)
        done = await post()
        assert (done.status_code, whole(done)["status"]) == (200, "trained")
        assert (whole(done)["step"], bool(whole(done)["metrics"])) == (0, True)
