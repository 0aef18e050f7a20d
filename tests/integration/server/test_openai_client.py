"""The real `openai` package, sync and async, against the routes behind uvicorn, over the fake engine.

The server runs in a thread, as it would in a process of its own: the sync client blocks.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from groupwise.api.schemas.keys import Keyring
from groupwise.core.errors import UsageError
from groupwise.engine.models.teacher_config import TeacherConfig
from groupwise.engine.models.tiny import tiny_model, tiny_tokenizer
from groupwise.engine.models.tokens import completion_text
from groupwise.engine.sampler.servers.teacher import EndpointTeacher
from groupwise.testing import END_ID, FakeTokenizer
from tests.unit.server.http_client import client_of, listening
from tests.unit.server.openai.opening import Client, Open, open_service, record
from tests.unit.server.openai.test_routes import shown, texts_of

KEY = "a-key-for-tests-0123456789"
CHAT: Any = [{"role": "user", "content": "abc"}]
SETTINGS = {"max_completion_length": 12, "groups_per_step": 1, "staleness": 1, "max_steps": 24}


class Server:
    """One in a thread, with a run that takes requests."""

    def __init__(self, folder: Path) -> None:
        self.url = ""
        self._http = httpx2.Client()
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        work = self._serve(folder)
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(work,))
        self._thread.start()
        assert self._ready.wait(20)

    async def _serve(self, folder: Path) -> None:
        async with open_service(folder, pace=0.005) as served:
            await served.start(**SETTINGS)
            async with listening(served.app(Keyring(plain=KEY))) as port:
                self.url = f"http://127.0.0.1:{port}"
                self._ready.set()
                await self._end.wait()

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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("served"))
    yield made
    made.close()


@pytest.fixture
def client(server) -> Iterator[openai.OpenAI]:
    with server.client() as made:
        yield made


async def test_a_served_model_teaches_another_run(server, monkeypatch):
    """It scores completions by echo; a policy with other tokens is refused."""
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    config = TeacherConfig(type="endpoint", engine="openai", url=server.url)
    teacher = EndpointTeacher(config, "latest", FakeTokenizer(), 0)
    await teacher.check()
    answer = await teacher.logprobs((1, 2), (3, 4, END_ID))
    assert len(answer.logprobs) == 3
    assert answer.logprobs == pytest.approx([answer.logprobs[0]] * 3)  # an untrained table
    with pytest.raises(UsageError, match="has other tokens than the policy"):
        await EndpointTeacher(config, "latest", tiny_tokenizer(), 0).logprobs((1,), (11, 12, 13))


def test_chats_and_texts_whole_and_streamed(client):
    newest, latest = client.models.list().data
    assert (newest.id, latest.id) == (f"{newest.owned_by}@0", "latest")
    assert client.models.retrieve(newest.id) == newest

    def ask(**more: Any) -> Any:
        return client.chat.completions.create(model="latest", messages=CHAT, n=2, **more)

    whole = ask(seed=7, logprobs=True, max_tokens=10)
    texts = [choice.message.content for choice in whole.choices]
    for choice in whole.choices:
        tokens = [each.token for each in choice.logprobs.content]
        assert "".join(tokens).removesuffix("\n") == choice.message.content
    assert whole.usage.total_tokens == 3 + sum(len(each.token_ids) for each in whole.choices)
    more = {"stream": True, "stream_options": {"include_usage": True}}
    with ask(seed=7, max_tokens=10, **more) as stream:
        streamed_texts, ends, chunks = ["", ""], 0, list(stream)
    for chunk in chunks[:-1]:
        for choice in chunk.choices:
            streamed_texts[choice.index] += choice.delta.content or ""
            ends += choice.finish_reason is not None
    assert streamed_texts == texts != [choice.message.content for choice in ask(seed=8).choices]
    assert (ends, chunks[-1].choices, chunks[-1].usage) == (2, [], whole.usage)
    request: Any = {"model": "latest", "prompt": "abc", "seed": 1}
    one = client.completions.create(**request, logprobs=0, extra_body={"top_k": 5}).choices[0]
    assert one.logprobs.token_logprobs
    pieces = client.completions.create(**request, extra_body={"top_k": 5}, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == one.text


def add(a: int) -> int:
    """The tool that an agent has."""
    return a + 1


WORDS = 'I add.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
SCHEMA: Any = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FUNCTION: Any = {"name": "add", "description": "Adds one.", "parameters": SCHEMA, "strict": True}


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has the model write a text, piece by piece."""

    def write(text: str) -> None:
        def decode(self: FakeTokenizer, ids: list[int], **_: object) -> str:
            is_whole = ids[-1] == END_ID or len(ids) == SETTINGS["max_completion_length"]
            return text if is_whole else text[: 6 * len(ids)]

        monkeypatch.setattr(FakeTokenizer, "decode", decode)

    return write


