"""A version as a zip file: whole, in little memory, several at once, and its files closed however it ends."""

import asyncio
import io
import tracemalloc
import zipfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import httpx2
import pytest

from groupwise.server.downloads import CHUNK, OpenFile, OpenVersion, zipped
from groupwise.server.routes import models
from tests.unit.server.asking import app_of, listening, until
from tests.unit.server.fake_service import FakeService

LARGE = 200 << 20


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


async def whole(version: OpenVersion) -> bytes:
    try:
        return b"".join([piece async for piece in zipped(version)])
    finally:
        version.close()


def files(tmp_path: Path) -> list[Path]:
    made = {
        "adapter_model.safetensors": bytes(range(256)) * 9000,
        "README.md": b"# Model\n" * 500,
        "empty.json": b"",
    }
    for name, content in made.items():
        (tmp_path / name).write_bytes(content)
    return [tmp_path / name for name in made]


async def test_the_zip_file_holds_what_the_files_hold(tmp_path: Path) -> None:
    paths = files(tmp_path)
    archive = zipfile.ZipFile(io.BytesIO(await whole(version_of(*paths))))
    assert archive.testzip() is None
    assert {name: archive.read(name) for name in archive.namelist()} == {
        path.name: path.read_bytes() for path in paths
    }
    kinds = {info.filename: info.compress_type for info in archive.infolist()}
    assert kinds["adapter_model.safetensors"] == zipfile.ZIP_STORED
    assert kinds["README.md"] == zipfile.ZIP_DEFLATED


async def test_the_same_version_is_the_same_file(tmp_path: Path) -> None:
    paths = files(tmp_path)
    assert await whole(version_of(*paths)) == await whole(version_of(*paths))


def memory_of_zipping(path: Path) -> tuple[int, int]:
    async def size() -> int:
        version = version_of(path)
        try:
            return sum([len(piece) async for piece in zipped(version)])
        finally:
            version.close()

    tracemalloc.start()
    return asyncio.run(size()), tracemalloc.get_traced_memory()[1]


def test_a_large_file_passes_through_in_little_memory(sparse: Path) -> None:
    with ProcessPoolExecutor(1, get_context("spawn")) as alone:  # other threads allocate here
        size, most = alone.submit(memory_of_zipping, sparse).result()
    assert size > LARGE
    assert most < 10 * CHUNK


async def test_a_version_that_is_deleted_meanwhile_is_sent_to_its_end(tmp_path: Path) -> None:
    (path,) = files(tmp_path)[:1]
    content = path.read_bytes()
    version = version_of(path)
    path.unlink()
    archive = zipfile.ZipFile(io.BytesIO(await whole(version)))
    assert archive.read("adapter_model.safetensors") == content


def served(service: FakeService, path: Path) -> None:
    """Opened anew for each request."""
    open_version = service.open_version

    async def fresh(version: str | None) -> OpenVersion:
        service.files = [(path.name, LARGE, await asyncio.to_thread(path.open, "rb"))]
        return await open_version(version)

    service.open_version = fresh


def closed(service: FakeService) -> bool:
    return all(entry.file.closed for version in service.opened for entry in version.files)


async def test_downloads_at_once_do_not_hold_each_other_up(sparse: Path) -> None:
    service = FakeService()
    served(service, sparse)
    async with (
        listening(app_of(service)) as port,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
        client.stream("GET", "/model") as slow,  # begun, and not read on
    ):
        assert slow.status_code == 200
        sizes: list[int] = []

        async def download() -> None:
            async with client.stream("GET", "/model") as answer:
                sizes.append(sum([len(piece) async for piece in answer.aiter_bytes()]))

        await asyncio.gather(download(), download())
        assert len(sizes) == 2
        assert min(sizes) == max(sizes) > LARGE
    await until(lambda: closed(service))


async def test_the_files_are_closed_when_the_client_goes(sparse: Path) -> None:
    service = FakeService()
    served(service, sparse)
    async with listening(app_of(service)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /model HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readexactly(100_000)
        assert not closed(service)
        writer.close()
        await writer.wait_closed()
        await until(lambda: closed(service))


async def test_a_client_that_takes_nothing_is_left(
    sparse: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(models, "STALLED", 0.2)
    service = FakeService()
    served(service, sparse)
    async with listening(app_of(service)) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(b"GET /model HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await until(lambda: service.opened and closed(service))
        writer.close()
        await writer.wait_closed()
