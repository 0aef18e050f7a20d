"""Random requests made from the OpenAPI document, against the real service: nothing that the document does not name, no 5xx, no harm.

The fake engine stands for the model; everything else is real: routes, ledger, steps. Bodies are mostly what the schemas allow, so that they
come far, and partly spoilt. Whatever was sent, the server answers, its run goes on, and what it knows fits together.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import strategies as st

from groupwise.server.app import make_app
from tests.unit.server.asking import client_of
from tests.unit.server.serving import SETTINGS, Served, served
from tests.unit.server.test_schema_walk import OPERATIONS, WRONG, ask, resolved

FEW = 3
"""Entries of a list, at most."""
ROUTES = [name for name in OPERATIONS if name not in ("GET /events", "GET /metrics")]
SOONER = 0.02
"""Seconds for every wait, so that the test does not take its own time."""
LARGE = 1 << 20


def values_of(schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """What a schema allows, and sometimes what it does not."""
    return st.one_of(_allowed(schema), _allowed(schema), _allowed(schema), st.sampled_from(WRONG))


def _allowed(schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    schema = resolved(schema)
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return st.one_of(
                [st.deferred(lambda each=each: _allowed(each)) for each in schema[several]]
            )
    return _OF_TYPE[schema.get("type", "anything")](schema)


def _integers(schema: Mapping[str, Any]) -> st.SearchStrategy[int]:
    least = schema.get("minimum", schema.get("exclusiveMinimum", 0) + 1)
    most = min(schema.get("maximum", LARGE), LARGE)
    return st.one_of(st.integers(least, min(most, least + 4)), st.integers(least, most))


def _numbers(schema: Mapping[str, Any]) -> st.SearchStrategy[float]:
    least = schema.get("minimum", schema.get("exclusiveMinimum", -10))
    return st.floats(least, schema.get("maximum", 1e6), allow_nan=False)


def _lists(schema: Mapping[str, Any]) -> st.SearchStrategy[list[Any]]:
    inner = st.deferred(lambda: values_of(schema.get("items", {})))
    return st.lists(inner, min_size=schema.get("minItems", 0), max_size=FEW)


def _objects(schema: Mapping[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    properties, required = schema.get("properties", {}), schema.get("required", ())
    inner = {
        name: st.deferred(lambda each=each: values_of(each)) for name, each in properties.items()
    }
    needed = {name: inner[name] for name in required}
    others = {name: inner[name] for name in inner if name not in required}
    return st.fixed_dictionaries(needed, optional=others)


_OF_TYPE = {
    "null": lambda schema: st.none(),
    "boolean": lambda schema: st.booleans(),
    "integer": _integers,
    "number": _numbers,
    "string": lambda schema: (
        st.sampled_from(["abc", "tiny", "next", "g-1", "latest"]) | st.text(max_size=8)
    ),
    "array": _lists,
    "object": _objects,
    "anything": lambda schema: st.sampled_from(WRONG),
}


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, Any, int]:
    """A route, a body, and which of the groups that there are is meant where a group is."""
    name = draw(st.sampled_from(ROUTES))
    content = OPERATIONS[name][2].get("requestBody", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema")
    return name, draw(values_of(schema)) if schema else None, draw(st.integers(0, 5))


async def course(folder: Path, asked: list[tuple[str, Any, int]]) -> None:
    async with served(folder) as server:
        await server.start(steps="auto", lease_seconds=60.0)
        groups = [(await server.ask()).group_id for _ in range(2)]
        async with client_of(make_app(server.service, server.config, None)) as client:
            for name, body, number in asked:
                group = groups[number % len(groups)]
                given = _meant(name, body, group)
                await asyncio.wait_for(ask(client, name, **given), 10)
        await check(server)


def _meant(name: str, body: Any, group: str) -> dict[str, Any]:
    given: dict[str, Any] = {"path": OPERATIONS[name][1].replace("{group_id}", group)}
    if body is None:
        return given
    if isinstance(body, dict):
        body = {**body, **({"timeout": SOONER} if "timeout" in body or "wait" in body else {})}
        if isinstance(body.get("group_id"), str):
            body["group_id"] = group
        if name == "POST /step" and "timeout" not in body:
            body["timeout"] = SOONER
        if name == "POST /start" and isinstance(body.get("max_steps"), int):
            body["save_steps"] = 1_000
    content = json.dumps(body).encode()
    return {**given, "content": content, "headers": {"Content-Type": "application/json"}}


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


@hypothesis.settings(max_examples=60, suppress_health_check=[hypothesis.HealthCheck.too_slow])
@hypothesis.given(asked=st.lists(requests(), min_size=1, max_size=12))
def test_no_request_does_harm(asked: list[tuple[str, Any, int]], tmp_path_factory: Any) -> None:
    asyncio.run(course(tmp_path_factory.mktemp("fuzzed"), asked))