def test_an_agent_with_a_tool(client, writes):
    writes(WORDS)
    messages: list[Any] = [*CHAT]
    tools: Any = [{"type": "function", "function": FUNCTION}]
    request: Any = {"model": "latest", "messages": messages, "tools": tools}
    message = client.chat.completions.create(**request).choices[0].message
    with client.chat.completions.stream(**request) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert (streamed.message.content, streamed.finish_reason) == ("I add.", "tool_calls")
    (call,), (sent,) = message.tool_calls, streamed.message.tool_calls
    assert sent.function.arguments == call.function.arguments == '{"a": 1}'
    result = str(add(**json.loads(call.function.arguments)))
    messages.append(message)  # as the client has it, with `refusal` and `annotations`
    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    writes("two")
    answer = client.chat.completions.create(**request)
    assert answer.choices[0].message.content == "two"


def test_responses_with_a_tool(client, writes):
    writes(WORDS)
    tools: Any = [{"type": "function", **FUNCTION}]
    request: Any = {"model": "latest", "tools": tools}
    response = client.responses.create(**request, input="abc", instructions="be brief")
    assert response.output_text == "I add."
    _, call = response.output
    with client.responses.stream(**request, input="abc", instructions="be brief") as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == "I add."
    assert [item.type for item in final.output] == ["message", "function_call"]
    result = str(add(**json.loads(call.arguments)))
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": result}
    writes("two")
    next_response = client.responses.create(
        **request, input=[output], previous_response_id=response.id
    )
    assert next_response.output_text == "two"
    whole: Any = [{"role": "user", "content": "abc"}, *response.output, output]
    again = client.responses.create(**request, input=whole, store=False)
    assert again.output_text == "two"
    assert client.responses.retrieve(response.id).output == response.output
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError) as gone:
        client.responses.retrieve(response.id)
    assert gone.value.code == "unknown_response"


def test_trajectories_of_an_agent(server, client) -> None:
    def call(trajectory: str, messages: Any, on: openai.OpenAI = client, **more: Any) -> Any:
        metadata = {"trajectory": trajectory, "group": "played", "size": "2"}
        return on.chat.completions.create(
            model="latest", messages=messages, store=True, metadata=metadata, **more
        )

    ids: list[list[str]] = []
    for name in ("*", "t-2"):
        first = call(name, CHAT)
        answer = {"role": "assistant", "content": first.choices[0].message.content}
        with call(name, [*CHAT, answer, *CHAT], stream=True) as stream:
            pieces = list(stream)
        ids.append([first.id, pieces[-1].id])
    server.post("/rewards", {"completion_ids": ids[0], "reward": 1.0})
    trained = server.post("/rewards", {"trajectory": "t-2", "reward": 0.0, "wait": True})
    assert trained["status"] == "trained"

    headers = {f"X-Groupwise-{key}": value for key, value in
               (("Store", "true"), ("Trajectory", "t-3"), ("Group", "played"))}  # fmt: skip
    with server.client(default_headers=headers) as plain:  # of a framework that hides its calls
        alone = plain.chat.completions.create(model="latest", messages=CHAT)
    closed = server.post("/trajectories/close", {"group": "played"})
    assert closed["given_up"] == [alone.model_extra["group_id"]]


