"""Random requests made from the OpenAPI document, against the real service: nothing that the document does not name, no 5xx, no harm.

The fake engine stands for the model; everything else is real: routes, ledger, steps. Bodies are the document's examples, mostly with
something spoilt, so that they come far. Whatever was sent, the server answers, its run goes on, and what it knows fits together.

The routes of the Tinker API are asked likewise, over its own fake engine: with ids of what there is, numbers that come in order or do
not, and protobuf messages whole, cut and of chance. Afterwards a new client trains a model as if nothing had been.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx2
import hypothesis
import pytest
from hypothesis import strategies as st
from pydantic import TypeAdapter

from groupwise.server.engine.saved_adapters import SavedFolders
from groupwise.server.serve import make_app
from groupwise.server.tinker import document, responses
from groupwise.server.tinker.futures import JSON
from groupwise.server.tinker.refusals import CODES
from tests.tinker_app import KEY, app
from tests.unit.server.http_client import client_of
from tests.unit.server.serving import SETTINGS, Served, served
from tests.unit.server.test_schema_walk import (
    OPERATIONS,
    WITH_BODY,
    WRONG,
    ask,
    fields_of,
    schema_of,
)
from tests.unit.server.tinker.test_engine_manager import Loop
from tests.unit.server.tinker.tinker_service import Disk, Server, created, gradient, serving

ROUTES = [name for name in OPERATIONS if name not in ("GET /events", "GET /metrics")]
SOONER = 0.02
"""Seconds for every wait, so that the test does not take its own time."""
VERBS: Mapping[str, Any] = document.document()
GOOD_ONES = (1, 2, 3, 0.25, "abc", "tiny", "next", "hold", "latest", ["abc", "b"], [1.0, 0.0])
"""What some fields may be."""
FIELDS = {name: [*fields_of(schema_of(name)["schema"])] for name in WITH_BODY}


@st.composite
def changed(draw: st.DrawFn, good: Mapping[str, Any], fields: Sequence[str]) -> Any:
    """A body with some fields in the place of others; seldom something else altogether."""
    if not fields or draw(st.integers(0, 9)) == 0:
        return draw(st.sampled_from(WRONG))
    body = {**good}
    for field in draw(st.lists(st.sampled_from(fields), max_size=3)):
        body[field] = draw(st.sampled_from(GOOD_ONES) | st.sampled_from(WRONG))
    return body


@st.composite
def asks(draw: st.DrawFn) -> tuple[str, Any, int]:
    """A route, a body, and which of the groups that there are is meant where a group is."""
    name = draw(st.sampled_from(ROUTES))
    body = None
    if name in FIELDS:
        body = draw(changed(schema_of(name)["example"], FIELDS[name]))
    return name, body, draw(st.integers(0, 5))


async def course(folder: Path, requests: list[tuple[str, Any, int]]) -> None:
    async with served(folder) as server:
        await server.start(steps="auto", lease_seconds=60.0)
        groups = [(await server.ask()).group_id for _ in range(2)]
        async with client_of(make_app(server.service, server.config, None)) as client:
            for name, body, number in requests:
                group = groups[number % len(groups)]
                options = _meant(name, body, group)
                await asyncio.wait_for(ask(client, name, **options), 10)
        await check(server)


def _meant(name: str, body: Any, group: str) -> dict[str, Any]:
    options: dict[str, Any] = {"path": OPERATIONS[name][1].replace("{group_id}", group)}
    if body is None:
        return options
    if isinstance(body, dict):
        waits = body.get("wait", name == "POST /step") is True
        body = {**body, **({"timeout": SOONER} if "timeout" in body or waits else {})}
        if isinstance(body.get("group_id"), str):
            body["group_id"] = group
        if name == "POST /start" and isinstance(body.get("max_steps"), int):
            body["save_steps"] = 1_000
    content = json.dumps(body).encode()
    return {**options, "content": content, "headers": {"Content-Type": "application/json"}}


async def check(server: Served) -> None:
    """The run goes on: where one is active, groups are answered, rewarded and trained."""
    status = await server.service.status()
    assert status.phase in ("running", "stopped", "finished"), status
    counted = status.counters
    assert counted.served == counted.open + counted.rewarded + counted.held + counted.planned + (
        counted.trained + counted.expired + counted.given_up + counted.stale + counted.quarantined
    )
    assert counted.quarantined == 0
    if status.phase != "running":
        await server.start()
    else:
        await server.start(**SETTINGS, replace=True)
    answers = await server.round(0)
    assert {answer.status for answer in answers} == {"trained"}


FEW_RUNS, MANY_RUNS = (
    hypothesis.settings(max_examples=most, suppress_health_check=[hypothesis.HealthCheck.too_slow])
    for most in (15, 200)
)


@FEW_RUNS
@hypothesis.given(requests=st.lists(asks(), min_size=1, max_size=12))
def test_no_request_does_harm(requests: list[tuple[str, Any, int]], tmp_path_factory: Any) -> None:
    asyncio.run(course(tmp_path_factory.mktemp("fuzzed"), requests))


# The Tinker API

VERB_ROUTES = {
    f"{method.upper()} {path}": operation
    for path, methods in VERBS["paths"].items()
    for method, operation in methods.items()
}
BYTES = "application/x-protobuf"
RESULT = TypeAdapter[Any](responses.Result)
SOME = {"model_id": "", "seq_id": 0}
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
GOOD: Mapping[str, Mapping[str, Any]] = {
    f"POST /api/v1/{path}": body
    for path, body in {
        "session_heartbeat": {"session_id": ""},
        "get_info": {"model_id": ""},
        "optim_step": {**SOME, "adam_params": {}},
        "save_weights": {**SOME, "path": "one", "overwrite": True},
        "load_weights": {**SOME, "path": "tinker://m/weights/one", "optimizer": True},
        "save_weights_for_sampler": {**SOME, "sampling_session_seq_id": 0},
        "create_sampling_session": {"session_id": "", "sampling_session_seq_id": 1, "base_model": "tiny"},
        "asample": {"sampling_session_id": "", "seq_id": 0, "prompt": PROMPT, "sampling_params": {"max_tokens": 3}},
        "retrieve_future": {"request_id": ""},
    }.items()
} | {"PUT /api/v1/training_runs/{run}/checkpoints/{kind}/{name}/ttl": {"ttl_seconds": 60}}  # fmt: skip
"""Bodies that come far; ids and numbers are filled in."""
KNOWN = ("session_id", "model_id", "sampling_session_id", "request_id", "seq_id")


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, Any, int]:
    """A route, a body, and a number by which the ids and numbers in it are chosen."""
    name = draw(st.sampled_from(sorted(VERB_ROUTES)))
    content = VERB_ROUTES[name].get("requestBody", {}).get("content", {})
    number = draw(st.integers(0, 5))
    if BYTES in content:
        return name, draw(st.binary(max_size=40) | st.integers(0, 60)), number
    if "application/json" not in content:
        return name, None, number
    schema = content["application/json"]["schema"]
    while "$ref" in schema:
        schema = VERBS["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return name, draw(changed(GOOD.get(name, {}), [*schema.get("properties", {})])), number


class Client:
    """A client of the routes that knows ids, and asks for everything."""

    def __init__(self, server: Server, session: str) -> None:
        transport = httpx2.ASGITransport(app(server.service, poll=SOONER))
        self.http = httpx2.AsyncClient(
            transport=transport, base_url="http://server", headers={"X-API-Key": KEY}
        )
        self.ids: list[str] = []
        self.session = session
        self._next = 1

    async def ask(self, name: str, body: Any, number: int) -> None:
        method, path = name.split(" ")
        path = path.replace("{session}", self._known("session_id", number // 5))  # rarely its own
        path = path.replace("{sampler}", self._known("sampling_session_id", number))
        path = path.replace("{run}", self._known("model_id", number))
        path = path.replace("{kind}/{name}", ("weights/one", "weights/two", "up/one")[number % 3])
        answer = await self.http.request(method, path, content=self._content(body, number))
        shown = f"{name} {body!r:.300} -> {answer.status_code} {answer.text[:300]}"
        assert str(answer.status_code) in VERB_ROUTES[name]["responses"], shown
        assert answer.status_code < 500, shown
        if answer.status_code >= 400 and answer.status_code != 408:
            assert CODES[answer.json()["code"]].status == answer.status_code, shown
        elif answer.status_code == 200 and "request_id" in answer.text:
            self.ids.append(answer.json()["request_id"])

    def _content(self, body: Any, number: int) -> bytes:
        if isinstance(body, bytes):
            return body
        if isinstance(body, int) and not isinstance(body, bool):  # a message, whole or cut
            whole = gradient(self._known("model_id", number), self._known("seq_id", number), 5)
            return whole if body > 20 else whole[: 5 * body]
        if isinstance(body, dict) and number:
            body = {**body, **{key: self._known(key, number) for key in KNOWN if key in body}}
        return json.dumps(body).encode() if body is not None else b""

    def _known(self, key: str, number: int) -> Any:
        if key == "seq_id":  # the next one, mostly; others leave a gap, or come again
            self._next += number < 4
            return self._next - 1 if number < 4 else max(1, self._next + number - 5)
        if key == "request_id":
            return self.ids[number % len(self.ids)] if self.ids else "f-0-1"
        ends = {"model_id": ":train:0", "sampling_session_id": ":sample:0"}
        return self.session + ends.get(key, "") if number else "abc"


async def tinker_course(folder: Path, calls: list[tuple[str, Any, int]]) -> None:
    async with serving(folder, Disk(SavedFolders(folder))) as server:
        service = server.service
        client = Client(server, await service.registry.create_session(None))
        await client.ask("POST /api/v1/create_model", created(client.session).model_dump(), 0)
        sampler = {"sampling_session_seq_id": 0, "base_model": "tiny", "session_id": client.session}
        await client.ask("POST /api/v1/create_sampling_session", sampler, 0)
        for name, body, number in calls:
            await asyncio.wait_for(client.ask(name, body, number), 10)
        await client.http.aclose()
        for id in client.ids:
            answer = await service.answer(id, SOONER)
            if answer is not None and answer.state == "failed":
                assert b"The server failed" not in answer.body
            elif answer is not None and answer.media_type == JSON:
                RESULT.validate_json(answer.body)
        for session in [*service.registry._sessions]:  # pyright: ignore[reportPrivateUsage]
            await service.registry.finish(session)
        after = Loop(await service.registry.create_session(None))
        await after.go(service, last=5)
        assert all(each and each.state == "answered" for each in await after.answers(service))


@FEW_RUNS
@hypothesis.given(tinker_calls=st.lists(calls(), min_size=1, max_size=16))
def test_no_call_of_the_tinker_api_does_harm(
    tinker_calls: list[tuple[str, Any, int]], tmp_path_factory: Any
) -> None:
    asyncio.run(tinker_course(tmp_path_factory.mktemp("tinker"), tinker_calls))


@pytest.mark.soak(suite="attacks")
@MANY_RUNS
@hypothesis.given(
    routes=st.lists(asks(), min_size=1, max_size=12),
    verbs=st.lists(calls(), min_size=1, max_size=16),
)
def test_many_random_requests_do_no_harm(routes: Any, verbs: Any, tmp_path_factory: Any) -> None:
    asyncio.run(course(tmp_path_factory.mktemp("fuzzed"), routes))
    asyncio.run(tinker_course(tmp_path_factory.mktemp("tinker"), verbs))
