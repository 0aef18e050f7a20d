"""The OpenAI-compatible routes over the fake engine: shapes, seeds, streams, stops, refusals by name, and clients that go away."""

from __future__ import annotations

import asyncio
import gzip
import json
from itertools import islice, product
from typing import Any

import httpx2
import pytest
from pydantic import BaseModel

from groupwise.api.schemas.keys import Role
from groupwise.api.schemas.openai import ChatRequest, TextRequest
from groupwise.api.schemas.problems import KINDS
from groupwise.api.schemas.responses import ResponsesRequest
from groupwise.server.ledger.file import DiskFull, LedgerClosed
from groupwise.server.openai import service, storing
from groupwise.server.openai.service import MAX_SAMPLING
from groupwise.server.run.policy_versions import Versions
from groupwise.testing import ALPHABET, END_ID, FakeTokenizer
from tests.fake_engine import FakeEngine
from tests.processes import wait_until_async
from tests.unit.server.http_client import HERE, client_of, keyring, listening
from tests.unit.server.openai.opening import CHAT, TEXT, Client, Open, asking, open_service, record
from tests.unit.server.test_schema_walk import RAW, WRONG

PATHS = {"/v1/chat/completions": CHAT, "/v1/completions": TEXT}


def texts_of(pieces: list[Any], choices: int = 1) -> list[str]:
    """The text of each choice, put together."""
    texts = [""] * choices
    for piece in pieces:
        for choice in piece["choices"]:
            delta = choice.get("text", choice.get("delta", {}).get("content", ""))
            texts[choice["index"]] += delta
    return texts


def shown(answer: Any) -> list[str]:
    return [
        each["text"] if "text" in each else each["message"]["content"] for each in answer["choices"]
    ]


# 1


async def test_models(tmp_path, monkeypatch) -> None:
    async with open_service(tmp_path) as served, client_of(served.app()) as http:
        client = Client(http)
        assert (await http.get("/v1/models")).json() == {"object": "list", "data": []}
        run = await served.start()
        names = [each["id"] for each in (await http.get("/v1/models")).json()["data"]]
        assert names == [f"{run}@0", "latest"]
        one = (await http.get(f"/v1/models/{run}@0")).json()
        fingerprint = (await served.service.status()).fingerprint
        assert (one["owned_by"], one["fingerprint"]) == (run, fingerprint)
        for unknown in (f"{run}@1", "gpt-4o"):
            answer = await http.get(f"/v1/models/{unknown}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_model")
            assert f"{run}@0, latest" in answer.json()["error"]["message"]
            assert "GET /model" not in answer.json()["error"]["message"]
        old = await client.text(model=f"{run}@0")
        assert (old["model"], old["policy_version"]) == (f"{run}@0", [run, 0])
        await served.round(0)
        monkeypatch.setattr(Versions, "steps", lambda versions: [0, versions.step])
        gone = await client.expect_refusal(404, "/v1/completions", {**TEXT, "model": f"{run}@0"})
        assert f"GET /model has the files of {run}@0." in gone["message"]
        new = await client.text(model=f"{run}@1")
        assert new["policy_version"] == [run, 1]
        assert new["system_fingerprint"] != old["system_fingerprint"]


# 2


