"""Stored completions: as groups of their own, or as members of a group that several calls share."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.types import Message, Receive, Scope, Send

from groupwise.api.schemas.problems import Refusal
from groupwise.server.ledger import groups
from groupwise.server.routes.context import REPLAYED
from tests.processes import wait_until_async
from tests.unit.server.http_client import client_of
from tests.unit.server.openai.opening import CHAT, TEXT, Client, Open, asking, open_service, record
from tests.unit.server.openai.test_routes import PATHS, shown, texts_of

STORED_TEXT = {**TEXT, "store": True}


async def counts(served: Open) -> dict[str, int]:
    run = (await served.service.status()).run_id or ""
    groups_by_state = await served.ledger.do(groups.count_groups, run)
    return {state: number for state, number in groups_by_state.items() if number}


async def test_several_completions_are_a_group_also_streamed(tmp_path) -> None:
    async with asking(tmp_path, settings={"groups_per_step": 4}) as (served, client):
        for count, (path, body) in enumerate(PATHS.items(), 1):
            answer = await client.ok(path, {**body, "n": 3, "store": True})
            group = answer["group_id"]
            assert answer["id"] == ("chatcmpl-" if "chat" in path else "cmpl-") + group
            kept = await record(served, group)
            assert [each.completion for each in kept.rollouts] == shown(answer)
            ids = [choice["token_ids"] for choice in answer["choices"]]
            assert [[*each.completion_ids] for each in kept.rollouts] == ids
            if count == 1:
                posted = await client.reward(answer["id"], 1, 0, None)
                assert (posted["group_id"], posted["status"]) == (group, "accepted")
                assert (await client.reward(group, 1, 0, None)) == posted
        assert await counts(served) == {"rewarded": 1, "open": 1}
        pieces = await client.stream_chunks("/v1/chat/completions", {**CHAT, "n": 2, "store": True})
        group = pieces[-1]["group_id"]
        assert {piece["id"] for piece in pieces} == {f"chatcmpl-{group}"}
        kept = await record(served, group)
        assert [each.completion for each in kept.rollouts] == texts_of(pieces, 2)


async def test_a_stream_on_a_full_disk_ends_with_an_error(tmp_path, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise Refusal("disk_full")

    monkeypatch.setattr("groupwise.server.openai.storing.keep_group", full)
    async with asking(tmp_path, pace=0.02) as (_, client):
        for n in (1, 2):
            body = {**STORED_TEXT, "n": n, "stream": True}
            answer = await client.http.post("/v1/completions", json=body)
            assert '"code": "disk_full"' in answer.text
            assert '"finish_reason": "' not in answer.text
            assert "[DONE]" not in answer.text
            await client.expect_refusal(503, "/v1/completions", {**STORED_TEXT, "n": n})


@pytest.mark.parametrize("how", ["body", "headers", "unnamed"])
async def test_calls_share_a_group(tmp_path, how) -> None:
    body, headers = {**STORED_TEXT}, {}
    if how == "body":
        body["metadata"] = {"group": "a", "size": "3"}
    elif how == "headers":
        body["store"] = False
        named = {"Store": "true", "Group": "a", "Size": "3"}
        headers = {f"X-Groupwise-{name}": value for name, value in named.items()}
    async with asking(tmp_path) as (served, client):
        members = 4 if how == "unnamed" else 3  # as many as the run's groups have
        answers = [
            await client.ok("/v1/completions", body, headers=headers) for _ in range(members)
        ]
        (group,) = {each["group_id"] for each in answers}
        assert [each["id"] for each in answers] == [f"cmpl-{group}-{n}" for n in range(members)]
        kept = await record(served, group)
        assert [each.completion for each in kept.rollouts] == [shown(each)[0] for each in answers]
        assert len({each.segments[0].seed for each in kept.rollouts}) == members
        for place, each in enumerate(answers[:-1]):
            posted = await client.reward(each["id"], place)
            assert (posted["group_id"], posted["status"]) == (group, "accepted")
        assert await counts(served) == {"open": 1}
        await client.reward(answers[-1]["id"], None)
        assert await counts(served) == {"rewarded": 1}
        following = await client.ok("/v1/completions", body, headers=headers)
        assert following["group_id"] != group


async def test_a_group_that_the_policy_has_left_behind_is_not_continued(tmp_path) -> None:
    async with asking(tmp_path, settings={"steps": "manual"}) as (_, client):
        first = await client.text(store=True)
        second = await client.text(store=True)
        assert second["group_id"] == first["group_id"]
        other = await client.text(store=True, n=2)
        await client.reward(other["id"], 1, 0)
        await client.ok("/step", {"wait": True})
        third = await client.text(store=True)
        assert third["group_id"] != first["group_id"]
        assert third["policy_version"][1] == 1


async def test_calls_at_once_share_a_group(tmp_path) -> None:
    async with asking(tmp_path, pace=0.01) as (served, client):
        gate = served.engine.hold("sample")
        calls = [asyncio.create_task(client.ok("/v1/completions", STORED_TEXT)) for _ in range(6)]
        calls.append(asyncio.create_task(client.stream_chunks("/v1/completions", STORED_TEXT)))
        calls.append(asyncio.create_task(client.stream_chunks("/v1/completions", STORED_TEXT)))
        await wait_until_async(lambda: served.engine.calls["sample"] == 1)
        gate.set()
        *whole, one, two = await asyncio.gather(*calls)
        ids = [each["id"] for each in whole] + [one[-1]["id"], two[-1]["id"]]
        assert len({*ids}) == 8
        assert len({each["group_id"] for each in whole} | {one[-1]["group_id"]}) == 2
        assert served.engine.calls["sample"] == 2
        assert await counts(served) == {"open": 2}


def retry(count: int) -> dict[str, str]:
    return {"x-stainless-retry-count": str(count)}


LOST = {"x-lost": "true"}
"""The client of a request with this header disconnects while its whole response is sent."""


def losing_answers(app: FastAPI) -> Any:
    async def receive_what_comes(scope: Scope, receive: Receive, send: Send) -> None:
        if (b"x-lost", b"true") not in scope["headers"]:
            await app(scope, receive, send)
            return
        gone, is_read = asyncio.Event(), False

        async def receive_until_gone() -> Message:
            nonlocal is_read
            if not is_read:
                message = await receive()
                is_read = not message.get("more_body", False)
                return message
            await gone.wait()
            return {"type": "http.disconnect"}

        async def lose(message: Message) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                gone.set()
                await asyncio.Event().wait()  # until the request is cancelled

        await app(scope, receive_until_gone, lose)
        await send({"type": "http.response.start", "status": 499, "headers": []})
        await send({"type": "http.response.body"})

    return receive_what_comes


@pytest.mark.parametrize("path", [*PATHS, "/v1/responses"])
async def test_retries_get_the_lost_answers_once_each(tmp_path, path) -> None:
    """Never the answer of a call that runs beside them, also after the server was killed."""
    body = {**PATHS.get(path, {"model": "latest", "input": "abc"}), "store": True}
    async with open_service(tmp_path) as served:
        await served.start()
        async with client_of(losing_answers(served.app())) as http:
            client = Client(http)
            answers = [await client.ok(path, body)]
            for count in (0, 0, 1):
                answer = await http.post(path, json=body, headers={**retry(count), **LOST})
                assert answer.status_code == 499
            answers += [  # lost twice; lost once; never arrived
                await client.ok(path, body, headers=retry(count)) for count in (2, 1, 1)
            ]
            prefix = answers[0]["id"].removesuffix("-0")
            assert [each["id"] for each in answers] == [f"{prefix}-{place}" for place in range(4)]
            assert served.engine.calls["sample"] == 1
            answers.append(await client.ok(path, body))
        await served.kill()
        await served.engine.close()
    async with open_service(tmp_path) as served:
        await served.until(lambda status: status.phase == "running")
        async with client_of(served.app()) as http:
            answers += [await Client(http).ok(path, body, headers=retry(1)) for _ in range(2)]
            assert len({each["id"] for each in answers}) == len(answers)


async def test_a_retry_gets_the_newest_answer_also_after_a_kill(tmp_path) -> None:
    """The uptime, by which answers expire, goes back then."""
    path = "/v1/chat/completions"
    named = {"metadata": {"trajectory": "t", "group": "a"}}
    body = {**PATHS[path], "store": True, **named}
    async with asking(tmp_path) as (served, client):
        first = await client.ok(path, body)
        await served.kill()
        await served.engine.close()
    async with open_service(tmp_path) as served:
        await served.until(lambda status: status.phase == "running")
        async with client_of(served.app()) as http:
            second = await Client(http).ok(path, body)
            assert await Client(http).ok(path, body, headers=retry(1)) == second != first


async def test_a_retry_gets_the_whole_answer_that_was_lost(tmp_path) -> None:
    """Streamed, or of several completions."""
    async with open_service(tmp_path) as served:
        await served.start(groups_per_step=8)
        async with client_of(losing_answers(served.app())) as http:
            for more in ({"stream": True}, {"n": 2}, {"n": 2, "stream": True}):
                for path, body in PATHS.items():
                    stored = {**body, **more, "store": True}
                    sampled = served.engine.calls["sample"]
                    await http.post(path, json=stored, headers=LOST)
                    answer = await http.post(path, json=stored, headers=retry(1))
                    assert (answer.status_code, answer.headers[REPLAYED]) == (200, "true")
                    assert served.engine.calls["sample"] == sampled + 1


async def test_a_retry_takes_the_place_of_a_refused_attempt(tmp_path, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise Refusal("disk_full")

    async with asking(tmp_path) as (_, client):
        answered = await client.ok("/v1/completions", STORED_TEXT)
        with monkeypatch.context() as patch:
            patch.setattr("groupwise.server.openai.storing.give_member", full)
            await client.expect_refusal(503, "/v1/completions", STORED_TEXT, headers=retry(0))
        answer = await client.ok("/v1/completions", STORED_TEXT, headers=retry(1))
        assert answer["id"] == answered["id"].removesuffix("-0") + "-1"


async def test_requests_with_different_settings_cannot_share_a_group(tmp_path) -> None:
    async with asking(tmp_path, settings={"groups_per_step": 4}) as (_, client):
        named = {**STORED_TEXT, "metadata": {"group": "a"}}
        await client.ok("/v1/completions", named)
        size = {"metadata": {"group": "a", "size": "2"}}
        for other in ({"prompt": "b"}, {"temperature": 0.5}, size):
            error = await client.expect_refusal(400, "/v1/completions", {**named, **other})
            assert error["code"] == "settings_conflict"
        first = await client.ok("/v1/completions", {**STORED_TEXT, "max_tokens": 2})
        second = await client.ok("/v1/completions", STORED_TEXT)
        assert first["group_id"] != second["group_id"]


WRONG: dict[str, dict[str, Any]] = {
    "top_p": {"top_p": 0.9}, "top_k": {"top_k": 5}, "min_p": {"min_p": 0.1},
    "temperature": {"temperature": 0}, "seed": {"seed": 1}, "prompt": {"prompt": ["a", "b"]},
    "metadata.group": {"metadata": {"group": ""}}, "metadata.size": {"metadata": {"size": "many"}},
}  # fmt: skip


async def test_completions_that_cannot_be_stored_are_refused_by_field(tmp_path) -> None:
    async with asking(tmp_path) as (served, client):
        for field, wrong in WRONG.items():
            error = await client.expect_refusal(400, "/v1/completions", {**STORED_TEXT, **wrong})
            assert error["param"] == field
            assert field in error["message"]
        named = {"metadata": {"group": "a"}}
        for body in ({**TEXT, **named}, {**STORED_TEXT, **named, "n": 2}):
            await client.expect_refusal(400, "/v1/completions", body)
        headers = {"X-Groupwise-Group": "a"}
        await client.expect_refusal(400, "/v1/completions", TEXT, headers=headers)
        assert served.engine.calls["sample"] == 0


async def test_rewards_of_members_survive_the_server(tmp_path) -> None:
    async with open_service(tmp_path) as served:
        await served.start()
        async with client_of(served.app()) as http:
            client = Client(http)
            answers = [await client.text(store=True, metadata={"size": "3"}) for _ in range(2)]
            posted = await client.reward(answers[0]["id"], 1)
        await served.kill()
        await served.engine.close()
    async with open_service(tmp_path) as served:
        await served.until(lambda status: status.phase == "running")
        async with client_of(served.app()) as http:
            client = Client(http)
            assert await client.reward(answers[0]["id"], 1) == posted
            third = await client.text(store=True, metadata={"size": "3"})
            assert third["group_id"] == answers[0]["group_id"]
            for answer in (answers[1], third):
                await client.reward(answer["id"], 0)
            assert await counts(served) == {"rewarded": 1}


async def test_a_group_is_trained_without_members_whose_lease_ended(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("groupwise.server.run.periodic_tasks.TICK_SECONDS", 0.02)
    settings = {"groups_per_step": 1, "lease_seconds": 1.0}
    async with asking(tmp_path, settings=settings) as (served, client):
        answers = [await client.text(store=True) for _ in range(2)]
        await client.reward(answers[0]["id"], 1)
        await served.until(lambda status: status.step == 1)
        assert await counts(served) == {"trained": 1}


async def test_a_first_call_that_goes_away_leaves_the_turn_to_the_next(tmp_path) -> None:
    async with asking(tmp_path) as (served, client):
        gate = served.engine.hold("sample")
        first, second = (asyncio.create_task(client.text(store=True)) for _ in range(2))
        await wait_until_async(lambda: served.engine.calls["sample"] == 1)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        gate.set()
        assert (await second)["id"].endswith("-0")
