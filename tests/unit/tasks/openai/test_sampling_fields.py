"""What clients may ask about tokens, over the fake engine: alternatives, prompts as tokens, stops, echo; and what is never stored.

1. Alternatives stand beside each token, streamed or not, in the form of chats and of texts.
2. A prompt of tokens is the prompt that has these tokens, also where it is stored; `return_token_ids` gives them back.
3. `echo` puts the prompt before the text and its log-probabilities before the others; with `max_tokens` 0 nothing is drawn.
4. What changes the draws is refused with `store`, by its name, and so is an id that is not a token.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from groupwise.api.schemas.openai import ChatRequest, TextRequest
from groupwise.api.schemas.responses import OutputMessage, ResponsesRequest
from groupwise.core.types import CallGrammar, LogitsProcessing
from groupwise.tasks.openai.answers import INCOMPLETE, full_response
from groupwise.tasks.openai.completed import Completed, CompletionChoice, TokenDetails
from groupwise.tasks.openai.responses import chat_request, response_of
from groupwise.tasks.openai.sampling_fields import processing_of
from groupwise.testing import ALPHABET, END_ID
from tests.unit.server.openai.opening import CHAT, TEXT, asking, record
from tests.unit.server.openai.test_routes import PATHS, shown, texts_of

# 1


async def test_alternatives_of_chats(tmp_path) -> None:
    async with asking(tmp_path, pace=0.002) as (_, client):
        body = {**CHAT, "seed": 1, "n": 2, "logprobs": True, "top_logprobs": 3}
        answer = await client.ok("/v1/chat/completions", body)
        for choice in answer["choices"]:
            for each in choice["logprobs"]["content"]:
                best = each["top_logprobs"]
                assert [*best[0]] == ["token", "logprob", "bytes"]
                assert len(best) == 3
                assert [one["logprob"] for one in best] == sorted(
                    (one["logprob"] for one in best), reverse=True
                )
                named = {one["token"]: one["logprob"] for one in best}
                assert named.get(each["token"], each["logprob"]) == each["logprob"]
        pieces = await client.stream_chunks("/v1/chat/completions", body)
        sent = [each["logprobs"] for piece in pieces for each in piece["choices"]]
        answer_logprobs = [choice["logprobs"] for choice in answer["choices"]]
        assert [each for each in sent if each] == answer_logprobs
        plain = await client.chat(seed=1, n=2, logprobs=True)
        for choice in plain["choices"]:
            assert not any(each["top_logprobs"] for each in choice["logprobs"]["content"])
        error = await client.expect_refusal(
            400, "/v1/chat/completions", {**CHAT, "top_logprobs": 2}
        )
        assert error["param"] == "top_logprobs"


async def test_alternatives_of_texts_include_the_drawn_token(tmp_path) -> None:
    async with asking(tmp_path) as (_, client):
        (choice,) = (await client.text(seed=1, logprobs=2))["choices"]
        answer_logprobs = choice["logprobs"]
        rows = zip(
            answer_logprobs["tokens"],
            answer_logprobs["token_logprobs"],
            answer_logprobs["top_logprobs"],
            strict=True,
        )
        for token, logprob, best in rows:
            assert best[token] == logprob
            assert len(best) in (2, 3)
        (choice,) = (await client.text(seed=1, logprobs=0))["choices"]
        assert choice["logprobs"]["top_logprobs"] is None


def test_tokens_that_are_parts_of_characters_have_the_same_text_but_the_drawn_one_is_seen() -> None:
    part, tops = INCOMPLETE, ((INCOMPLETE, -0.5), ("a", -1.0), (INCOMPLETE, -2.0))
    details = TokenDetails((part,), (-2.0,), (tops,))
    choice = CompletionChoice(part, (7,), (-2.0,), "stop", details)
    completed = Completed("x", None, "run", 0, "", 0.0, 1, (choice,))
    answer: Any = full_response("text", completed)
    assert answer.choices[0].logprobs.top_logprobs == [{part: -2.0, "a": -1.0}]
    response = response_of(ResponsesRequest(model="latest", input="a"), "", "", 0.0, completed)
    (message,) = response.output
    assert isinstance(message, OutputMessage)
    (token,) = message.content[0].logprobs
    assert [token.bytes, *(each.bytes for each in token.top_logprobs)] == [[], [], [97], []]


# 2


async def test_prompts_of_tokens(tmp_path) -> None:
    ids = [ALPHABET.index(letter) for letter in "abc"]
    async with asking(tmp_path, pace=0.002) as (served, client):
        text = await client.text(seed=3, n=2)
        for prompt in (ids, [ids]):
            answer = await client.text(prompt=prompt, seed=3, n=2, return_token_ids=True)
            assert shown(answer) == shown(text)
            assert [each["prompt_token_ids"] for each in answer["choices"]] == [ids, ids]
            assert answer["usage"] == text["usage"]
        two = await client.text(prompt=[ids, ids[:2]], seed=3, return_token_ids=True)
        assert [each["prompt_token_ids"] for each in two["choices"]] == [ids, ids[:2]]
        pieces = await client.stream_chunks(
            "/v1/completions", {**TEXT, "prompt": ids, "seed": 3, "return_token_ids": True}
        )
        assert texts_of(pieces) == shown(text)[:1]
        last = [piece["choices"][0] for piece in pieces if "policy_version" in piece]
        assert [each["prompt_token_ids"] for each in last] == [ids]
        chat = await client.chat(seed=3, return_token_ids=True)
        assert chat["prompt_token_ids"] == ids
        pieces = await client.stream_chunks(
            "/v1/chat/completions", {**CHAT, "seed": 3, "return_token_ids": True}
        )
        assert pieces[-1]["prompt_token_ids"] == ids
        assert "prompt_token_ids" not in text["choices"][0]
        kept = await client.text(prompt=ids, n=2, store=True)
        group = await record(served, kept["group_id"])
        assert (group.example.prompt, group.rollouts[0].prompt_ids) == ("abc", tuple(ids))
        for wrong in ([ids[0], 99], [[]], [], [1, "a"], [True], [-1], [[1], "a"]):
            error = await client.expect_refusal(400, "/v1/completions", {**TEXT, "prompt": wrong})
            assert error["param"].split(".")[0] == "prompt"


@pytest.mark.parametrize("path", PATHS)
async def test_stops_of_tokens_and_fewest_tokens(tmp_path, path) -> None:
    stop = ALPHABET.index("e")
    async with asking(tmp_path, settings={"max_completion_length": 12}) as (_, client):
        body = {**PATHS[path], "n": 24, "seed": 3}

        async def ids(**more: Any) -> list[list[int]]:
            answer = await client.ok(path, {**body, **more})
            return [choice["token_ids"] for choice in answer["choices"]]

        plain = await ids()
        cut = await ids(stop_token_ids=[stop])
        for whole_ids, cut_ids in zip(plain, cut, strict=True):
            end = whole_ids.index(stop) + 1 if stop in whole_ids else len(whole_ids)
            assert cut_ids == whole_ids[:end]
        assert any(END_ID in each for each in plain)
        assert {len(each) for each in await ids(ignore_eos=True)} == {12}
        for each in await ids(min_tokens=6, stop_token_ids=[stop]):
            assert not {stop, END_ID} & {*each[:6]}
        kept = {"stop_token_ids": [stop], "min_tokens": 2, "ignore_eos": True, "store": True}
        assert await client.ok(path, {**PATHS[path], **kept})
        error = await client.expect_refusal(400, path, {**body, "stop_token_ids": [77]})
        assert (error["param"], "77" in error["message"]) == ("stop_token_ids", True)


# 3


async def test_echo(tmp_path) -> None:
    ids = [ALPHABET.index(letter) for letter in "abc"]
    async with asking(tmp_path, pace=0.002) as (_, client):
        plain = await client.text(seed=3, logprobs=2)
        (choice,) = plain["choices"]
        for prompt in ("abc", ids):
            body = {**TEXT, "prompt": prompt, "seed": 3, "echo": True, "logprobs": 2}
            (echoed,) = (await client.ok("/v1/completions", body))["choices"]
            assert echoed["text"] == "abc" + choice["text"]
            assert echoed["token_ids"] == choice["token_ids"]
            answer_logprobs, without = echoed["logprobs"], choice["logprobs"]
            assert answer_logprobs["tokens"] == [*"abc", *without["tokens"]]
            assert answer_logprobs["token_logprobs"][0] is None
            assert answer_logprobs["top_logprobs"][0] is None
            assert answer_logprobs["token_logprobs"][3:] == without["token_logprobs"]
            assert answer_logprobs["top_logprobs"][3:] == without["top_logprobs"]
            for token, logprob, best in zip(
                "bc",
                answer_logprobs["token_logprobs"][1:3],
                answer_logprobs["top_logprobs"][1:3],
                strict=True,
            ):
                assert best[token] == logprob == pytest.approx(-math.log(len(ALPHABET)))
            assert answer_logprobs["text_offset"] == [*range(len(answer_logprobs["tokens"]))]
            pieces = await client.stream_chunks("/v1/completions", body)
            assert texts_of(pieces) == [echoed["text"]]
            scored = await client.ok("/v1/completions", {**body, "max_tokens": 0})
            (only,) = scored["choices"]
            assert (only["text"], only["token_ids"], only["finish_reason"]) == ("abc", [], "length")
            assert only["logprobs"]["token_logprobs"] == answer_logprobs["token_logprobs"][:3]
            assert scored["usage"]["completion_tokens"] == 0
        (bare,) = (await client.text(echo=True, max_tokens=0))["choices"]
        assert (bare["text"], bare["logprobs"]) == ("abc", None)
        error = await client.expect_refusal(400, "/v1/completions", {**TEXT, "max_tokens": 0})
        assert error["param"] == "max_tokens"


# 4

CHANGING: Any = {
    "presence_penalty": 1, "frequency_penalty": -0.5, "repetition_penalty": 1.1, "logit_bias": {"5": 2}, "top_p": 0.5,
}  # fmt: skip


async def test_fields_that_change_the_draws_are_refused_with_store(tmp_path) -> None:
    async with asking(tmp_path) as (_, client):
        for path, body in PATHS.items():
            for name, value in CHANGING.items():
                assert await client.ok(path, {**body, name: value})
                error = await client.expect_refusal(400, path, {**body, name: value, "store": True})
                assert error["param"] == name
            error = await client.expect_refusal(400, path, {**body, "logit_bias": {"77": 1}})
            assert error["param"] == "logit_bias"
        for path, name, more in (
            ("/v1/completions", "echo", {"echo": True}),
            ("/v1/completions", "logprobs", {"logprobs": 1}),
            ("/v1/chat/completions", "top_logprobs", {"logprobs": True, "top_logprobs": 1}),
        ):
            error = await client.expect_refusal(400, path, {**PATHS[path], **more, "store": True})
            assert error["param"] == name


def test_only_what_differs_is_asked_of_the_engine() -> None:
    harmless: Any = {
        "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "logit_bias": {"5": 0}
    }  # fmt: skip
    for request in (
        ChatRequest.model_validate({**CHAT, **harmless}),
        TextRequest.model_validate({**TEXT, **harmless}),
    ):
        assert processing_of(request) is None
    request = TextRequest.model_validate(
        {**TEXT, "presence_penalty": 1, "logit_bias": {"5": 2, "6": 0}}
    )
    assert processing_of(request) == LogitsProcessing(1.0, logit_bias=((5, 2.0),))


SCHEMA: Any = {"type": "object", "properties": {"a": {"type": "integer"}}}
JSON: Any = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}}


async def test_the_form_of_an_answer_reaches_the_engine_or_is_refused_by_name(tmp_path) -> None:
    path, tools = "/v1/chat/completions", [{"type": "function", "function": {"name": "f"}}]
    async with asking(tmp_path) as (_, client):
        for form in (JSON, {"type": "json_object"}):
            assert await client.chat(response_format=form)
            for more in (
                {"store": True},
                {"ignore_eos": True},
            ):
                error = await client.expect_refusal(
                    400, path, {**CHAT, "response_format": form, **more}
                )
                assert error["param"] == "response_format"
        for choice in ("none", "auto", "required"):
            assert await client.chat(response_format=JSON, tools=tools, tool_choice=choice)
        error = await client.expect_refusal(
            400, path, {**CHAT, "response_format": JSON, "tools": tools, "store": True}
        )
        assert error["param"] == "response_format"
        assert await client.chat(response_format=JSON, ignore_eos=True, stop_token_ids=[3])
        error = await client.expect_refusal(
            400, path, {**CHAT, "response_format": JSON, "min_tokens": 3}
        )
        assert error["param"] == "min_tokens"
        wrong: Any = [
            {"type": "json_schema"},
            {"type": "json_object", "json_schema": JSON["json_schema"]},
            {"type": "xml"},
            {"type": "json_schema", "json_schema": {"name": "it", "schema": {"type": "foo"}}},
            {
                "type": "json_schema",
                "json_schema": {"name": "it", "schema": {"title": "x" * 70_000}},
            },
        ]
        for form in wrong:
            error = await client.expect_refusal(400, path, {**CHAT, "response_format": form})
            assert error["param"].split(".")[0] == "response_format"


def test_schemas_as_the_engine_gets_them() -> None:
    def schema_for_engine(**form: Any) -> str | None:
        processing = processing_of(ChatRequest.model_validate({**CHAT, "response_format": form}))
        return None if processing is None else processing.json_schema

    assert schema_for_engine(type="text") is None
    assert schema_for_engine(type="json_object") == '{"type": "object"}'
    assert schema_for_engine(**JSON) == json.dumps(SCHEMA), "in the order of the request"


def named_choice(name: str) -> Any:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> Any:
    tools = [named_choice(name) for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


TOOLS: Any = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "g"}},
]
F, G = ("f", json.dumps(SCHEMA)), ("g", "{}")


@pytest.mark.parametrize(("more", "calls"), [
    ({"tool_choice": "required"}, CallGrammar((F, G))), ({"tool_choice": "auto"}, None), ({"tool_choice": "none"}, None),
    ({"tool_choice": "required", "parallel_tool_calls": False}, CallGrammar((F, G), is_single=True)),
    ({"tool_choice": named_choice("g")}, CallGrammar((G,), is_single=True)), ({"tool_choice": allowed("auto", "f")}, None),
    ({"tool_choice": allowed("required", "f")}, CallGrammar((F,))), ({"tool_choice": "none", "response_format": JSON}, None),
    ({"tool_choice": allowed("auto", "f"), "response_format": JSON}, CallGrammar((F,))),
    ({"tool_choice": "required", "response_format": JSON}, CallGrammar((F, G))),
])  # fmt: skip
def test_tool_choice_determines_allowed_and_required_calls(more, calls) -> None:
    request = ChatRequest.model_validate({**CHAT, "tools": TOOLS, **more})
    processing = processing_of(request) or LogitsProcessing()
    assert processing.tool_calls == calls
    is_answer = "response_format" in more and more["tool_choice"] != "required"
    assert (processing.json_schema is not None) is is_answer
    assert len(request.offered_tools) == (0 if more["tool_choice"] == "none" else 2)
    responses = {name: value for name, value in more.items() if name == "tool_choice"}
    if isinstance(choice := responses["tool_choice"], dict):  # its own form, without levels
        inner = choice[choice["type"]]
        flat = [{"type": "function", **tool["function"]} for tool in inner.get("tools", ())]
        own = {"type": choice["type"], **inner, **({"tools": flat} if flat else {})}
        tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
        body = {"model": "latest", "input": "abc", "tools": tools, "tool_choice": own}
        chat = chat_request(ResponsesRequest.model_validate(body), CHAT["messages"])
        assert chat.tool_choice == choice


async def test_forced_calls_reach_the_engine_or_are_refused_by_name(tmp_path) -> None:
    path = "/v1/chat/completions"
    bad: Any = {"type": "function", "function": {"name": "bad", "parameters": {"not": {}}}}
    async with asking(tmp_path) as (_, client):
        for choice in (
            "required",
            named_choice("f"),
            allowed("required", "f"),
            allowed("auto", "g"),
        ):
            body = {**CHAT, "tools": TOOLS, "tool_choice": choice}
            assert await client.ok(path, body)
            if choice != allowed("auto", "g"):
                error = await client.expect_refusal(400, path, {**body, "store": True})
                assert error["param"] == "tool_choice"
        assert await client.chat(tools=TOOLS, tool_choice=allowed("auto", "g"), store=True)
        wrong: Any = [
            "any", named_choice("h"), allowed("required", "f", "h"), allowed("none", "f"), allowed("auto"), {"type": "function"},
            {**named_choice("f"), "more": 1}, {"type": "function", "function": {"name": "f", "more": 1}}, {"type": "custom", "name": "f"},
        ]  # fmt: skip
        for choice in wrong:
            error = await client.expect_refusal(
                400, path, {**CHAT, "tools": TOOLS, "tool_choice": choice}
            )
            assert error["param"] == "tool_choice", error
        error = await client.expect_refusal(400, path, {**CHAT, "tool_choice": "required"})
        assert error["param"] == "tool_choice"
        long: Any = {"type": "function", "function": {"name": "f", "parameters": {"title": "x" * 70_000}}}  # fmt: skip
        for tool in (bad, long):
            assert await client.chat(tools=[tool])
            error = await client.expect_refusal(
                400, path, {**CHAT, "tools": [tool], "tool_choice": "required"}
            )
            assert error["param"] == "tools"
            forms = {**CHAT, "tools": [tool], "response_format": JSON}
            assert (await client.expect_refusal(400, path, forms))["param"] == "tools"


async def test_responses_have_them_under_their_own_names(tmp_path) -> None:
    async with asking(tmp_path) as (_, client):
        body: Any = {"model": "latest", "input": "abc", "top_logprobs": 2}
        answer = await client.ok("/v1/responses", body)
        for each in answer["output"][0]["content"][0]["logprobs"]:
            assert [*each["top_logprobs"][0]] == ["token", "bytes", "logprob"]
            assert len(each["top_logprobs"]) == 2
        form = {"type": "json_schema", "name": "it", "schema": SCHEMA, "strict": True}
        body = {"model": "latest", "input": "abc", "text": {"format": form}}
        assert await client.ok("/v1/responses", body)
        error = await client.expect_refusal(400, "/v1/responses", {**body, "store": True})
        assert error["param"] == "text.format"


async def test_a_trajectory_is_shown_by_text(tmp_path) -> None:
    async with asking(tmp_path) as (_, client):
        body = {**TEXT, "prompt": [1, 2], "store": True, "metadata": {"trajectory": "t"}}
        error = await client.expect_refusal(400, "/v1/completions", body)
        assert error["param"] == "prompt"
