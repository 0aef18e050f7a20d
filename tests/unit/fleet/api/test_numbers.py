"""Numbers beyond what a database or a clock can hold, in every field of the API that takes any: refused in words, never our own mistake."""

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from sqlalchemy.orm import Session

from groupwise.fleet.api.app import make_app
from groupwise.fleet.api.serving import Folders, Serving
from groupwise.fleet.doorbells.local import LocalDoorbell
from groupwise.fleet.store.database import Database
from groupwise.fleet.store.tables import GPU, VM, Job
from groupwise.hosts.files import BlobStore
from groupwise.wire.problems import MEDIA_TYPE

NUMBERS = (-1, 2**31, 10**400)
NAMES = {
    "job_id": "job-1",
    "vm_id": "vm-1",
    "gpu": "0",
    "name": "default",
    "key_id": "none",
    "sha256": "0" * 64,
    "path": "model.bin",
}
BODIES: Mapping[str, dict[str, Any]] = {
    "POST /jobs": {"arguments": ["true"]},
    "POST /jobs/plan": {"arguments": ["true"]},
    "POST /jobs/array": {"jobs": [{"arguments": ["true"]}]},
    "POST /jobs/prune": {"older_than": 0},
    "POST /vms": {"vm_id": "vm-2", "ip_address": "h", "user": "u", "ssh_key_path": "/k"},
    "PUT /vms/{vm_id}": {},
    "PUT /projects/{name}": {},
    "POST /keys": {"role": "read"},
}


@pytest.fixture
def app(database: Database, tmp_path: Path) -> FastAPI:
    def write(session: Session) -> None:
        session.add(VM(vm_id="vm-1", user="u", contact="ok"))
        session.flush()
        session.add(GPU(vm_id="vm-1", index=0, uuid="GPU-0"))
        session.add(Job(job_id="job-1"))

    database.run(write)
    for folder in ("logs", "artefacts"):
        (tmp_path / folder).mkdir()
    folders = Folders(tmp_path / "logs", tmp_path / "artefacts", BlobStore(tmp_path / "blobs"))
    serving = Serving(database, folders, LocalDoorbell(tmp_path / "bell"))
    return make_app(serving, None, open_to_this_machine=True)


def client_of(app: FastAPI) -> httpx2.AsyncClient:
    transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
    return httpx2.AsyncClient(transport=transport, base_url="http://localhost", trust_env=False)


def operations(document: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def numeric(document: Mapping[str, Any], schema: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Places of a schema where a number may stand."""
    while "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    if schema.get("type") in ("integer", "number"):
        yield ()
    for other in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from numeric(document, other)
    for name, inner in inside(schema):
        yield from ((name, *rest) for rest in numeric(document, inner))


def inside(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield from schema.get("properties", {}).items()
    if isinstance(more := schema.get("additionalProperties"), dict):
        yield "network", more  # a failure class, and as good a name as any
    yield from (
        ("[]", inner) for inner in (schema.get("items"), *schema.get("prefixItems", ())) if inner
    )


def spoilt(good: Any, place: tuple[str, ...], number: float) -> Any:
    """The body with that number in that place."""
    if not place:
        return number
    if place[0] == "[]":
        inside = good[0] if isinstance(good, list) and good else None
        return [spoilt(inside, place[1:], number)]
    body = copy.deepcopy(good) if isinstance(good, dict) else {}
    body[place[0]] = spoilt(body.get(place[0]), place[1:], number)
    return body


async def test_no_number_is_our_mistake(app: FastAPI) -> None:
    document, asked, places = app.openapi(), 0, set[str]()
    async with client_of(app) as client:
        for method, path, operation in operations(document):
            address, name = path.format(**NAMES), f"{method} {path}"
            for parameter in operation.get("parameters", ()):
                if parameter["in"] != "query" or not list(numeric(document, parameter["schema"])):
                    continue
                places.add(f"{name} {parameter['name']}")
                for number in NUMBERS:
                    query = {"size": "1", parameter["name"]: str(number)}
                    known = {each["name"] for each in operation["parameters"]}
                    answer = await client.request(
                        method,
                        address,
                        params={k: v for k, v in query.items() if k in known},
                        headers={"Content-Type": "application/json"},
                    )
                    check(f"{name} {query}", answer)
                    asked += 1
            content = operation.get("requestBody", {}).get("content", {}).get("application/json")
            if content is None:
                continue
            for place in sorted(set(numeric(document, content["schema"]))):
                places.add(f"{name} {'.'.join(place)}")
                for number in NUMBERS:
                    body = spoilt(BODIES.get(name, {}), place, number)
                    answer = await client.request(
                        method,
                        address,
                        content=json.dumps(body),
                        headers={"Content-Type": "application/json"},
                    )
                    check(f"{name} {place} {number}", answer)
                    asked += 1
    assert {
        "GET /events after",
        "PUT /projects/{name} max_gpus",
        "POST /jobs/prune older_than",
        "POST /jobs resources.gpus",
    } <= places
    assert asked > 150


def check(what: str, answer: httpx2.Response) -> None:
    shown = f"{what[:300]} -> {answer.status_code} {answer.text[:300]}"
    assert answer.status_code < 500, shown
    if answer.status_code >= 400:
        assert answer.headers["content-type"] == MEDIA_TYPE, shown


async def test_the_bound_is_named(app: FastAPI) -> None:
    async with client_of(app) as client:
        for method, address, body, bound in (
            ("GET", f"/events?after={10**20}", None, "9223372036854775807"),
            ("PUT", "/projects/default", {"max_gpus": 10**20}, "2147483647"),
            ("POST", "/keys", {"role": "read", "seconds": 1e300}, "at most 1e+09"),
        ):
            answer = await client.request(method, address, json=body)
            assert (answer.status_code, bound in answer.text) == (422, True), answer.text


async def test_no_gpu_has_such_an_index(app: FastAPI) -> None:
    async with client_of(app) as client:
        for gpu in (str(10**20), "9" * 5000, "²", "٣"):
            answer = await client.post(f"/vms/vm-1/gpus/{gpu}/clear")
            assert answer.status_code == 404, answer.text
            assert answer.json()["code"] == "unknown_gpu"
