"""Downloads of weights: file by file, and all as one archive, made while it is sent."""

from __future__ import annotations

import asyncio
import io
import shutil
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
from starlette.types import Message

from groupwise.dashboard.runs import archive as made
from groupwise.dashboard.runs import files
from groupwise.dashboard.runs.archive import archive
from groupwise.dashboard.runs.tokens import tokenizer_of
from groupwise.runs import checkpoints
from tests.meanwhile import right_after
from tests.unit.dashboard.dashboard_client import asking
from tests.web_runs import write_run

CONTENT = {"adapter.safetensors": b"\x00\xff" * 3000, "sub/é.json": b"{}", "empty": b""}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = write_run(tmp_path / "odd name", 4)

    def fill(folder: Path) -> None:
        for name, content in CONTENT.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)

    for step in (2, 4):
        checkpoints.save(path / "checkpoints", step, fill)
    (path / "final").mkdir()
    fill(path / "final")
    return path


@pytest.fixture
async def client(run: Path) -> AsyncIterator[httpx2.AsyncClient]:
    async with asking(run.parent) as found:
        yield found


@pytest.mark.parametrize("where", ["step-2", "final"])
async def test_all_come_as_one_archive(client: httpx2.AsyncClient, run: Path, where: str) -> None:
    answer = await client.get(f"/runs/odd%20name/weights/{where}.zip")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/zip"
    assert f'filename="odd_name-{where}.zip"' in answer.headers["content-disposition"]
    with zipfile.ZipFile(io.BytesIO(answer.content)) as found:
        assert found.testzip() is None
        names = found.namelist()
        for name, content in CONTENT.items():
            assert found.read(f"odd_name-{where}/{name}") == content
            one = await client.get(f"/runs/odd%20name/weights/{where}/{name}")
            assert one.content == content
    folder = run / ("final" if where == "final" else f"checkpoints/{where}")
    assert len(names) == sum(each.is_file() for each in folder.rglob("*"))
    for wrong in ("step-9", "..", "checkpoints"):
        missing = await client.get(f"/runs/odd%20name/weights/{wrong}.zip")
        assert missing.status_code == 404


def test_an_archive_is_made_while_it_is_sent(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made, "CHUNK_BYTES", 1000)
    pieces = [*archive(run / "final", "x")]
    assert (len(pieces) > 6, max(map(len, pieces)) < 2500) == (True, True)


async def test_symbolic_links_in_a_run_folder_are_not_served(
    client: httpx2.AsyncClient, run: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "secret").write_text("of somebody else")
    (run / "final" / "leak").symlink_to(elsewhere / "secret")
    (run / "final" / "folder").symlink_to(elsewhere)
    (run / "final" / "same").symlink_to("adapter.safetensors")
    (run / "checkpoints" / "step-7").symlink_to(elsewhere)
    base = "/runs/odd%20name/weights"
    names = [
        each["name"] for each in (await client.get(f"{base}/final?format=json")).json()["files"]
    ]
    assert sorted(names) == sorted([*CONTENT, "same"])
    for path in ("final/leak", "final/folder/secret", "step-7", "step-7/secret", "step-7.zip"):
        assert (await client.get(f"{base}/{path}")).status_code == 404, path
    archived = (await client.get(f"{base}/final.zip")).content
    assert b"of somebody else" not in archived


@pytest.mark.parametrize("address", ["step-2", "step-2.zip", "step-2/adapter.safetensors"])
async def test_a_checkpoint_that_is_pruned_while_it_is_asked_for_is_not_found(
    address: str, client: httpx2.AsyncClient, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run / "checkpoints" / "step-2"
    right_after(monkeypatch, files, "files_of", lambda: shutil.rmtree(folder))
    answer = await client.get(f"/runs/odd%20name/weights/{address}")
    assert answer.status_code == 404
    assert "removed a moment ago" in answer.text


@pytest.mark.parametrize("version", ["2.3", "2.4"])
async def test_an_archive_whose_checkpoint_is_pruned_breaks_off(version: str, run: Path) -> None:
    """So that nobody takes a part of a checkpoint for the whole."""
    folder = run / "checkpoints" / "step-2"
    stream = files.ClosingStream(archive(folder, "x"))
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)
        if len(sent) == 2:
            shutil.rmtree(folder)

    scope = {"type": "http", "method": "GET", "asgi": {"version": "3.0", "spec_version": version}}
    await stream(scope, asyncio.Event().wait, send)  # pyright: ignore[reportArgumentType]
    assert [message.get("more_body") for message in sent[1:]] == [True] * (len(sent) - 1)
    with pytest.raises(zipfile.BadZipFile):
        zipfile.ZipFile(io.BytesIO(b"".join(message["body"] for message in sent[1:])))


@pytest.mark.parametrize("looks", [1, 2])
def test_the_tokenizer_of_an_upload_that_ends_meanwhile_is_passed_over(
    looks: int, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = run / "hub" / "me%2Fmodel@main" / "step-000000002" / "files" / "tokenizer.json"
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    looked: list[Path] = []

    def is_due(path: Path) -> bool:
        looked.extend([path] if path == file else [])
        return len(looked) == looks

    right_after(monkeypatch, Path, "stat", lambda: shutil.rmtree(file.parents[1]), is_due)
    assert tokenizer_of(run).pieces([7]) == ["⟨7⟩"]
    assert not file.exists()
