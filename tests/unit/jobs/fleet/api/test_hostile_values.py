"""Numbers beyond what a database or a clock can hold, and texts that are SQL, paths or no text, in every field of the API that takes any.

They are stored as they are, or refused in words: never our own mistake, and never more than a value.
"""

import copy
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import pytest
from fastapi import FastAPI
from sqlalchemy.orm import Session

from groupwise.api.schemas.problems import MEDIA_TYPE
from groupwise.jobs.fleet.api.app import make_app
from groupwise.jobs.fleet.api.serving import Folders, Serving
from groupwise.jobs.fleet.notify.local import LocalNotifier
from groupwise.jobs.fleet.store.database import Database
from groupwise.jobs.fleet.store.tables import GPU, VM, Job
from groupwise.jobs.hosts.files import BlobStore

NUMBERS = (-1, 2**31, 10**400)
TEXTS = ("'; DELETE FROM jobs; --", "\0", "../../etc", "\ud800", "é" * 70_000)
VALUES: Mapping[str, Sequence[Any]] = {"integer": NUMBERS, "number": NUMBERS, "string": TEXTS}
NAMES = {
    "job_id": "job-1", "vm_id": "vm-1", "gpu": "0", "name": "default", "key_id": "none",
    "sha256": "0" * 64, "path": "model.bin",
}  # fmt: skip
BODIES: Mapping[str, dict[str, Any]] = {
    "POST /jobs": {"arguments": ["true"]}, "POST /jobs/plan": {"arguments": ["true"]},
    "POST /jobs/array": {"jobs": [{"arguments": ["true"]}]}, "POST /jobs/prune": {"older_than": 0},
    "POST /vms": {"vm_id": "vm-2", "ip_address": "h", "user": "u", "ssh_key_path": "/k"},
    "PUT /vms/{vm_id}": {}, "PUT /projects/{name}": {}, "POST /keys": {"role": "read"},
}  # fmt: skip


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
    serving = Serving(database, folders, LocalNotifier(tmp_path / "notifier"))
    return make_app(serving, None, open_to_this_machine=True)


def client_of(app: FastAPI) -> httpx2.AsyncClient:
    transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
    return httpx2.AsyncClient(transport=transport, base_url="http://localhost", trust_env=False)


Asked = tuple[str, str, str, dict[str, Any]]
"""The place of a value, and a request with a hostile one: method, address and the rest."""


def requests(document: Mapping[str, Any]) -> Iterator[Asked]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            name, address = f"{method.upper()} {path}", path.format(**NAMES)
            query = {p["name"]: p for p in operation.get("parameters", ()) if p["in"] == "query"}
            size = {"size": "1"} if "size" in query else {}
            for each, parameter in query.items():
                for _, value in hostile(document, parameter["schema"]):
                    if value not in TEXTS[-2:]:  # no client has these in an address
                        yield f"{name} {each}", method, address, {"params": {**size, each: value}}
            for part, value in itertools.product(re.findall(r"{(\w+)}", path), TEXTS[:2]):
                elsewhere = path.format(**NAMES | {part: quote(value, safe="")})
                yield f"{name} {part}", method, elsewhere, {"params": size}
            body = operation.get("requestBody", {}).get("content", {}).get("application/json")
            places = set(hostile(document, body["schema"])) if body else set[Any]()
            for place, value in sorted(places, key=str):
                wrong = json.dumps(spoilt(BODIES.get(name, {}), place, value))
                yield f"{name} {'.'.join(place)}", method, address, {"content": wrong}


def hostile(
    document: Mapping[str, Any], schema: Mapping[str, Any]
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Places of a schema where a number or a text may stand, each with what may do harm there."""
    while "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    yield from (((), value) for value in VALUES.get(schema.get("type", ""), ()))
    for other in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from hostile(document, other)
    for name, inner in inside(schema):
        yield from (((name, *rest), value) for rest, value in hostile(document, inner))


def inside(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield from schema.get("properties", {}).items()
    if isinstance(more := schema.get("additionalProperties"), dict):
        yield "network", more  # a failure class, and as good a name as any
    yield from (
        ("[]", inner) for inner in (schema.get("items"), *schema.get("prefixItems", ())) if inner
    )


def spoilt(good: Any, place: tuple[str, ...], value: Any) -> Any:
    """The body with that value in that place."""
    if not place:
        return value
    if place[0] == "[]":
        inside = good[0] if isinstance(good, list) and good else None
        return [spoilt(inside, place[1:], value)]
    body = copy.deepcopy(good) if isinstance(good, dict) else {}
    body[place[0]] = spoilt(body.get(place[0]), place[1:], value)
    return body


async def test_a_value_is_a_value(app: FastAPI, database: Database) -> None:
    places = Counter[str]()
    async with client_of(app) as client:
        for place, method, address, asked in requests(app.openapi()):
            places[place] += 1
            headers = {"Content-Type": "application/json"}
            answer = await client.request(method.upper(), address, headers=headers, **asked)
            shown = f"{place} {str(asked)[:300]} -> {answer.status_code} {answer.text[:300]}"
            assert answer.status_code < 500, shown
            if answer.status_code >= 400:
                assert answer.headers["content-type"] == MEDIA_TYPE, shown
    sure = {"GET /events after", "PUT /projects/{name} max_gpus", "POST /jobs resources.gpus"}
    sure |= {
        "GET /jobs status",
        "POST /jobs arguments.[]",
        "POST /jobs name",
        "GET /jobs/{job_id} job_id",
    }
    assert sure <= places.keys()
    assert places.total() > 500
    assert database.read(lambda session: session.get(Job, "job-1")) is not None


async def test_no_gpu_has_such_an_index(app: FastAPI) -> None:
    async with client_of(app) as client:
        for gpu in (str(10**20), "9" * 5000, "²", "٣"):
            answer = await client.post(f"/vms/vm-1/gpus/{gpu}/clear")
            assert answer.status_code == 404, answer.text
            assert answer.json()["code"] == "unknown_gpu"
