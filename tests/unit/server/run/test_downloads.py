"""A version as a zip file: complete, in little memory, several at once, and its files closed however it ends."""

import asyncio
import io
import tracemalloc
import zipfile
from contextlib import closing
from pathlib import Path

import httpx2
import pytest

from groupwise.server.routes import models
from groupwise.server.run.downloads import CHUNK, OpenFile, OpenVersion, zip_pieces
from tests.processes import wait_until_async
from tests.unit.server.fake_service import FakeService
from tests.unit.server.http_client import app_of, listening

LARGE = 80 << 20


@pytest.fixture
def sparse(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.truncate(LARGE)
        file.seek(LARGE // 2)
        file.write(b"middle")
    return path


def version_of(*paths: Path) -> OpenVersion:
    files = [OpenFile(path.name, path.stat().st_size, path.open("rb")) for path in paths]
    return OpenVersion(("tiny", 4), "f4", "full", files)


async def test_the_zip_file_holds_what_the_files_hold_also_where_they_are_deleted_meanwhile(
    tmp_path: Path,
) -> None:
    contents = {"adapter_model.safetensors": bytes(range(256)) * 9000, "README.md": b"# Model\n"}
    contents["empty.json"] = b""
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    with closing(version_of(*(tmp_path / name for name in contents))) as version:
        for name in contents:
            (tmp_path / name).unlink()
        archive = zipfile.ZipFile(
            io.BytesIO(b"".join([each async for each in zip_pieces(version)]))
        )
    assert archive.testzip() is None
    assert {name: archive.read(name) for name in archive.namelist()} == contents


async def test_a_large_file_passes_through_in_little_memory(sparse: Path) -> None:
    """Of each piece nothing is kept by the time of the next one."""
    version, size, most = version_of(sparse), 0, 0
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        async for piece in zip_pieces(version):
            size += len(piece)
        most = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
        version.close()
    assert size > LARGE
    assert most < 10 * CHUNK


def served(service: FakeService, path: Path) -> None:
    """Opened anew for each request."""
    open_version = service.open_version

    async def fresh(version: str | None) -> OpenVersion:
        service.files = [(path.name, LARGE, await asyncio.to_thread(path.open, "rb"))]
        return await open_version(version)

    service.open_version = fresh


def closed(service: FakeService) -> bool:
    return all(entry.file.closed for version in service.opened for entry in version.files)


async def test_downloads_block_no_other_caller_and_end_with_their_clients(
    sparse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = FakeService()
    served(service, sparse)
    async with listening(app_of(service)) as port:
        async with (
            httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
            client.stream("GET", "/model") as slow,  # begun, and not read on
            client.stream("GET", "/model") as answer,
        ):
            assert slow.status_code == 200
            assert sum([len(piece) async for piece in answer.aiter_bytes()]) > LARGE
            assert not closed(service)
        await wait_until_async(lambda: closed(service))
        monkeypatch.setattr(models, "STALLED", 0.2)
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(b"GET /model HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await wait_until_async(lambda: len(service.opened) == 3 and closed(service))
        writer.close()
        await writer.wait_closed()
