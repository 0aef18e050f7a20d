"""Calls of an agent that are rewarded together: trajectories, and the groups that compare them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from groupwise.core.types import Rollout
from groupwise.server.ledger import events, groups
from groupwise.server.ledger.idempotency import InFlightRequests
from groupwise.server.run import ledger_operations, periodic_tasks
from tests.processes import wait_until_async
from tests.unit.server.http_client import client_of
from tests.unit.server.openai.opening import Client, asking, open_service, record
from tests.unit.server.openai.test_storing import counts

USER = {"role": "user", "content": "abc"}


async def turn(
    client: Client, trajectory: str, messages: Sequence[Any] = (USER,), **more: Any
) -> Any:
    """One call of a trajectory in the group `s`, of two trajectories."""
    metadata = {"trajectory": trajectory, "group": "s", "size": "2", **more.pop("metadata", {})}
    headers = more.pop("headers", None)
    body = {"model": "latest", "messages": [*messages], "store": True, "metadata": metadata}
    return await client.ok("/v1/chat/completions", {**body, **more}, headers=headers)


async def two_turns(client: Client, trajectory: str, **more: Any) -> list[Any]:
    first = await turn(client, trajectory, **more)
    first_message = first["choices"][0]["message"]
    answer = {"role": "assistant", "content": first_message["content"]}
    return [first, await turn(client, trajectory, [USER, answer, USER], **more)]


async def reward(client: Client, trajectory: str, value: float | None, **more: Any) -> Any:
    body = {"trajectory": trajectory, "reward": value, **more}
    return await client.ok("/rewards", body)


def sampled(rollout: Rollout) -> list[list[int]]:
    return [[*each.token_ids] for each in rollout.segments if each.source == "policy"]


def token_ids(answers: Sequence[Any]) -> list[list[int]]:
    return [answer["choices"][0]["token_ids"] for answer in answers]


async def test_one_reward_trains_all_turns_with_the_sampled_tokens(tmp_path) -> None:
    async with asking(tmp_path, settings={"groups_per_step": 1, "staleness": 0}) as (
        served,
        client,
    ):
        one = await two_turns(client, "t-1")
        two = await two_turns(client, "t-2")
        (group,) = {answer["group_id"] for answer in one + two}
        assert served.engine.calls["sample"] == 4  # no whole group for any turn
        assert len({answer["id"] for answer in one + two}) == 4
        assert await counts(served) == {"open": 1}
        posted = await reward(client, "t-1", 1.0)
        assert (posted["group_id"], posted["status"]) == (group, "accepted")
        assert await reward(client, "t-1", 1.0) == posted
        last = await reward(client, "t-2", 0.0, wait=True)
        assert (last["status"], last["step"]) == ("trained", 0)
        stored_group = await record(served, group)
        assert [sampled(each) for each in stored_group.rollouts] == [token_ids(one), token_ids(two)]
        seeds = {part.seed for each in stored_group.rollouts for part in each.segments if part.seed}
        assert len(seeds) == 4
        row = await served.ledger.do(groups.read_group, group)
        assert (row.rewards, row.members) == ((1.0, 0.0), 2)
        assert await reward(client, "t-2", 0.0) == {**last, "status": "accepted", "step": None,
                                                     "metrics": None, "model_version": posted["model_version"]}  # fmt: skip


async def test_later_calls_never_wait_for_room(tmp_path) -> None:
    async with asking(
        tmp_path, settings={"groups_per_step": 1, "staleness": 0}, completions_wait=0.05
    ) as (_, client):
        await turn(client, "t-1")
        await client.expect_refusal(429, "/v1/chat/completions",
                             {"model": "latest", "messages": [USER], "store": True})  # fmt: skip
        for _ in range(3):
            await turn(client, "t-1")
        await turn(client, "t-2")  # which has a place in the same group
        await client.expect_refusal(429, "/v1/chat/completions",
                             {"model": "latest", "messages": [USER], "store": True,
                              "metadata": {"trajectory": "t-3", "group": "s", "size": "2"}})  # fmt: skip


async def test_the_log_names_the_group_that_a_call_waits_for(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(periodic_tasks, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(periodic_tasks, "WAIT_REPORTED", 0.05)
    caplog.set_level("INFO", periodic_tasks.logger.name)

    def lines() -> list[str]:
        return [text for text in caplog.messages if "for room" in text]

    settings = {"groups_per_step": 1, "staleness": 0}
    async with asking(tmp_path, settings=settings, completions_wait=20.0) as (served, client):
        await turn(client, "t-1")
        await reward(client, "t-1", 1.0)  # and the agent ends, before its second trajectory
        again = asyncio.create_task(turn(client, "new", metadata={"group": "another"}))
        await wait_until_async(lines)
        await asyncio.sleep(0.2)
        (line,) = lines()
        assert "'s' has 1 of 2" in line
        assert "close_group('s')" in line
        (group,) = (await served.service.activity()).groups
        assert (group.name, group.rewarded, group.members) == ("s", 1, 2)
        await client.ok("/trajectories/close", {"group": group.name})
        await again


async def test_a_step_waits_for_trajectories_that_it_would_make_too_old(tmp_path) -> None:
    async with asking(tmp_path, settings={"groups_per_step": 1, "staleness": 1}) as (
        served,
        client,
    ):
        await turn(client, "slow")
        for step in range(2):
            other = await client.text(store=True, n=2)
            wait = {"wait": True, "timeout": 0.3 if step else 60}
            answer = await client.http.post(
                "/rewards", json={"group_id": other["id"], "rewards": [1, 0], **wait}
            )
            assert answer.status_code == (202 if step else 200)
        await turn(client, "slow")
        await turn(client, "quick")
        await reward(client, "quick", 0.0)
        assert (await reward(client, "slow", 1.0, wait=True))["step"] == 1
        await wait_until_async(lambda: served.service.active().status.step == 3)


async def test_calls_are_listed_by_their_ids(tmp_path) -> None:
    async with asking(tmp_path) as (served, client):
        one, two = await two_turns(client, "*"), await two_turns(client, "*")
        await turn(client, "*")  # that nobody lists
        ids = [[answer["id"] for answer in answers] for answers in (one, two)]
        body = {"completion_ids": ids[0], "reward": 1.0}
        posted = await client.ok("/rewards", body)
        assert await client.ok("/rewards", body) == posted
        mixed = {"completion_ids": [ids[0][0], ids[1][0]], "reward": 1.0}
        assert (await client.expect_refusal(409, "/rewards", mixed))["code"] == "already_rewarded"
        await client.ok("/rewards", {"completion_ids": ids[1], "reward": 0.5})
        stored_group = await record(served, posted["group_id"])
        assert [sampled(each) for each in stored_group.rollouts] == [token_ids(one), token_ids(two)]
        assert await client.ok("/rewards", body) == posted
        assert await counts(served) == {"rewarded": 1}


async def test_a_list_chooses_among_the_calls_of_a_trajectory(tmp_path) -> None:
    async with asking(tmp_path) as (served, client):
        first, unused, second = [await turn(client, "t-1") for _ in range(3)]
        other = await turn(client, "t-2")
        wrong = {"completion_ids": [first["id"], other["id"]], "reward": 1.0}
        error = await client.expect_refusal(422, "/rewards", wrong)
        assert "completion_ids" in str(error["errors"])
        listed = {"completion_ids": [second["id"], first["id"]], "reward": 1.0}
        await client.ok("/rewards", {**listed, "trajectory": "t-1"})
        await client.reward(other["id"], 0.0)  # an id of a call stands for its trajectory
        stored_group = await record(served, other["group_id"])
        assert sampled(stored_group.rollouts[0]) == token_ids([second, first])
        assert unused["id"] not in (first["id"], second["id"])


async def test_a_call_that_is_sent_again_is_sampled_once(tmp_path, monkeypatch) -> None:
    looked_for: list[Any] = []
    key_for = InFlightRequests.key_for

    def counting(requests: InFlightRequests, caller: Any, sent: Any, *rest: Any, **options: Any):
        looked_for.append(sent)
        return key_for(requests, caller, sent, *rest, **options)

    monkeypatch.setattr(InFlightRequests, "key_for", counting)
    async with asking(tmp_path) as (served, client):
        first = await turn(client, "t-1")
        again = await turn(client, "t-1", headers={"x-stainless-retry-count": "1"})
        assert again == first
        assert served.engine.calls["sample"] == 1
        keyed = {"Idempotency-Key": "k-2"}
        second = await turn(client, "t-1", headers=keyed)
        assert await turn(client, "t-1", headers=keyed) == second
        assert (second["id"] != first["id"], served.engine.calls["sample"]) == (True, 2)
        gate = served.engine.hold("sample")
        calls: list[asyncio.Task[Any]] = []
        for count in (2, 3):  # its first attempts did not arrive
            headers = {"x-stainless-retry-count": f"{count}"}
            calls.append(asyncio.create_task(turn(client, "t-2", headers=headers)))
            await wait_until_async(lambda: len(looked_for) == len(calls) + 1)
            await wait_until_async(lambda: served.engine.calls["sample"] == 3)
        gate.set()
        new, retried = await asyncio.gather(*calls)
        assert retried == new
        assert (new["id"] != first["id"], served.engine.calls["sample"]) == (True, 3)
        await served.start(replace=True)  # a run that uses the name again
        other = await turn(client, "t-1", headers={"x-stainless-retry-count": "2"})
        assert other["group_id"] != first["group_id"]


async def test_a_call_answered_just_before_a_kill_is_sampled_once(tmp_path) -> None:
    async with asking(tmp_path) as (served, client):
        first = await turn(client, "t-1")
        await served.kill()
        await served.engine.close()
    async with open_service(tmp_path) as served, client_of(served.app()) as http:
        await served.until(lambda status: status.phase == "running")
        again = await turn(Client(http), "t-1", headers={"x-stainless-retry-count": "1"})
        assert again == first
        assert served.engine.calls["sample"] == 0


async def test_groups_are_closed_by_name(tmp_path) -> None:
    async with asking(tmp_path) as (served, client):
        await turn(client, "t-1")
        group = (await turn(client, "t-2"))["group_id"]
        await reward(client, "t-2", 1.0)
        closed = await client.ok("/trajectories/close", {"group": "s"})
        assert closed == {"closed": [group], "given_up": []}
        stored_group = await record(served, group)
        assert len(stored_group.rollouts) == 2
        row = await served.ledger.do(groups.read_group, group)
        assert row.rewards == (None, 1.0)
        event_list = await served.ledger.do(events.events_after, 0, 100)
        assert any("t-1" in str(event.data) for event in event_list)
        late = await client.expect_refusal(410, "/rewards", {"trajectory": "t-1", "reward": 1.0})
        assert late["code"] == "lease_expired"
        alone = await turn(client, "t-3")
        empty = await client.ok("/trajectories/close", {"group": "s"})
        assert empty == {"closed": [], "given_up": [alone["group_id"]]}
        nothing = await client.ok("/trajectories/close", {"group": "s"})
        assert nothing == {"closed": [], "given_up": []}
        misspelt = await client.expect_refusal(404, "/trajectories/close", {"group": "S"})
        assert misspelt["code"] == "unknown_group"


async def test_a_lease_ends_after_the_last_call(tmp_path) -> None:
    async with asking(tmp_path, settings={"lease_seconds": 100.0}) as (served, client):
        group = (await turn(client, "t-1"))["group_id"]

        def overdue(transaction: Any) -> None:
            transaction.execute("UPDATE groups SET lease_end = ?", (transaction.uptime + 50,))

        await served.ledger.do(overdue)
        await turn(client, "t-1")
        row = await served.ledger.do(groups.read_group, group)
        await served.ledger.do(overdue)
        shortened = await served.ledger.do(groups.read_group, group)
        assert row.lease_end - shortened.lease_end > 40

        def end(transaction: Any) -> None:
            transaction.execute("UPDATE groups SET lease_end = 0")
            ledger_operations.tick(transaction)

        await served.ledger.do(end)
        assert await counts(served) == {"expired": 1}
        event_list = await served.ledger.do(events.events_after, 0, 100)
        assert "t-1" in str(event_list[-1].data)
        body = {"model": "latest", "messages": [USER], "store": True,
                "metadata": {"trajectory": "t-1", "group": "s", "size": "2"}}  # fmt: skip
        error = await client.expect_refusal(410, "/v1/chat/completions", body)
        assert error["code"] == "lease_expired"


async def test_a_first_call_that_fails_leaves_nothing(tmp_path) -> None:
    async with asking(tmp_path, settings={"groups_per_step": 1, "staleness": 0}) as (
        served,
        client,
    ):
        body = {"model": "latest", "messages": [USER], "store": True,
                "metadata": {"trajectory": "t-1", "group": "s"}}  # fmt: skip
        long = {**body, "messages": [{"role": "user", "content": "a" * 5000}]}
        error = await client.expect_refusal(400, "/v1/chat/completions", long)
        assert error["code"] == "context_length_exceeded"
        assert await counts(served) == {}, "the engine was not asked"
        for failures in (1, 2):
            await client.expect_refusal(400, "/v1/chat/completions", {**body, "max_tokens": 9999})
            assert await counts(served) == {"given_up": failures}
        await turn(client, "t-1")
        assert await counts(served) == {"given_up": 2, "open": 1}


async def test_calls_at_once_share_one_group(tmp_path) -> None:
    async with asking(tmp_path, pace=0.01) as (served, client):
        calls = [turn(client, f"t-{n}") for n in range(4)]
        answers = await asyncio.gather(*calls)
        assert len({answer["group_id"] for answer in answers}) == 2
        assert await counts(served) == {"open": 2}
        pieces = await client.stream_chunks(
            "/v1/chat/completions",
            {"model": "latest", "messages": [USER], "store": True,
             "metadata": {"trajectory": "t-0"}},
        )  # fmt: skip
        assert pieces[-1]["group_id"] == answers[0]["group_id"]
        assert {piece["id"] for piece in pieces} == {pieces[-1]["id"]}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"metadata": {"group": "another"}}, "settings_conflict"),
        ({"n": 2}, "invalid_request"),
        ({"store": False}, "invalid_request"),
        ({"metadata": {"trajectory": ""}}, "invalid_request"),
        ({"metadata": {"trajectory": "t-2", "size": "3"}}, "settings_conflict"),
    ],
)
async def test_a_call_that_does_not_fit_its_trajectory_is_refused(tmp_path, change, code) -> None:
    async with asking(tmp_path) as (_, client):
        await turn(client, "t-1")
        metadata = {"trajectory": "t-1", "group": "s", "size": "2", **change.get("metadata", {})}
        body = {"model": "latest", "messages": [USER], "store": True, **change}
        answer = await client.http.post("/v1/chat/completions", json={**body, "metadata": metadata})
        assert (answer.status_code in (400, 409, 422), answer.json()["error"]["code"]) == (
            True,
            code,
        )


async def test_a_trajectory_that_has_its_reward_takes_no_call(tmp_path) -> None:
    async with asking(tmp_path) as (_, client):
        keyed = {"Idempotency-Key": "run-t-1-0"}
        first = await turn(client, "t-1", headers=keyed)
        group = (await turn(client, "t-2"))["group_id"]
        await reward(client, "t-1", 1.0)
        assert await turn(client, "t-1", headers=keyed) == first
        body = {"model": "latest", "messages": [USER], "store": True,
                "metadata": {"trajectory": "t-1", "group": "s", "size": "2"}}  # fmt: skip
        error = await client.expect_refusal(409, "/v1/chat/completions", body)
        assert error["code"] == "already_rewarded"
        other = {"trajectory": "t-1", "reward": 0.0}
        assert (await client.expect_refusal(409, "/rewards", other))["code"] == "already_rewarded"
        unknown = {"trajectory": "t-9", "reward": 0.0}
        assert (await client.expect_refusal(404, "/rewards", unknown))["code"] == "unknown_group"
        whole = {"group_id": group, "rewards": [1.0, 0.0]}
        assert (await client.expect_refusal(422, "/rewards", whole))["code"] == "invalid_request"


async def test_trajectories_survive_the_server(tmp_path) -> None:
    async with open_service(tmp_path) as served:
        await served.start()
        async with client_of(served.app()) as http:
            client = Client(http)
            one = [await turn(client, "t-1"), await turn(client, "t-2")]
            posted = await reward(client, "t-1", 1.0)
        await served.kill()
        await served.engine.close()
    async with open_service(tmp_path) as served:
        await served.until(lambda status: status.phase == "running")
        async with client_of(served.app()) as http:
            client = Client(http)
            assert await reward(client, "t-1", 1.0) == posted
            again = await turn(client, "t-2", headers={"x-stainless-retry-count": "1"})
            assert again["id"] == one[1]["id"]
            two = await turn(client, "t-2")
            await reward(client, "t-2", 0.0)
            stored_group = await record(served, two["group_id"])
            expected = [token_ids(one[:1]), token_ids([one[1], two])]
            assert [sampled(each) for each in stored_group.rollouts] == expected
            assert await counts(served) == {"rewarded": 1}


async def test_a_client_that_goes_away_leaves_no_trajectory(tmp_path) -> None:
    async with asking(tmp_path, pace=0.01) as (served, client):
        served.engine.hold("sample")
        work = asyncio.create_task(turn(client, "t-1"))
        await wait_until_async(lambda: served.engine.calls["sample"] == 1)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        deadline = asyncio.get_running_loop().time() + 10
        while await counts(served) != {"given_up": 1}:
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.01)


async def test_each_turn_keeps_the_policy_that_sampled_it(tmp_path) -> None:
    settings = {"groups_per_step": 1, "staleness": 1}
    async with asking(tmp_path, settings=settings) as (served, client):
        first = await turn(client, "t-1")
        other = await client.text(store=True, n=2)
        await client.reward(other["id"], 1, 0, wait=True)
        second = await turn(client, "t-1")
        assert [answer["policy_version"][1] for answer in (first, second)] == [0, 1]
        await turn(client, "t-2")
        await reward(client, "t-2", 0.0)
        assert (await reward(client, "t-1", 1.0, wait=True))["status"] == "trained"
        stored_group = await record(served, first["group_id"])
        policies = [
            part.policy_version
            for part in stored_group.rollouts[0].segments
            if part.source == "policy"
        ]
        assert policies == [0, 1]
