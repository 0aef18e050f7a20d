"""The real Tinker client's REST methods against the routes of the Tinker API, over the fake engine and its real files."""

from __future__ import annotations

import asyncio
import io
import shutil
import socket
import threading
import zipfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvicorn

from groupwise.engine.models.bundled import tiny_folder
from groupwise.engine.models.config import ModelConfig
from groupwise.engine.models.tokenizer import load_tokenizer
from groupwise.server.ledger.writer import Ledger
from groupwise.server.tinker.service import TinkerService
from tests.fake_tinker_engine import FakeTinkerEngine
from tests.integration.server.test_tinker import Client
from tests.tinker_app import KEY, app

pytestmark = pytest.mark.slow


@contextmanager
def served(folder: Path) -> Generator[str]:
    """A server of the Tinker API in a thread; yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        servers: list[uvicorn.Server] = []

        async def serve() -> None:
            ledger = Ledger.open(folder / "server.db")
            service = TinkerService(FakeTinkerEngine(folder), ledger)
            await service.open()
            config = uvicorn.Config(app(service), log_level="critical", timeout_graceful_shutdown=1)
            servers.append(uvicorn.Server(config))
            await servers[0].serve([listener])
            await service.close()
            await ledger.close()

        thread = threading.Thread(target=lambda: asyncio.run(serve()))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            servers[0].should_exit = True
            thread.join()


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with served(tmp_path) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    client = Client()
    client.do("connect", url=url, key=KEY)
    try:
        yield client
    finally:
        client.do("close")
        client.close()


def rest(client: Client, method: str, *arguments: Any, **options: Any) -> Any:
    return client.do("rest", arguments=[method, *arguments], **options)


def test_checkpoints_of_the_real_client(client: Client) -> None:
    model = client.do("create", base="letters")
    saved_path = client.do("save_for", name="kept", ttl=None)
    short = client.do("save_for", name="short", ttl=7200, kind="sampler")
    client.do("sampler_of", path=short)
    assert client.do("sample", seed=1)
    listed = rest(client, "list_checkpoints", model)["checkpoints"]
    assert [each["tinker_path"] for each in listed] == [saved_path, short]
    assert [each["checkpoint_type"] for each in listed] == ["training", "sampler"]
    assert [each["expires_at"] is None for each in listed] == [True, False]
    assert all(each["size_bytes"] > 0 for each in listed)
    mine = rest(client, "list_user_checkpoints", limit=1)
    assert [each["tinker_path"] for each in mine["checkpoints"]] == [short]
    assert mine["cursor"]["total_count"] == 2
    run = rest(client, "get_training_run", model)
    assert rest(client, "get_training_run_by_tinker_path", saved_path) == run
    assert run["last_sampler_checkpoint"]["tinker_path"] == short
    assert rest(client, "list_training_runs")["training_runs"] == [run]
    (session,) = rest(client, "list_sessions")["sessions"]
    assert rest(client, "get_session", session)["training_run_ids"] == [model]
    rest(client, "set_checkpoint_ttl_from_tinker_path", short, None)
    assert rest(client, "list_checkpoints", model)["checkpoints"][1]["expires_at"] is None
    (use,) = rest(client, "get_current_checkpoint_storage_usage")["data"]
    assert use["checkpoint_count"] == 2
    rest(client, "delete_checkpoint_from_tinker_path", short)
    rest(client, "delete_checkpoint", model, "weights/kept")
    assert rest(client, "list_checkpoints", model)["checkpoints"] == []
    assert client.do("sample", seed=2), "the open sampling client still has its weights"
    client.do("sampler_of", path=short)
    assert "has expired or was deleted" in client.expect_refusal("sample", seed=3)


def test_a_tokenizer_that_no_hub_has_is_unpacked_where_the_program_starts(
    client: Client, url: str, tmp_path: Path
) -> None:
    shutil.copytree(tiny_folder(), tmp_path / "tokenizer")
    client.do("create", base="letters")
    assert client.do("bases") == {"letters": 64}
    answer = httpx2.get(
        f"{url}/api/v1/tokenizer",
        params={"base_model": "letters"},
        headers={"X-API-Key": KEY},
    )
    with zipfile.ZipFile(io.BytesIO(answer.raise_for_status().content)) as archive:
        assert "model.safetensors" not in archive.namelist()
        archive.extractall(tmp_path / "here" / "letters")
    expected = load_tokenizer(ModelConfig(name="tiny")).encode("word")
    ids = client.do("tokenizer", folder=str(tmp_path / "here"), base="letters")
    assert ids == [expected, expected]
