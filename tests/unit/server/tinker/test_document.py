"""The Tinker API in the OpenAPI document."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx2

from groupwise.server.engine.engine_protocol import Engine
from groupwise.server.openai.service import OpenAIService
from groupwise.server.serve import Services
from groupwise.server.tinker.mount import TinkerApi
from groupwise.server.tinker.refusals import CODES
from groupwise.server.tinker.routes import PREFIX, ROUTES, tinker_routes
from tests.unit.server.http_client import HERE
from tests.unit.server.serving import served


async def document_of(folder: Path) -> dict[str, Any]:
    """As a server with all protocols gives it."""

    async def none() -> Engine:
        raise AssertionError("nothing needs a model")

    async with served(folder) as server:
        openai = OpenAIService(server.service, server.ledger, server.config)
        tinker = TinkerApi(server.config, server.ledger, server.service, none)
        _, app = Services(server.service, openai, tinker).application(server.config, None)
        transport = httpx2.ASGITransport(app)
        async with httpx2.AsyncClient(transport=transport, base_url=HERE) as client:
            document = (await client.get("/openapi.json")).json()
        await tinker.shut_down()
        return document


async def test_every_route_stands_there_with_body_answer_and_refusals(tmp_path: Path) -> None:
    document = await document_of(tmp_path)
    mounted = {route.path for route in tinker_routes(None, None)}  # pyright: ignore[reportArgumentType]
    described = {path for path in document["paths"] if path.startswith(PREFIX)}
    assert described == mounted - {f"{PREFIX}/{{path:path}}"}
    for route in ROUTES:
        operation = document["paths"][f"{PREFIX}{route.path}"][route.method.lower()]
        assert operation["security"], route.path
        assert ("requestBody" in operation) == bool(route.reads or route.bytes), route.path
        for code in route.all_codes:
            response = operation["responses"][str(CODES[code].status)]
            assert CODES[code].meaning in response["description"]
            assert (
                response["content"]["application/json"]["examples"][code]["value"]["code"] == code
            )
    assert {code for route in ROUTES for code in route.all_codes} == {*CODES} - {"unsupported"}
    for code, each in CODES.items():  # those that the client sends again
        again = each.status in (408, 409, 429) or each.status >= 500
        assert again == (each.retry or code == "internal")
    names = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)))
    assert names <= {*document["components"]["schemas"]}
    operations = [each for methods in document["paths"].values() for each in methods.values()]
    ids = [operation["operationId"] for operation in operations]
    assert len(ids) == len(set(ids))
    assert "/completions" in document["paths"]
