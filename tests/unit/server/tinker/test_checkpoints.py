"""Named checkpoints: listed, expired at their time, and deleted; with the fake engine's real files."""

from __future__ import annotations

import shutil
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from groupwise.server.engine.saved_adapters import NOTE, SavedFolders
from groupwise.server.engine.tinker_protocol import Stored
from tests.meanwhile import right_after
from tests.unit.server.tinker.test_routes import Asking


@pytest.fixture
async def asking(tmp_path: Path) -> AsyncGenerator[Asking]:
    asking = Asking(tmp_path)
    await asking.service.open()
    yield asking
    await end(asking)


async def end(asking: Asking) -> None:
    await asking.service.close()
    await asking.http.aclose()
    await asking.ledger.close()


class Saving:
    """A model whose calls are numbered."""

    def __init__(self, asking: Asking, model: str) -> None:
        self.asking, self.model, self.calls = asking, model, 0

    async def save(self, name: str, route: str = "save_weights", **body: Any) -> Any:
        self.calls += 1
        promise = await self.asking.post(
            route, model_id=self.model, seq_id=self.calls, path=name, **body
        )
        return await self.asking.result(promise)

    async def ids(self) -> list[str]:
        return [each["checkpoint_id"] for each in await self.listed()]

    async def listed(self) -> list[Any]:
        answer = await self.asking.http.get(f"training_runs/{self.model}/checkpoints")
        return answer.json()["checkpoints"]

    def folder(self, id: str) -> Path:
        return self.asking.engine.folder / self.model.replace(":", "_") / id

    async def sampler(self, path: str) -> str:
        body = {"session_id": self.model.partition(":")[0], "sampling_session_seq_id": 77}
        made = await self.asking.post("create_sampling_session", **body, model_path=path)
        return made["sampling_session_id"]

    async def sample(self, sampler: str) -> Any:
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
        body = {"sampling_session_id": sampler, "seq_id": 1, "prompt": prompt}
        settings = {"max_tokens": 2}
        promise = await self.asking.post("asample", **body, sampling_params=settings)
        return (await self.asking.poll(promise)).content


async def test_checkpoints_expire_and_a_restart_forgets_nothing(
    asking: Asking, tmp_path: Path
) -> None:
    saving = Saving(asking, await asking.model())
    await saving.save("a", ttl_seconds=100, user_metadata={"step": "1"})
    await saving.save("a", "save_weights_for_sampler", ttl_seconds=3600)
    await saving.save("b")
    first = (await saving.listed())[0]
    assert first["expires_at"] == "2020-09-13T12:28:20Z", "1.6e9 seconds and a hundred"
    assert (first["checkpoint_type"], first["user_metadata"]) == ("training", {"step": "1"})
    assert first["tinker_path"] == f"tinker://{saving.model}/weights/a"
    asking.date += 101
    assert await saving.ids() == ["sampler_weights/a", "weights/b"]
    load = {"path": first["tinker_path"], "optimizer": False}
    saving.calls += 1
    promise = await asking.post("load_weights", model_id=saving.model, seq_id=saving.calls, **load)
    assert "has expired" in (await asking.result(promise))["error"]
    await asking.post("weights_info", 404, tinker_path=first["tinker_path"])
    await end(asking)
    unfinished = [saving.folder(f"weights/{name}") for name in (".building-c-1-1", ".removing-d-1")]
    for folder in unfinished:  # of an engine that was killed
        shutil.copytree(saving.folder("weights/b"), folder)

    again = Asking(tmp_path)
    again.date = asking.date
    await again.service.open()
    await again.service.checkpoints.remove_expired()
    assert not saving.folder("weights/a").exists()
    assert not any(folder.exists() for folder in unfinished)
    saving.asking = again
    again.date += 3600
    assert await saving.ids() == ["weights/b"]
    await again.service.checkpoints.remove_expired()
    assert not saving.folder("sampler_weights/a").exists()
    assert saving.folder("weights/b").exists()
    await end(again)


async def test_weights_that_a_sampler_uses_are_removed_when_its_session_has_ended(
    asking: Asking,
) -> None:
    saving = Saving(asking, await asking.model())
    path = (await saving.save("a", "save_weights_for_sampler", ttl_seconds=100))["path"]
    sampler = await saving.sampler(path)
    address = f"training_runs/{saving.model}/checkpoints/sampler_weights/a"
    assert (await asking.http.delete(address)).status_code == 200
    assert await saving.ids() == []
    assert (await asking.http.delete(address)).status_code == 404
    assert b"error" not in await saving.sample(sampler)
    again = await saving.save("a", "save_weights_for_sampler")
    assert "still uses it" in again["error"]
    await asking.post(f"sessions/{saving.model.partition(':')[0]}/finish")
    await asking.service.checkpoints.remove_expired()
    assert not saving.folder("sampler_weights/a").exists()


