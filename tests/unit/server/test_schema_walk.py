"""Bodies and parameters that violate the OpenAPI document in every way, sent to every route that takes any.

The document's own examples are the start; each field of each schema is spoilt in turn. Whatever is sent, the answer's status is one that
the document names for the route, a refusal is a problem, and there is no 5xx: the service behind it never fails.
"""

import json
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import httpx2
import pytest

from groupwise.api.schemas.problems import KINDS, MEDIA_TYPE
from tests.unit.server.fake_service import FakeService
from tests.unit.server.http_client import app_of, client_of

WRONG = (
    None, True, 0, -1, 0.5, 2**63, 10**400, 1e308, "", "x", "\x00", "../..", "é" * 70000, [], [[]], [None], {}, {"a": {"b": []}},
)  # fmt: skip
"""In the place of every field in turn; right for some of them, which is as good."""
DEEP = 100_000
RAW = {
    "nothing but a blank": b" ", "half": b'{"prompt": "a"', "two": b"{}{}",
    "NaN": b'{"timeout": NaN}', "infinity": b'{"timeout": -Infinity}',
    "beyond a double": b'{"timeout": 1e999}', "many digits": b'{"timeout": ' + b"9" * 5000 + b"}",
    "twice": b'{"prompt": "a", "prompt": "b"}', "twice inside": b'{"lora": {"r": 1, "r": 2}}',
    "deep list": b'{"prompt": ' + b"[" * DEEP + b"]" * DEEP + b"}",
    "deep object": b'{"training": ' + b'{"a":' * 200 + b"1" + b"}" * 200 + b"}",
    "open": b"[" * DEEP, "not UTF-8": b'{"prompt": "\xff\xfe"}',
    "UTF-16": '{"prompt": "a"}'.encode("utf-16"), "byte order mark": b'\xef\xbb\xbf{"prompt": "a"}',
    "half a pair": b'{"prompt": "\\ud800"}',
    "half a pair inside": b'{"training": {"a": ["\\udc00"]}}', "a list": b"[]",
    "a text": b'"prompt"', "null": b"null", "a number": b"12", "a form": b"prompt=a&draw=1",
}  # fmt: skip

APP = app_of(FakeService())
DOCUMENT: dict[str, Any] = APP.openapi()
OPERATIONS: dict[str, tuple[str, str, dict[str, Any]]] = {
    f"{method.upper()} {path}": (method.upper(), path, operation)
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
}
WITH_BODY = [name for name, (_, _, operation) in OPERATIONS.items() if "requestBody" in operation]
WITH_PARAMETERS = [
    name
    for name, (_, _, operation) in OPERATIONS.items()
    if operation.get("parameters") and name != "GET /events"
]


def resolved(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    while "$ref" in schema:
        schema = DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return schema


def fields_of(schema: Mapping[str, Any]) -> Iterator[str]:
    """Of an object, or of any that it may be."""
    schema = resolved(schema)
    yield from schema.get("properties", {})
    for other in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from fields_of(other)


def schema_of(name: str) -> Mapping[str, Any]:
    return OPERATIONS[name][2]["requestBody"]["content"]["application/json"]


def spoilt(name: str) -> Iterator[Any]:
    body = schema_of(name)
    good = body["example"]
    fields = dict.fromkeys(fields_of(body["schema"]))
    assert fields or name == "POST /stop", name
    for field in fields:
        for wrong in WRONG:
            yield {**good, field: wrong}
        yield {field: good.get(field)}
        yield {key: value for key, value in good.items() if key != field}
        yield {**good, field: [good] * 3}
    yield {**good, "no_such_field": 1}
    yield from WRONG


async def ask(client: httpx2.AsyncClient, name: str, **options: Any) -> int:
    method, path, operation = OPERATIONS[name]
    answer = await client.request(
        method, options.pop("path", path.replace("{group_id}", "g-1")), **options
    )
    shown = f"{str(options)[:300]} -> {answer.status_code} {answer.text[:300]}"
    assert answer.status_code < 500, shown
    assert str(answer.status_code) in operation["responses"], shown
    if answer.status_code >= 400:
        assert answer.headers["content-type"] == MEDIA_TYPE, shown
        assert KINDS[answer.json()["code"]].status == answer.status_code, shown
        assert len(answer.content) < 40_000, shown
    return answer.status_code


@pytest.mark.parametrize("name", WITH_BODY)
async def test_bodies_that_are_spoilt_or_of_another_type(name: str) -> None:
    may_be_null = name in ("POST /stop", "POST /model")
    async with client_of(APP) as client:
        for body in spoilt(name):
            content = json.dumps(body).encode()
            await ask(client, name, content=content, headers={"Content-Type": "application/json"})
        for what, raw in RAW.items():
            for kind in ("application/json", "application/json; charset=utf-16"):
                status = await ask(client, name, content=raw, headers={"Content-Type": kind})
                assert status == (200 if what == "null" and may_be_null else 422), what
        for kind in ("", "text/plain", "application/x-www-form-urlencoded", "é", "/"):
            await ask(client, name, content=b"{}", headers={"Content-Type": kind.encode()})


@pytest.mark.parametrize("name", WITH_PARAMETERS)
async def test_wrong_parameters(name: str) -> None:
    _, path, operation = OPERATIONS[name]
    body = {"json": schema_of(name)["example"]} if "requestBody" in operation else {}
    values = ("", "x", "-1", "1e3", "\x00", "é", "a" * 3000, "../../etc", "%00")
    parameters: list[dict[str, Any]] = operation["parameters"]
    async with client_of(APP) as client:
        for value, parameter in product(values, parameters):
            match parameter["in"]:
                case "query":
                    await ask(client, name, params={parameter["name"]: value}, **body)
                case "header":
                    if "\x00" not in value:
                        await ask(client, name, headers={parameter["name"]: value.encode()}, **body)
                case _:
                    if value.replace(".", "").isalnum():
                        await ask(client, name, path=path.replace("{group_id}", value))


async def test_wrong_ids_of_events_and_what_was_sent_is_never_repeated() -> None:
    secret = "sk-this-is-a-secret-0123456789"
    async with client_of(APP) as client:
        for value in ("", "x", "-1", "1.5", "9" * 30, "é"):
            answer = await client.get("/events", headers=[(b"Last-Event-ID", value.encode())])
            assert answer.status_code == 422
        for body in ({"prompt": [secret]}, {"draw": secret}, {"prompt": "a", "stop": secret}):
            answer = await client.post("/completions", json=body)
            assert (answer.status_code, secret in answer.text) == (422, False)