async def test_the_shapes_of_chats_and_texts(tmp_path) -> None:
    async with asking(tmp_path) as (served, client):
        answer = await client.chat(n=3, logprobs=True, seed=1)
        assert answer["object"] == "chat.completion"
        assert (answer["id"].partition("-")[0], answer["group_id"]) == ("chatcmpl", None)
        assert answer["system_fingerprint"] == (await served.ask()).fingerprint
        assert [each["index"] for each in answer["choices"]] == [0, 1, 2]
        assert len({*shown(answer)}) > 1
        tokens = 0
        for choice in answer["choices"]:
            ids = choice["token_ids"]
            tokens += len(ids)
            text = "".join(ALPHABET[token] for token in ids if token != END_ID)
            assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
            assert (choice["finish_reason"] == "stop") == (ids[-1] == END_ID)
            content = choice["logprobs"]["content"]
            assert [each["token"] for each in content] == [ALPHABET[token] for token in ids]
            assert all(each["logprob"] < 0 and each["bytes"] for each in content)
        usage = {"prompt_tokens": 3, "completion_tokens": tokens, "total_tokens": 3 + tokens}
        assert answer["usage"] == usage
        answer = await client.text(prompt=["abc", "ab"], n=2, logprobs=0, seed=4, max_tokens=5)
        assert (answer["object"], answer["id"].partition("-")[0]) == ("text_completion", "cmpl")
        assert (answer["usage"]["prompt_tokens"], len(answer["choices"])) == (5, 4)
        for choice in answer["choices"]:
            logprobs, count = choice["logprobs"], len(choice["token_ids"])
            assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == count <= 5
            assert logprobs["text_offset"] == [*range(count)]
        (alone,) = shown(await client.text(prompt="abc", seed=4, max_tokens=5))
        assert alone == shown(answer)[0]
        assert len({*[tuple(shown(await client.text(n=4))) for _ in range(3)]}) == 3
        greedy = [shown(await client.text(temperature=0)) for _ in range(2)]
        assert greedy[0] == greedy[1]


# 3


@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_becomes_the_whole_answer(tmp_path, path) -> None:
    async with asking(tmp_path, pace=0.02, settings={"max_completion_length": 12}) as (_, client):
        body = {**PATHS[path], "n": 2, "seed": 3, "temperature": 1.2}
        usage = {"stream_options": {"include_usage": True}}
        pieces, other, whole = await asyncio.gather(
            client.stream_chunks(path, {**body, **usage}),
            client.stream_chunks(path, {**body, "seed": 5}),
            client.ok(path, body),
        )
    assert texts_of(pieces, 2) == shown(whole)
    assert texts_of(other, 2) != shown(whole)
    assert sum(bool(any(texts_of([piece], 2))) for piece in pieces) > 3  # not all at once
    *ended, usage = [piece for piece in pieces if "policy_version" in piece]
    assert usage["choices"] == []
    assert usage["usage"] == whole["usage"]
    for piece, choice in zip(ended, whole["choices"], strict=True):
        (last,) = piece["choices"]
        for key in ("index", "finish_reason", "token_ids", "logprobs"):
            assert last[key] == choice[key]
    assert len({piece["id"] for piece in pieces}) == 1


async def test_streams_beyond_a_number_are_polled_less_often(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(service, "POLLED_AT_ONCE", 0.001)  # as if this stream were a thousand
    async with asking(tmp_path, pace=0.02, settings={"max_completion_length": 12}) as (served, client):  # fmt: skip
        pieces = await client.stream_chunks("/v1/completions", {**TEXT, "seed": 3})
        assert served.engine.calls["partial"] <= 1
        assert texts_of(pieces) == shown(await client.text(seed=3))


@pytest.mark.parametrize("path", PATHS)
async def test_stops_are_never_seen(tmp_path, path) -> None:
    async with asking(tmp_path, pace=0.002, settings={"max_completion_length": 12}) as (_, client):
        texts = shown(await client.ok(path, {**PATHS[path], "n": 8, "seed": 3}))
        stop = next(text[2:4] for text in texts if len(text) > 6)
        for stops in (stop, [stop, "zzz"]):
            body = {**PATHS[path], "n": 8, "seed": 3, "stop": stops}
            whole = shown(await client.ok(path, body))
            assert whole == [text.partition(stop)[0] for text in texts]
            assert texts_of(await client.stream_chunks(path, body), 8) == whole


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": "é"}}\n</tool_call>'
ADD = ("add", {"a": "é"})
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"default": None}}}


