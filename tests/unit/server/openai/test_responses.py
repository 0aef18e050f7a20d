"""/v1/responses over the fake engine: fields, stored conversations, tools, stream events, training, and refusals that name the field."""

import json
from typing import Any

import pytest

from groupwise.api.schemas.keys import Role
from groupwise.api.schemas.responses import ResponsesRequest
from groupwise.server.ledger.idempotency import RETENTION_SECONDS, delete_expired
from groupwise.tasks.openai.responses import chat_request, messages_of_input
from groupwise.testing import END_ID, FakeTokenizer
from tests.unit.server.http_client import client_of, keyring
from tests.unit.server.openai.opening import asking, open_service, record

PATH = "/v1/responses"
REQUEST_BODY: dict[str, Any] = {"model": "latest", "input": "abc"}
TOOL = {"type": "function", "name": "add", "description": "Adds.", "strict": True,
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}  # fmt: skip
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def writes(monkeypatch, text):
    """Let the model write this text, character by character, in as many tokens as it draws."""

    def decode(self: FakeTokenizer, ids: list[int], **_: object) -> str:
        return text if ids[-1] == END_ID or len(ids) == 12 else text[: 8 * len(ids)]

    monkeypatch.setattr(FakeTokenizer, "decode", decode)


async def events_of(client, **more: Any) -> list[Any]:
    answer = await client.http.post(PATH, json={**REQUEST_BODY, "stream": True, **more})
    assert answer.status_code == 200, answer.text
    events = []
    for block in filter(None, answer.text.split("\n\n")):
        kind, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    return events


async def test_a_response_is_the_same_as_a_chat(tmp_path) -> None:
    async with asking(tmp_path) as (_, client):
        chat = await client.chat(seed=3, messages=[
            {"role": "system", "content": "be"}, {"role": "user", "content": "abc"}, {"role": "user", "content": "de"}])  # fmt: skip
        items = [{"role": "user", "content": "abc"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "de"}]}]  # fmt: skip
        body = {**REQUEST_BODY, "input": items, "instructions": "be", "seed": 3}
        answer = await client.ok(PATH, {**body, "include": ["message.output_text.logprobs"]})
        (message,) = answer["output"]
        (part,) = message["content"]
        (choice,) = chat["choices"]
        assert (part["text"], answer["token_ids"]) == (
            choice["message"]["content"],
            choice["token_ids"],
        )
        assert len(part["logprobs"]) == len(choice["token_ids"])
        assert (message["role"], message["type"]) == ("assistant", "message")
        assert answer["id"].startswith("resp_")
        assert (answer["object"], answer["group_id"]) == ("response", None)
        assert answer["status"] == (
            "incomplete" if choice["finish_reason"] == "length" else "completed"
        )
        usage, expected = answer["usage"], chat["usage"]
        assert usage["input_tokens"] == expected["prompt_tokens"] == 9
        assert usage["total_tokens"] == expected["total_tokens"]
        short = await client.ok(PATH, {**REQUEST_BODY, "max_output_tokens": 1, "stop": "zz"})
        if short["token_ids"] != [END_ID]:
            assert (short["status"], short["incomplete_details"]["reason"]) == (
                "incomplete",
                "max_output_tokens",
            )


async def test_a_conversation_continues_from_a_kept_response(tmp_path, monkeypatch) -> None:
    writes(monkeypatch, f"I add.{CALL}")
    settings = {"max_completion_length": 12}
    async with asking(tmp_path, settings=settings) as (served, client):
        first = await client.ok(PATH, {**REQUEST_BODY, "instructions": "be", "tools": [TOOL]})
        message, call = first["output"]
        assert (message["content"][0]["text"], call["name"]) == ("I add.", "add")
        assert json.loads(call["arguments"]) == {"a": 1}
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "two"}
        writes(monkeypatch, "done")
        more = {"previous_response_id": first["id"], "input": [output], "tools": [TOOL]}
        second = await client.ok(
            PATH, {**REQUEST_BODY, **more, "store": True, "metadata": {"size": "1"}}
        )
        stored_group: Any = await record(served, second["group_id"])
        question, call_message, tool_result = (
            stored_group.example.prompt
        )  # without the earlier instructions
        assert (question["content"], call_message["content"], tool_result["content"]) == (
            "abc",
            "I add.",
            "two",
        )
        assert call_message["tool_calls"][0]["id"] == tool_result["tool_call_id"] == call["call_id"]
        repeated = {"input": [{"role": "user", "content": "abc"}, message, call, output]}
        third = await client.ok(PATH, {**REQUEST_BODY, **repeated, "tools": [TOOL], "store": False})
        assert third["usage"]["input_tokens"] == second["usage"]["input_tokens"]
        assert (await client.http.get(f"{PATH}/{first['id']}")).json() == first
        for missing in (third["id"], "resp_none"):
            error = await client.expect_refusal(
                404, PATH, {**REQUEST_BODY, "previous_response_id": missing}
            )
            assert (error["code"], error["param"]) == ("unknown_response", "previous_response_id")
        assert (await client.http.delete(f"{PATH}/{first['id']}")).json()["deleted"] is True
        assert (await client.http.get(f"{PATH}/{first['id']}")).status_code == 404
        assert await client.ok(PATH, {**REQUEST_BODY, "previous_response_id": second["id"]})


