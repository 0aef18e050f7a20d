"""The Tinker API in a server."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest

from groupwise.api.schemas.keys import Role
from groupwise.api.schemas.training import TinkerStatus
from groupwise.server.engine.engine_protocol import Engine
from groupwise.server.serve import Services
from groupwise.server.tinker.mount import TinkerApi
from groupwise.server.tinker.sessions import NotFound
from tests.unit.server.http_client import HERE, keyring
from tests.unit.server.serving import Served, served


async def test_requests_need_a_key_of_the_role_and_have_ids_and_metrics(tmp_path: Path) -> None:
    ring, keys = keyring()
    async with served(tmp_path) as server:
        tinker = TinkerApi(server.config, server.ledger, server.service, lambda: no_engine(server))
        await tinker.begin()
        serving, answers = Services(server.service, None, tinker).application(server.config, ring)
        transport = httpx2.ASGITransport(answers)
        async with httpx2.AsyncClient(transport=transport, base_url=f"{HERE}/api/v1/") as client:
            headers = {"X-API-Key": keys[Role.TRAIN], "X-Request-ID": "mine"}
            body = {"request_id": "nonsense"}
            response = await client.post("retrieve_future", json=body, headers=headers)
            assert (response.status_code, response.headers["X-Request-ID"]) == (404, "mine")
            for role, status in ((Role.READ, 403), (None, 401)):
                key_headers = {} if role is None else {"X-API-Key": keys[role]}
                assert (await client.post("telemetry", headers=key_headers)).status_code == status
            serving.end()
            ended = await client.post("telemetry", headers=headers)
            assert (ended.status_code, ended.headers["Retry-After"]) == (503, "5")
        codes = ("unknown_answer", "forbidden", "unauthorised", "shutting_down")
        assert [serving.metrics.refusals[code] for code in codes] == [1, 1, 1, 1]
        limits = {"requests_per_second": 0.001, "burst": 2}
        limited = server.config.model_copy(update=limits)
        _, answers = Services(server.service, None, tinker).application(limited, ring)
        transport = httpx2.ASGITransport(answers)
        async with httpx2.AsyncClient(transport=transport, base_url=HERE) as client:
            headers = {"X-API-Key": keys[Role.TRAIN]}
            responses = [await client.get("/status", headers=headers)]
            responses += [await client.post("/api/v1/telemetry", headers=headers) for _ in range(2)]
        assert [each.status_code for each in responses] == [200, 200, 429], "one bucket for both"
        await tinker.shut_down()


async def no_engine(server: Served) -> Engine:
    raise AssertionError(f"nothing needs a model in {server.folder}")


async def test_the_status_tells_of_sessions_and_a_start_that_replaces_ends_those_with_models(
    tmp_path: Path,
) -> None:
    async with served(tmp_path) as server:
        tinker = TinkerApi(server.config, server.ledger, server.service, lambda: no_engine(server))
        await tinker.begin()
        opened = tinker.service.registry
        crashed, watching = [await opened.create_session(None) for _ in range(2)]
        status = await server.service.status()
        assert (status.phase, status.tinker) == ("idle", TinkerStatus(sessions=2))
        opened.new_model(crashed, 0)
        assert [*opened.with_models()] == [crashed]
        await server.start(replace=True)
        opened.session(watching)
        with pytest.raises(NotFound, match="make way"):
            opened.session(crashed)
        await opened.finish(watching)
        assert (await server.service.status()).tinker == TinkerStatus()
        await tinker.shut_down()