@pytest.mark.parametrize(("text", "more", "content", "calls"), [
    (f"I add.\n{CALL}\n{CALL}", {}, "I add.", [ADD, ADD]), (f"\n{CALL}{CALL}", {"parallel_tool_calls": False}, None, [ADD]),
    (f"<tool_call>no JSON</tool_call>{CALL}", {"tool_choice": "auto"}, "<tool_call>no JSON</tool_call>", [ADD]),
    (f" a < b {CALL[:30]} ", {}, ..., []), (f"I add. {CALL}", {"tool_choice": "none"}, ..., []), (CALL, {"tools": None}, ..., []),
    (CALL.replace("é", r"\ud83d"), {}, ..., []),  # a call that no request could repeat
])  # fmt: skip
async def test_calls_of_tools_are_read_from_the_text(
    tmp_path, monkeypatch, text, more, content, calls
) -> None:
    def decode(self: FakeTokenizer, ids: list[int], **_: object) -> str:
        return text if ids[-1] == END_ID or len(ids) == 60 else text[: 4 * len(ids)]

    monkeypatch.setattr(FakeTokenizer, "decode", decode)
    parsed = {"name": "add", "arguments": '{"a": "b"}', "parsed_arguments": {"a": "b"}}
    wrote = {
        "index": 0,
        "id": "1",
        "type": "function",
        "function": parsed,
    }  # as OpenAI's client adds
    messages = [*CHAT["messages"], {"role": "assistant", "content": None, "tool_calls": [wrote]}]
    messages.append({"role": "tool", "tool_call_id": "1", "content": "c"})
    body = {**CHAT, "messages": messages, "store": True, "tools": [TOOL], **more}
    async with asking(tmp_path, pace=0.001, settings={"max_completion_length": 60}) as (served, c):
        whole = await c.chat(**{**body, "n": 2, "logprobs": True})
        pieces = await c.stream_chunks("/v1/chat/completions", {**body, "n": 2})
        kept: Any = await record(served, whole["group_id"])
    offered = [] if body["tools"] is None or more.get("tool_choice") == "none" else [TOOL]
    assert kept.example.columns.get("tools", []) == offered
    function = {"name": "add", "arguments": {"a": "b"}}
    assert kept.example.prompt[1]["tool_calls"] == [
        {"id": "1", "type": "function", "function": function}
    ]
    for place, (choice, rollout) in enumerate(zip(whole["choices"], kept.rollouts, strict=True)):
        assert choice["token_ids"] == list(rollout.completion_ids)
        assert len(choice["logprobs"]["content"]) == len(rollout.completion_ids)
        message = choice["message"]
        pieced = [each for piece in pieces for each in piece["choices"] if each["index"] == place]
        assert message["content"] == (text if content is ... else content)
        assert texts_of(pieces, 2)[place] == (message["content"] or "")
        sent = [call for each in pieced for call in each["delta"].get("tool_calls", [])]
        assert [each["index"] for each in sent] == list(range(len(calls)))
        for several in (message.get("tool_calls", []), sent):
            functions = [each["function"] for each in several]
            assert [(each["name"], json.loads(each["arguments"])) for each in functions] == calls
            assert len({each["id"] for each in several}) == len(calls)
        for end in (choice["finish_reason"], pieced[-1]["finish_reason"]):
            assert (end == "tool_calls") is bool(calls)


# 4

NEVER = {
    "frequency_penalty": 2.5, "presence_penalty": -3, "logit_bias": {"a": 1}, "repetition_penalty": 0, "stop_token_ids": [-1],
    "min_tokens": -1, "temperature": 101, "n": 129, "no_such_field": 1,
    "stream_options": {"include_usage": True}, "max_tokens": 1000, "stop": ["a"] * 17,
}  # fmt: skip
NEVER_CHAT = {
    "tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"pattern": "a"}}}],
    "functions": [{}], "tool_choice": "required",
    "response_format": {"type": "json_schema"}, "top_logprobs": 3, "reasoning_effort": "low", "modalities": ["audio"],
    "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
}  # fmt: skip
NEVER_TEXT = {"logprobs": 21, "suffix": "x", "best_of": 2, "prompt": [[1, 200]]}
CASES = [
    *(("/v1/chat/completions", key, value) for key, value in {**NEVER, **NEVER_CHAT}.items()),
    *(("/v1/completions", key, value) for key, value in {**NEVER, **NEVER_TEXT}.items()),
]


IMAGE: dict[str, Any] = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}
OTHER_TYPES = [
    ("messages", [{"role": "user", "content": [IMAGE]}], "reads no images"),
    ("tools", [{"type": "custom", "custom": {"name": "f"}}], "runs no tools by itself"),
    (
        "messages",
        [{"role": "assistant", "tool_calls": [{"type": "custom"}]}],
        "is not a call of a function",
    ),
]