async def test_the_time_to_live_is_set_and_taken_away(asking: Asking) -> None:
    saving = Saving(asking, await asking.model())
    await saving.save("a", ttl_seconds=100, user_metadata={"note": "x"})
    address = f"training_runs/{saving.model}/checkpoints/weights/a/ttl"
    assert (await asking.http.put(address, json={"ttl_seconds": None})).status_code == 200
    asking.date += 1000
    (checkpoint,) = await saving.listed()
    assert ("expires_at" in checkpoint, checkpoint["user_metadata"]) == (False, {"note": "x"})
    assert (await asking.http.put(address, json={"ttl_seconds": 5})).status_code == 200
    asking.date += 5
    assert await saving.ids() == []
    assert (await saving.save("a", overwrite=False))["path"], "the name is free again"
    assert not (saving.folder("weights/a") / NOTE).exists()
    for wrong in (0, -1, 1.5, "1", 10**10):
        assert (await asking.http.put(address, json={"ttl_seconds": wrong})).status_code == 400
    nothing = address.replace("/a/ttl", "/b/ttl")
    assert (await asking.http.put(nothing, json={"ttl_seconds": 5})).status_code == 404


async def test_weights_saved_over_expired_ones_are_not_removed_with_them(asking: Asking) -> None:
    saving = Saving(asking, await asking.model())
    await saving.save("a", ttl_seconds=100)
    checkpoints = asking.service.checkpoints
    stored = Stored(saving.model, "weights", "a")
    async with checkpoints.saving(stored, None, None):
        asking.date += 101  # expires while the new weights are written
        await checkpoints.remove_expired()
    assert await saving.ids() == ["weights/a"]


async def test_lists_have_pages_and_the_disk_is_accounted_for(asking: Asking) -> None:
    saving = Saving(asking, await asking.model())
    for name in ("a", "b", "c"):
        await saving.save(name)
    answer = (await asking.http.get("checkpoints?limit=2&offset=1")).json()
    assert [each["checkpoint_id"] for each in answer["checkpoints"]] == ["weights/b", "weights/a"]
    assert answer["cursor"] == {"offset": 1, "limit": 2, "total_count": 3}
    for wrong in ("limit=0", "offset=-1", "limit=x", "of=me"):
        refused = await asking.http.get(f"checkpoints?{wrong}")
        assert (refused.status_code, wrong.split("=")[0] in refused.text) == (400, True)
    (use,) = (await asking.http.get("billing/usage/checkpoints/current")).json()["data"]
    assert (use["checkpoint_count"], use["size_bytes"] > 0) == (3, True)


async def test_addresses_cannot_leave_the_folder(asking: Asking, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    for address in ("..%2F../checkpoints/weights/a", "%2E%2E/checkpoints/weights/%2E%2E", "a/checkpoints/outside/a"):  # fmt: skip
        answer = await asking.http.delete(f"training_runs/{address}")
        assert answer.status_code in (400, 404)
    assert outside.exists()
    response = await asking.http.get("training_runs/%2E%2E/checkpoints")
    assert response.status_code == 400, response.text


async def test_two_requests_that_delete_at_the_same_time_find_it_or_nothing(
    asking: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = Saving(asking, await asking.model())
    await saving.save("a")
    folder = saving.folder("weights/a")
    right_after(monkeypatch, SavedFolders, "read_note", lambda: shutil.rmtree(folder))
    address = f"training_runs/{saving.model}/checkpoints/weights/a"
    assert (await asking.http.delete(address)).status_code == 404


async def test_an_expiry_that_is_taken_away_while_the_files_are_removed_does_not_end_the_sweep(
    asking: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = Saving(asking, await asking.model())
    await saving.save("a", ttl_seconds=5)
    asking.date += 5
    checkpoints = asking.service.checkpoints
    expiries = checkpoints._expires_at  # pyright: ignore[reportPrivateUsage]
    right_after(monkeypatch, SavedFolders, "forget", expiries.clear)
    await checkpoints.remove_expired()
    assert not saving.folder("weights/a").exists()
