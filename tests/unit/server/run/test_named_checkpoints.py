"""Checkpoints that are saved by name while the run goes on, and deletes its own."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from groupwise.api.schemas.keys import LOCAL
from groupwise.api.schemas.problems import Refusal
from groupwise.core.errors import StoreError
from groupwise.runs import checkpoints
from groupwise.server.run import named_checkpoints
from groupwise.server.run.checkpoints import Checkpoints
from groupwise.server.run.named_checkpoints import NamedCheckpoints
from tests.meanwhile import right_after

ROW: Any = SimpleNamespace(run="toy", folder="runs/toy", settings={"seed": 1})


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    def fill(folder: Path) -> None:
        (folder / "deep").mkdir()
        (folder / "deep" / "weights").write_bytes(b"w")

    return checkpoints.save(tmp_path / "runs" / "toy" / "checkpoints", 3, fill).path


def test_all_files_are_kept_and_found_again(tmp_path: Path, saved: Path) -> None:
    named = NamedCheckpoints(tmp_path)
    assert named.keep("mine", saved, ROW, LOCAL).step == 3
    shutil.rmtree(saved)
    found = named.find("mine")
    assert found is not None
    assert (found.run, found.step, found.settings) == ("toy", 3, {"seed": 1})
    checkpoints.read(found.folder).verify()
    assert [each.name for each in named.list_checkpoints()] == ["mine"]


def test_one_that_is_pruned_while_it_is_kept_is_not_kept_in_part(
    tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = NamedCheckpoints(tmp_path)
    right_after(monkeypatch, checkpoints, "read", lambda: shutil.rmtree(saved))
    with pytest.raises(StoreError):
        named.keep("mine", saved, ROW, LOCAL)
    assert (named.find("mine"), list(named.list_checkpoints())) == (None, [])


async def test_the_newest_one_is_kept_if_the_first_was_pruned_meanwhile(
    tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints.save(saved.parent, 2, lambda folder: None)

    async def do(*_: object) -> None:
        pass

    active_run: Any = SimpleNamespace(
        config=SimpleNamespace(folder=tmp_path), any_run=lambda: ROW, conductor=None,
        changed=SimpleNamespace(notify=lambda: None),
    )  # fmt: skip
    server_checkpoints = Checkpoints(active_run, cast("Any", SimpleNamespace(do=do)))
    right_after(monkeypatch, checkpoints, "read", lambda: shutil.rmtree(saved))
    assert (await server_checkpoints.save("mine", LOCAL)).step == 2


def test_a_name_that_another_request_takes_meanwhile_is_refused(
    tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = NamedCheckpoints(tmp_path)
    right_after(
        monkeypatch, named_checkpoints.checkpoints, "read",
        lambda: named.keep("mine", saved, ROW, LOCAL),
    )  # fmt: skip
    with pytest.raises(Refusal) as refused:
        named.keep("mine", saved, ROW, LOCAL)
    assert refused.value.code == "checkpoint_exists"


def test_one_that_is_deleted_while_it_is_looked_for_is_not_found(
    tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = NamedCheckpoints(tmp_path)
    named.keep("mine", saved, ROW, LOCAL)
    shutil.rmtree(tmp_path / "checkpoints" / "mine")
    monkeypatch.setattr(Path, "is_file", lambda _: True)  # as before it was deleted
    assert named.find("mine") is None
    assert named.saved_by_request("mine", LOCAL) is None