@pytest.mark.parametrize(("field", "value", "words"), OTHER_TYPES)
async def test_an_object_of_another_type_is_refused_by_one_message(
    tmp_path, field: str, value: Any, words: str
) -> None:
    async with asking(tmp_path) as (_, client):
        error = await client.expect_refusal(400, "/v1/chat/completions", {**CHAT, field: value})
    assert error["param"].split(".")[0] == field
    assert words in error["message"]
    assert "more" not in error["message"]


async def test_a_prompt_that_is_too_long_is_what_other_clients_know_as_such(tmp_path) -> None:
    async with asking(tmp_path) as (_, client):
        for prompt in ("a" * 600, [5] * 600):
            error = await client.expect_refusal(400, "/v1/completions", {**TEXT, "prompt": prompt})
            assert error["code"] == "context_length_exceeded"
            assert error["param"] == "prompt"
            assert "prompt is too long" in error["message"]  # langchain and litellm look for it
            assert "at most 512" in error["message"]


LIMITS = [
    ("/v1/completions", "max_tokens", 1000),
    ("/v1/chat/completions", "max_tokens", 1000),
    ("/v1/chat/completions", "max_completion_tokens", 1000),
    ("/v1/chat/completions", "messages", [{"role": "user", "content": "a" * 600}]),
    ("/v1/completions", "prompt", "a" * 600),
]
"""Path, the field that is beyond what the run takes, and its value."""


async def test_unsupported_fields_of_completions_are_refused_by_name(tmp_path) -> None:
    async with asking(tmp_path) as (_, client):
        for path, key, value in CASES:
            error = await client.expect_refusal(400, path, {**PATHS[path], key: value})
            assert error["type"] == "invalid_request_error"
            assert error["param"].split(".")[0] == key, error
            assert key == "max_tokens" or key in error["message"]
            assert key != "reasoning_effort" or "chat_template_kwargs" in error["message"]
        for path, field, value in LIMITS:
            error = await client.expect_refusal(400, path, {**PATHS[path], field: value})
            assert error["param"] == field, error
        error = await client.expect_refusal(400, "/v1/completions", {**TEXT, "n": 0, "top_p": 2})
        assert {each["field"] for each in error["errors"]} == {"n", "top_p"}
        assert "1 more under `errors`" in error["message"]
        for wrong in ({"max_tokens": 1000}, {"model": "no"}, {"temperature": -1}):
            body = {**TEXT, "stream": True, **wrong}
            await client.expect_refusal(404 if "model" in wrong else 400, "/v1/completions", body)


HARMLESS = {
    "user": "me", "service_tier": "auto", "metadata": {"a": "b"}, "store": False, "frequency_penalty": 0, "presence_penalty": 0,
    "logit_bias": {}, "top_p": 1, "top_k": -1, "min_p": 0, "stream": False, "prompt_cache_key": "k", "safety_identifier": "s",
}  # fmt: skip
HARMLESS_CHAT = {
    "tools": [], "tool_choice": "none", "parallel_tool_calls": True, "response_format": {"type": "text"}, "modalities": ["text"],
    "top_logprobs": 0, "verbosity": "low", "prompt_cache_options": {"mode": "implicit"},
}  # fmt: skip
HARMLESS_CHAT["messages"] = [{"role": "user", "content": "abc", "refusal": None, "annotations": [], "audio": None,
    "function_call": None, "reasoning_content": None, "name": "me", "parsed": {"a": 1}}]  # fmt: skip
HARMLESS_TEXT = {"echo": False, "suffix": "", "best_of": 1}


async def test_a_strict_tool_is_called_with_what_fits(tmp_path, monkeypatch) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    function = {"name": "add", "strict": True, "parameters": schema}
    body = {"tools": [{"type": "function", "function": function}], "n": 1}
    async with asking(tmp_path) as (_, client):
        for fits, arguments in ((True, {"a": 1}), (False, {"a": "1"})):
            call = {"name": "add", "arguments": arguments}
            text = f"<tool_call>{json.dumps(call)}</tool_call>"
            monkeypatch.setattr(FakeTokenizer, "decode", lambda *_, text=text, **__: text)
            (choice,) = (await client.chat(**body))["choices"]
            assert (choice["finish_reason"] == "tool_calls") is fits
            assert choice["message"]["content"] == (None if fits else text)