def test_errors_are_the_clients_own_and_a_full_room_is_tried_again(server, client):
    chat = client.chat.completions.create
    with pytest.raises(openai.NotFoundError, match="latest") as missing:
        chat(model="gpt-4o", messages=CHAT)
    assert missing.value.code == "unknown_model"
    with pytest.raises(openai.BadRequestError) as bad:
        chat(model="latest", messages=CHAT, frequency_penalty=3)
    assert (bad.value.param, bad.value.type) == ("frequency_penalty", "invalid_request_error")
    tools: Any = [{"type": "function", "function": FUNCTION}]
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        with pytest.raises(openai.BadRequestError) as bad:
            chat(model="latest", messages=CHAT, tools=tools, tool_choice=choice, store=True)
        assert bad.value.param == "tool_choice"
    with server.client(api_key="wrong") as stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()

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
    server.post("/stop", {})
    with pytest.raises(openai.ConflictError) as over:
        chat(model="latest", messages=CHAT)
    assert over.value.response.headers["x-should-retry"] == "false"


class OpenReal(Open):
    """With the engine that has a model."""

    async def _engine(self) -> Any:
        from groupwise.server.engine.core import EngineCore

        return EngineCore()


async def test_prefills_and_what_templates_receive_reach_the_model(tmp_path):
    """The server refuses `prompt_tokens` that are not what it makes of the prompt."""
    tokenizer = tiny_tokenizer()
    more = "{{ 'T' if add_generation_prompt and not thinking }}{{ tools[0].name if tools }}"
    tokenizer.chat_template = f"{tokenizer.chat_template}{more}"
    for part in (tokenizer, tiny_model(vocab_size=len(tokenizer))):
        part.save_pretrained(tmp_path / "model")
    async with open_service(tmp_path, OpenReal, model_dir=str(tmp_path)) as served:
        await served.start(model_id="model", groups_per_step=8)
        async with client_of(served.app()) as http:
            client = Client(http)
            begun = [*CHAT, {"role": "model", "content": "de"}]
            columns: Any = {"chat_template_kwargs": {"thinking": True}, "tools": [{"name": "f"}]}
            for messages, more, end in (
                (begun, {}, "Tde"),
                (CHAT, columns, "f"),
                (begun, columns, "fde"),
            ):
                ids = tokenizer(f"<|user|>abc<|assistant|>{end}")["input_ids"]
                body = {"prompt": messages, "prompt_tokens": ids, **more}
                assert await client.ok("/completions", body)
                await client.expect_refusal(422, "/completions", {**body, "prompt_tokens": ids[1:]})
                body = {"model": "latest", "messages": messages, **more}
                body.pop("tools", None)
                answer = await client.ok("/v1/chat/completions", body)
                assert answer["usage"]["prompt_tokens"] == len(ids) - ("tools" in more)


async def test_a_real_model_streams_what_it_answers(tmp_path, monkeypatch):
    monkeypatch.setattr("groupwise.server.openai.service.POLL", 1e-3)  # it writes a token in less
    async with open_service(tmp_path, OpenReal) as served:
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
                pieces = await client.stream_chunks(path, {**body, **more})
                assert (texts_of(pieces, 4), len(pieces) > 12) == (expected, True)
            assert expected == [text.partition(stop)[0] for text in texts]
            for choice in whole["choices"]:
                assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])


ANIMAL: Any = {
    "type": "object",
    "properties": {"kind": {"enum": ["ox", "hen"]}, "wild": {"type": "boolean"}},
    "required": ["kind", "wild"],
    "additionalProperties": False,
}


async def test_token_logprobs_for_the_client_come_from_the_model(tmp_path):
    """Through the whole way: the client's own methods, HTTP, the engine, the sampler."""
    tokenizer = tiny_tokenizer()
    letter = tokenizer("e")["input_ids"][0]
    async with open_service(tmp_path, OpenReal) as served:
        await served.start(max_completion_length=96)
        async with listening(served.app(Keyring(plain=KEY))) as port:
            url = f"http://127.0.0.1:{port}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
                await _ask_about_tokens(client, tokenizer, letter)