async def test_only_the_key_that_asked_sees_a_response(tmp_path) -> None:
    ring, keys = keyring()
    async with open_service(tmp_path) as served, client_of(served.app(ring)) as http:
        await served.start()
        own, other = ({"X-API-Key": keys[role]} for role in (Role.TRAIN, Role.ADMIN))
        id = (await http.post(PATH, json=REQUEST_BODY, headers=own)).json()["id"]
        for headers, status in ((other, 404), ({"X-API-Key": keys[Role.READ]}, 403), (own, 200)):
            assert (await http.get(f"{PATH}/{id}", headers=headers)).status_code == status
            body = {**REQUEST_BODY, "previous_response_id": id}
            assert (await http.post(PATH, json=body, headers=headers)).status_code == status
        assert (await http.delete(f"{PATH}/{id}", headers=other)).status_code == 404
        assert (await http.delete(f"{PATH}/{id}", headers=own)).status_code == 200


async def test_responses_are_kept_for_a_day(tmp_path) -> None:
    async with asking(tmp_path) as (served, client):
        answer = await client.ok(PATH, REQUEST_BODY)
        assert await served.ledger.do(delete_expired) == 0

        def age(transaction):
            transaction.execute("UPDATE responses SET made_at = made_at - ?", (RETENTION_SECONDS,))

        await served.ledger.do(age)
        assert (await client.http.get(f"{PATH}/{answer['id']}")).status_code == 404
        assert await served.ledger.do(delete_expired) == 1


async def test_the_response_of_a_key_is_answered_once_and_kept_once(tmp_path) -> None:
    async with asking(tmp_path) as (_, client):
        key = {"Idempotency-Key": "k"}
        first = await client.ok(PATH, REQUEST_BODY, headers=key)
        assert await client.ok(PATH, REQUEST_BODY, headers=key) == first
        assert await client.ok(PATH, {**REQUEST_BODY, "previous_response_id": first["id"]})
        streams = [
            await client.http.post(
                PATH, json={**REQUEST_BODY, "stream": True}, headers={"Idempotency-Key": "s"}
            )
            for _ in range(2)
        ]
        last_events = [stream.text.split("event: ")[-1] for stream in streams]
        assert last_events[0].split('"response":')[1] == last_events[1].split('"response":')[1]


async def test_a_stored_response_is_rewarded_by_its_id(tmp_path) -> None:
    async with asking(tmp_path, settings={"num_completions_per_prompt": 2}) as (served, client):
        answers = [await client.ok(PATH, {**REQUEST_BODY, "store": True}) for _ in range(2)]
        assert len({answer["group_id"] for answer in answers}) == 1
        for reward, answer in enumerate(answers):
            await client.reward(answer["id"], reward)
        stored_group: Any = await record(served, answers[0]["group_id"])
        assert [answer["token_ids"] for answer in answers] == [
            list(rollout.completion_ids) for rollout in stored_group.rollouts
        ]


END_EVENTS = ["output_text.done", "content_part.done", "output_item.done"]
BEGIN_EVENTS = ["created", "in_progress", "output_item.added", "content_part.added"]
CALLS = [
    "output_item.added",
    "function_call_arguments.delta",
    "function_call_arguments.done",
    "output_item.done",
]


@pytest.mark.parametrize(("text", "kinds"), [
    ("Some words to say.", [*BEGIN_EVENTS, *END_EVENTS]), (f"I add.{CALL}", [*BEGIN_EVENTS, *END_EVENTS, *CALLS]),
    (CALL + CALL, [*BEGIN_EVENTS[:2], *CALLS, *CALLS]), ("", [*BEGIN_EVENTS, *END_EVENTS]),
])  # fmt: skip
async def test_a_stream_has_the_events_of_the_response(tmp_path, monkeypatch, text, kinds) -> None:
    writes(monkeypatch, text)
    settings = {"max_completion_length": 12}
    async with asking(tmp_path, pace=0.01, settings=settings) as (_, client):
        events = await events_of(client, tools=[TOOL])
        final = events[-1]["response"]
        event_types = [event["type"].removeprefix("response.") for event in events]
        assert [kind for kind in event_types if kind != "output_text.delta"] == [
            *kinds,
            final["status"],
        ]
        streamed_text = "".join(
            e["delta"] for e in events if e["type"].endswith("output_text.delta")
        )
        ends = [event for event in events if event["type"].endswith("output_item.done")]
        assert [event["item"] for event in ends] == final["output"]
        assert [event["output_index"] for event in ends] == [*range(len(ends))]
        words = [
            item["content"][0]["text"] for item in final["output"] if item["type"] == "message"
        ]
        assert streamed_text == "".join(words) == text.partition("<")[0]
        assert events[0]["response"]["id"] == final["id"]
        assert (await client.http.get(f"{PATH}/{final['id']}")).json() == final