@pytest.mark.parametrize(("template", "setting", "text"), [
    ("<|python_tag|>", "auto", '{"name": "add", "parameters": {"a": 1}}'),
    ("[TOOL_CALLS]", "auto", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]'),
    ("[TOOL_CALLS]", "hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'),
])  # fmt: skip
async def test_the_template_or_the_setting_says_how_calls_are_written(
    tmp_path, monkeypatch, template, setting, text
) -> None:
    monkeypatch.setattr(FakeTokenizer, "chat_template", template)
    monkeypatch.setattr(FakeTokenizer, "decode", lambda *_, **__: text)
    async with asking(tmp_path, tool_call_parser=setting) as (_, client):
        (choice,) = (await client.chat(tools=[TOOL]))["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert (call["function"]["name"], choice["finish_reason"]) == ("add", "tool_calls")
        pieces = await client.stream_chunks("/v1/chat/completions", {**CHAT, "tools": [TOOL]})
        assert texts_of(pieces) == [""]


async def test_the_effort_of_reasoning_is_the_templates_matter(tmp_path, monkeypatch) -> None:
    body = {**CHAT, "reasoning_effort": "low"}
    async with asking(tmp_path) as (_, client):
        error = await client.expect_refusal(400, "/v1/chat/completions", body)
        assert (error["param"], error["code"]) == ("reasoning_effort", "invalid_request")
    monkeypatch.setattr(FakeTokenizer, "chat_template", "{{ reasoning_effort }}")
    async with asking(tmp_path / "other") as (served, client):
        answer = await client.chat(reasoning_effort="low", store=True, n=2)
        kept: Any = await record(served, answer["group_id"])
        assert kept.example.columns == {"chat_template_kwargs": {"reasoning_effort": "low"}}
        both = {**body, "chat_template_kwargs": {"reasoning_effort": "high"}}
        await client.expect_refusal(400, "/v1/chat/completions", both)


async def test_fields_without_effect_are_accepted(tmp_path) -> None:
    async with asking(tmp_path) as (_, client):
        harmless = {"/v1/chat/completions": HARMLESS_CHAT, "/v1/completions": HARMLESS_TEXT}
        for path, body in PATHS.items():
            plain = await client.ok(path, {**body, "seed": 1})
            answer = await client.ok(path, {**body, **HARMLESS, **harmless[path], "seed": 1})
            assert shown(answer) == shown(plain)
        restricted = {"top_p": 0.5, "top_k": 3, "min_p": 0.1}
        assert await client.text(**restricted)


# 5


async def test_every_refusal_has_the_form(tmp_path) -> None:
    ring, keys = keyring()
    async with (
        open_service(tmp_path, max_body_bytes=2000) as served,
        client_of(served.app(ring)) as http,
    ):

        async def expect_refusal(status: int, code: str, body: Any = TEXT, **options: Any) -> None:
            headers = {"Authorization": f"Bearer {keys[options.pop('role', Role.TRAIN)]}"}
            headers |= {"Content-Type": "application/json"} | options.pop("headers", {})
            method, path = options.pop("method", "POST"), options.pop("path", "/v1/completions")
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            answer = await http.request(method, path, headers=headers, content=content)
            assert answer.status_code == status, answer.text
            assert answer.headers["content-type"] == "application/json"
            error = answer.json()["error"]
            kinds = {401: "authentication_error", 403: "permission_error"}
            expected = (kinds.get(status, "invalid_request_error"), code)
            assert (error["type"], error["code"]) == expected
            assert answer.headers["x-should-retry"] == ("true" if KINDS[code].retry else "false")
            assert answer.headers["x-request-id"]

        await expect_refusal(401, "unauthorised", headers={"Authorization": "Bearer x"})
        await expect_refusal(403, "forbidden", role=Role.READ)
        await expect_refusal(404, "not_found", path="/v1/embeddings")
        await expect_refusal(405, "method_not_allowed", method="GET")
        await expect_refusal(413, "too_large", {**TEXT, "prompt": "a" * 3000})
        await expect_refusal(415, "unsupported_media_type", headers={"Content-Type": "text/plain"})
        await expect_refusal(400, "invalid_request", b"{")
        await expect_refusal(400, "invalid_request", {"model": "latest"})
        await expect_refusal(409, "not_started")
        await served.start()
        await expect_refusal(404, "unknown_model", {**TEXT, "model": "gpt-4o"})
        await served.service.stop()
        await expect_refusal(409, "finished")
        for path in ("/chat/completions", "/responses", "/completions", "/models/latest"):
            answer = await http.post(path, json=CHAT, headers={"api-key": keys[Role.TRAIN]})
            assert f"/v1{path}" in answer.json()["error"]["message"], path
        answer = await http.post("/completions", json={}, headers={"api-key": keys[Role.TRAIN]})
        assert answer.json()["code"] == "invalid_request"  # in the form of its own routes
        other = await http.get("/nothing", headers={"api-key": keys[Role.READ]})
        assert other.headers["content-type"] == "application/problem+json"


async def test_a_body_may_be_compressed(tmp_path) -> None:
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    async with asking(tmp_path, max_body_bytes=2000) as (_, client):
        whole = await client.text(seed=1)
        for text, status, code in (("abc", 200, None), ("a" * 3000, 413, "too_large")):
            body = gzip.compress(json.dumps({**TEXT, "prompt": text, "seed": 1}).encode())
            answer = await client.http.post("/v1/completions", content=body, headers=headers)
            assert answer.status_code == status, answer.text
            if code is None:
                assert shown(answer.json()) == shown(whole)
            else:
                assert answer.json()["error"]["code"] == code
        answer = await client.http.post("/v1/completions", content=b"{}", headers=headers)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (415, "Content-Encoding")


async def test_only_so_much_is_sampled_at_once(tmp_path) -> None:
    async with asking(tmp_path) as (served, client):
        gate = served.engine.hold("sample")
        waiting = [asyncio.create_task(client.text(n=128)) for _ in range(MAX_SAMPLING // 128)]
        await wait_until_async(lambda: served.engine.calls["sample"] == len(waiting))
        error = await client.expect_refusal(429, "/v1/completions", TEXT)
        assert (error["code"], error["type"]) == ("rate_limited", "rate_limit_error")
        gate.set()
        await asyncio.gather(*waiting)
        await client.text()


class SlowToOpen(Open):
    """A server whose engine does not open the run before the event of `hold("open")` is set."""

    async def _engine(self) -> FakeEngine:
        engine = await super()._engine()
        engine.hold("open")
        return engine


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_after_a_restart_of_the_server_a_call_waits_for_the_engine(tmp_path, path) -> None:
    body = CHAT if "chat" in path else {"model": "latest", "input": "abc"}
    async with asking(tmp_path):
        pass
    async with (
        open_service(tmp_path, SlowToOpen, completions_wait=0.05) as served,
        client_of(served.app()) as http,
    ):
        error = await Client(http).expect_refusal(503, path, body)
        assert error["code"] == "engine_recovering"
        served.engine.hold("open").set()
        await served.until(lambda status: status.phase == "running")
    async with (
        open_service(tmp_path, SlowToOpen, completions_wait=20.0) as served,
        client_of(served.app()) as http,
    ):
        call = asyncio.create_task(http.post(path, json=body))
        await wait_until_async(lambda: served.engines)
        await asyncio.sleep(0.05)
        assert not call.done()
        served.engine.hold("open").set()
        assert (await call).status_code == 200


async def test_an_engine_that_is_lost_breaks_a_stream_off_with_an_error(tmp_path) -> None:
    async with asking(tmp_path, pace=0.02) as (served, client):
        gate = served.engine.hold("sample", "done")
        task = asyncio.create_task(
            client.http.post("/v1/completions", json={**TEXT, "stream": True})
        )
        await wait_until_async(lambda: served.engine.calls["partial"] > 5)
        await served.engine.close()
        answer = await task
        assert answer.status_code in (200, 503)
        assert "engine_recovering" in answer.text
        assert "[DONE]" not in answer.text
        gate.set()


@pytest.mark.parametrize(
    ("error", "code"),
    [(DiskFull("no room"), "disk_full"), (LedgerClosed("it ends"), "shutting_down"), (KeyError("a detail"), "internal")],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
async def test_a_stream_that_fails_midway_ends_with_an_error(
    tmp_path, monkeypatch: pytest.MonkeyPatch, path: str, error: Exception, code: str
) -> None:
    def fail(*_: Any) -> None:
        raise error

    for keep in ("keep_group", "keep_answer"):
        monkeypatch.setattr(storing, keep, fail)
    body = PATHS.get(path, {"model": "latest", "input": TEXT["prompt"]})
    async with asking(tmp_path, pace=0.02) as (_, client):
        answer = await client.http.post(path, json={**body, "stream": True, "store": True})
        assert (answer.status_code, "[DONE]" in answer.text) == (200, False)
        event = json.loads(answer.text.strip().rpartition("data: ")[2])
        shown_code = event["code"] if path == "/v1/responses" else event["error"]["code"]
        assert shown_code == code
        assert "a detail" not in answer.text


# 6


async def test_a_client_that_goes_away_ends_the_sampling(tmp_path) -> None:
    body = {**TEXT, "stream": True, "n": 4}
    never = 600.0  # seconds between two tokens
    async with (
        asking(tmp_path, pace=never) as (served, _),
        listening(served.app()) as port,
        httpx2.AsyncClient(base_url=f"{HERE}:{port}") as http,
    ):
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line and '"text": ""' not in line:
                    break
            assert (await served.engine.probe()).sampling == 1
        async with asyncio.timeout(20):
            while (await served.engine.probe()).sampling:  # noqa: ASYNC110 — it has no event
                await asyncio.sleep(0.005)


async def test_the_same_key_is_answered_once(tmp_path) -> None:
    async with asking(tmp_path, settings={"max_completion_length": 20}) as (_, client):
        for choices, body in ((1, TEXT), (2, {**TEXT, "store": True, "n": 2})):
            key, path = {"Idempotency-Key": str(len(body))}, "/v1/completions"
            first = await client.ok(path, body, headers=key)
            assert await client.ok(path, body, headers=key) == first
            error = await client.expect_refusal(400, path, {**body, "prompt": "b"}, headers=key)
            assert error["code"] == "idempotency_key_reused"
            chunks, repeated = [
                await client.stream_chunks(
                    path, body, headers={"Idempotency-Key": f"stream-{len(body)}"}
                )
                for _ in range(2)
            ]
            assert repeated[-1] == chunks[-1]
            assert texts_of(repeated, choices) == texts_of(chunks, choices)


SHARES = 5
OTHERS = [pytest.param(n, marks=pytest.mark.soak(suite="attacks")) for n in range(1, SHARES)]


@pytest.mark.parametrize("first", [0, *OTHERS])
async def test_spoilt_fields_are_the_clients_mistakes(tmp_path, first) -> None:
    """Every fifth of them from one on; the other fifths are soak tests."""
    models: dict[str, type[BaseModel]] = {
        "/v1/chat/completions": ChatRequest,
        "/v1/completions": TextRequest,
        "/v1/responses": ResponsesRequest,
    }
    bodies = {**PATHS, "/v1/responses": {"model": "latest", "input": "abc"}}
    async with asking(tmp_path) as (served, client):
        document = served.app().openapi()["paths"]
        for path, model in models.items():
            named = document[path]["post"]["responses"]
            spoilt = product(model.model_fields, WRONG)
            for field, wrong in islice(spoilt, first, None, SHARES):
                answer = await client.http.post(path, json={**bodies[path], field: wrong})
                shown = f"{field} {wrong!r:.100} -> {answer.status_code} {answer.text[:300]}"
                assert str(answer.status_code) in named, shown
                assert answer.status_code < 500, shown
                assert answer.status_code < 400 or answer.json()["error"]["message"], shown
            for raw in RAW.values():
                headers = {"Content-Type": "application/json"}
                answer = await client.http.post(path, content=raw, headers=headers)
                assert answer.status_code == 400, raw[:50]
                assert answer.json()["error"]["code"] == "invalid_request"


SHARES = 5