async def _ask_about_tokens(client: openai.AsyncOpenAI, tokenizer: Any, letter: int) -> None:
    async def chat(**more: Any) -> Any:
        request: Any = {"model": "latest", "messages": CHAT, "seed": 1, "max_tokens": 8, **more}
        return (await client.chat.completions.create(**request)).choices[0]

    async def text(**more: Any) -> Any:
        request: Any = {"model": "latest", "prompt": "abc", "seed": 1, "max_tokens": 8, **more}
        return (await client.completions.create(**request)).choices[0]

    choice = await chat(logprobs=True, top_logprobs=3)
    for each in choice.logprobs.content:
        assert len(each.top_logprobs) == 3
        named = {best.token: best.logprob for best in each.top_logprobs}
        assert named.get(each.token, each.logprob) == each.logprob
    biased = await chat(logit_bias={str(letter): 100.0})
    assert biased.token_ids == [letter] * 8
    assert (await chat(presence_penalty=2.0, frequency_penalty=2.0)).token_ids != choice.token_ids
    ended = await chat(logit_bias={str(letter): 100.0}, extra_body={"stop_token_ids": [letter]})
    assert (ended.token_ids, ended.finish_reason) == ([letter], "stop")

    ids = tokenizer("abc")["input_ids"]
    more: Any = {"extra_body": {"return_token_ids": True}, "logprobs": 2}
    plain, tokens = await text(**more), await text(prompt=ids, **more)
    assert (tokens.text, tokens.prompt_token_ids) == (plain.text, ids)
    scored = await text(prompt=[*ids, *plain.token_ids], max_tokens=0, echo=True, logprobs=1)
    assert scored.logprobs.token_logprobs[0] is None
    logprobs = scored.logprobs.token_logprobs[len(ids) :]
    assert logprobs == pytest.approx(plain.logprobs.token_logprobs, abs=1e-4)

    form: Any = {"type": "json_schema", "json_schema": {"name": "animal", "schema": ANIMAL}}
    answer = await chat(response_format=form, max_tokens=96, temperature=0.7)
    assert answer.finish_reason == "stop"
    value = json.loads(answer.message.content)
    assert (value["kind"] in ("ox", "hen"), type(value["wild"])) == (True, bool)
    with pytest.raises(openai.BadRequestError, match="response_format") as refused:
        await chat(response_format=form, store=True)
    assert refused.value.param == "response_format"


async def test_a_model_that_knows_no_tools_calls_them_where_it_must(tmp_path, monkeypatch):
    """Chats and responses, whole and streamed, with a model that has never seen a call."""
    monkeypatch.setattr("groupwise.server.openai.service.POLL", 1e-3)
    names = [{**FUNCTION, "name": name, "parameters": ANIMAL} for name in ("add", "sub")]
    tools: Any = [{"type": "function", "function": function} for function in names]
    flat: Any = [{"type": "function", **function} for function in names]
    one: Any = {"type": "function", "function": {"name": "sub"}}
    form: Any = {"type": "json_schema", "json_schema": {"name": "animal", "schema": ANIMAL}}
    async with open_service(tmp_path, OpenReal) as served:
        await served.start(max_completion_length=400, max_prompt_length=1024)
        async with listening(served.app(Keyring(plain=KEY))) as port:
            url = f"http://127.0.0.1:{port}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
                create: Any = client.chat.completions.create
                body: Any = {"model": "latest", "messages": CHAT, "seed": 1, "tools": tools}
                for more, called in (
                    ({"tool_choice": "required", "parallel_tool_calls": False}, {"add", "sub"}),
                    ({"tool_choice": one}, {"sub"}),
                ):
                    answer = (await create(**body, **more)).choices[0]
                    assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
                    (call,) = answer.message.tool_calls
                    assert call.function.name in called
                    assert json.loads(call.function.arguments)["kind"] in ("ox", "hen")
                    pieces = [piece async for piece in await create(**body, **more, stream=True)]
                    deltas = [each.delta for piece in pieces for each in piece.choices]
                    (sent,) = [begun for delta in deltas for begun in delta.tool_calls or ()]
                    assert sent.function.arguments == call.function.arguments
                    assert not any(delta.content for delta in deltas)
                cut = (await create(**body, tool_choice="required", max_tokens=20)).choices[0]
                assert (cut.finish_reason, cut.message.tool_calls) == ("length", None)
                mixed = (await create(**body, response_format=form, n=8)).choices
                for each in mixed:
                    texts = [call.function.arguments for call in each.message.tool_calls or ()]
                    assert texts or json.loads(each.message.content)["kind"] in ("ox", "hen")
                respond: Any = client.responses.create
                request: Any = {"model": "latest", "input": "abc", "extra_body": {"seed": 1}}
                own = {"type": "function", "name": "sub"}
                response = await respond(**request, tools=flat, tool_choice=own)
                (item,) = response.output
                assert (item.type, item.name, response.status) == (
                    "function_call",
                    "sub",
                    "completed",
                )
                text: Any = {"format": {"type": "json_schema", "name": "a", "schema": ANIMAL}}
                whole = await respond(**request, text=text)
                assert json.loads(whole.output_text)["kind"] in ("ox", "hen")
                events = [event async for event in await respond(**request, text=text, stream=True)]
                parts = [each.delta for each in events if each.type == "response.output_text.delta"]
                assert "".join(parts) == whole.output_text