NEVER = {
    "temperature": 101, "top_logprobs": 21, "background": True, "truncation": "auto", "conversation": "c", "prompt": {"id": "p"},
    "tools": [{"type": "web_search"}], "no_such_field": 1, "max_output_tokens": 1000, "reasoning.effort": {"effort": "low"},
    "text.format": {"format": {"type": "strange"}}, "tool_choice": "required", "stream_options": {"include_obfuscation": True},
    "input": [{"type": "item_reference", "id": "x"}], "metadata": {"group": "a"}, "top_p": 0.5,
}  # fmt: skip


async def test_unsupported_fields_of_responses_are_refused_by_name(tmp_path) -> None:
    async with asking(tmp_path) as (_, client):
        for key, value in NEVER.items():
            store = {"store": True} if key == "top_p" else {}
            error = await client.expect_refusal(
                400, PATH, {**REQUEST_BODY, **store, key.partition(".")[0]: value}
            )
            assert error["type"] == "invalid_request_error"
            named = (
                error["param"].removesuffix(".type") if "." in key else error["param"].split(".")[0]
            )
            assert named == key, error
        image = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]
        error = await client.expect_refusal(400, PATH, {**REQUEST_BODY, "input": image})
        assert error["param"].startswith("input.0.content.0"), error
        assert "reads no images" in error["message"]
        error = await client.expect_refusal(
            400, PATH, {**REQUEST_BODY, "tools": [{"type": "web_search"}]}
        )
        assert "runs no tools by itself" in error["message"]
        bad = {**TOOL, "parameters": {"type": "strange"}}
        error = await client.expect_refusal(400, PATH, {**REQUEST_BODY, "tools": [bad]})
        assert error["param"] == "tools.0.parameters"
        nameless = {"format": {"type": "json_schema", "schema": {}}}
        error = await client.expect_refusal(400, PATH, {**REQUEST_BODY, "text": nameless})
        assert error["param"] == "text.format.name"


async def test_harmless_fields_of_openai_clients_are_accepted(tmp_path) -> None:
    harmless = {
        "include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"}, "text": {"format": {"type": "text"}},
        "truncation": "disabled", "background": False, "user": "me", "service_tier": "auto", "metadata": {"a": "b"},
        "max_tool_calls": 3, "tool_choice": "auto", "parallel_tool_calls": False, "top_p": 1, "tools": [],
        "prompt_cache_options": {"mode": "implicit"},
    }  # fmt: skip
    async with asking(tmp_path) as (_, client):
        plain = await client.ok(PATH, {**REQUEST_BODY, "seed": 1})
        answer = await client.ok(PATH, {**REQUEST_BODY, **harmless, "seed": 1})
        assert answer["output"][0]["content"] == plain["output"][0]["content"]
        assert answer["metadata"] == {"a": "b"}


def test_items_become_messages():
    call = {
        "type": "function_call",
        "call_id": "1",
        "name": "f",
        "arguments": "{}",
        "id": "fc",
        "status": "completed",
    }
    items = [
        {"role": "developer", "content": "a"}, {"type": "reasoning", "id": "r", "summary": []},
        {"role": "assistant", "content": [{"type": "output_text", "text": "b", "annotations": [], "logprobs": []},
            {"type": "refusal", "refusal": "c"}], "id": "msg", "status": "completed", "type": "message"},
        call, {**call, "call_id": "2"}, {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "d"}]},
        {**call, "call_id": "3"},
    ]  # fmt: skip
    request = ResponsesRequest.model_validate(
        {**REQUEST_BODY, "input": items, "tool_choice": {"type": "function", "name": "f"}}
    )
    messages = messages_of_input(request)
    assert [message["role"] for message in messages] == [
        "developer",
        "assistant",
        "tool",
        "assistant",
    ]
    assert (messages[1]["content"], messages[3]["content"]) == ("bc", None)
    ids = [[each["id"] for each in message.get("tool_calls", [])] for message in messages]
    assert ids == [[], ["1", "2"], [], ["3"]]
    plain = request.model_copy(update={"tool_choice": None, "tools": None})
    assert chat_request(plain, messages).store is False