async def test_templates_without_tools_are_told_of_them(tmp_path):
    """In the system message; calls stand in the text as they were read, and results are messages of the user."""
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    messages = [*CHAT, called, {"role": "tool", "tool_call_id": "1", "content": "2 <eos>"}]
    tools = [{"type": "function", "function": FUNCTION}]
    reply = '<tool_call>|{"name": "add", "arguments": {"a": 1}}|</tool_call><eos>'
    heard = "<|user|><tool_response>|2 <eos>|</tool_response><|assistant|>"
    async with open_service(tmp_path, OpenReal) as served:
        await served.start(max_prompt_length=1024)
        async with client_of(served.app()) as http:
            client = Client(http)
            body = {"model": "latest", "messages": messages, "tools": tools, "store": True, "n": 2}
            answer = await client.ok("/v1/chat/completions", body)
            kept: Any = await record(served, answer["group_id"])
            shown = kept.prompt_seen.replace("\n", "|")
            system, rest = shown.split("<|user|>", 1)
            assert system.startswith("<|system|>You may call these functions:|<tools>|")
            assert json.dumps(FUNCTION)[1:-1] in system
            assert rest == f"abc<|assistant|>{reply}{heard}"
            assert kept.rollouts[0].prompt_ids.count(1) == 1  # the tool ends no turn
            plain = await client.ok("/v1/chat/completions", {**body, "tool_choice": "none"})
            assert plain["usage"]["prompt_tokens"] < answer["usage"]["prompt_tokens"]


async def test_marks_of_calls_that_are_special_tokens_are_seen(tmp_path, monkeypatch):
    """A model of Mistral's family: what it draws begins with its mark, which texts leave out otherwise."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]"]})
    tokenizer.chat_template = f"{tokenizer.chat_template}{{# tools [TOOL_CALLS] #}}"
    for part in (tokenizer, tiny_model(vocab_size=len(tokenizer))):
        part.save_pretrained(tmp_path / "model")
    words = 'I add.[TOOL_CALLS]add{"a": 1}'
    drawn = tuple(tokenizer(words)["input_ids"])

    def whole(made: Any, token_ids: Any, *keep: Any) -> str:
        return completion_text(made, drawn, *keep)

    monkeypatch.setattr("groupwise.server.engine.core.completion_text", whole)
    tools = [{"type": "function", "function": FUNCTION}]
    async with open_service(tmp_path, OpenReal, model_dir=str(tmp_path)) as served:
        await served.start(model_id="model")
        async with client_of(served.app()) as http:
            client = Client(http)
            body = {"model": "latest", "messages": CHAT, "tools": tools, "max_tokens": 4}
            (choice,) = (await client.ok("/v1/chat/completions", body))["choices"]
            (call,) = choice["message"]["tool_calls"]
            assert (choice["message"]["content"], call["function"]["name"]) == ("I add.", "add")
            pieces = await client.stream_chunks("/v1/chat/completions", body)
            assert texts_of(pieces) == ["I add."]
