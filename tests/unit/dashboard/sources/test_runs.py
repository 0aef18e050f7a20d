"""The list of runs: read once, again where a record has changed, and right about what lives."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from groupwise.dashboard.sources import runs as module
from groupwise.dashboard.sources.runs import RunsIndex
from groupwise.runs.find import ENDS, mean_of, reward_ends
from groupwise.runs.lock import RunLock
from groupwise.runs.store import Store
from tests.unit.dashboard.dashboard_client import asking
from tests.web_runs import add_step, write_run


def names(index: RunsIndex) -> dict[str, tuple[str | None, int]]:
    return {
        each.info.name: (each.info.state, each.info.steps) for each in index.all_runs(10.0).runs
    }


def test_only_what_has_changed_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        write_run(tmp_path / name, 2)
    index, read, seen = RunsIndex(tmp_path), module.read_entry, []

    def noted(path: Path, stamp: module.Stamp) -> module.RunEntry:
        seen.append(path.name)
        return read(path, stamp)

    monkeypatch.setattr(module, "read_entry", noted)
    assert names(index) == {"one": ("finished", 2), "two": ("finished", 2)}
    assert names(index) == names(index)
    assert sorted(seen) == ["one", "two"]
    with Store.open(tmp_path / "two" / "run.db") as store:
        add_step(store, 2)
        assert names(index)["two"] == ("finished", 3), "while it is written to"
    assert seen.count("one") == 1
    shutil.rmtree(tmp_path / "one")
    assert set(names(index)) == {"two"}


def test_whether_a_process_works_on_it_is_asked_each_time(tmp_path: Path) -> None:
    path = write_run(tmp_path / "one", 1, state="running")
    index = RunsIndex(tmp_path)
    assert names(index)["one"][0] == "crashed"
    held = RunLock.acquire(path)
    assert names(index)["one"][0] == "running"
    held.release()
    assert names(index)["one"][0] == "crashed"


def test_unreadable_runs_are_listed_last(tmp_path: Path) -> None:
    write_run(tmp_path / "fine", 1)
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "run.db").write_bytes(os.urandom(5000))
    os.mkdir(os.fsencode(tmp_path) + b"/caf\xe9")
    found = RunsIndex(tmp_path).all_runs(10.0).runs
    assert [each.info.name for each in found] == ["fine", "caf\ufffd", "empty", "odd"]
    assert [bool(each.info.broken) for each in found] == [False, True, True, True]
    assert RunsIndex(tmp_path / "nowhere").all_runs().runs == ()


def test_the_ends_of_long_curves_are_those_of_the_whole(tmp_path: Path) -> None:
    for steps in (1, 2, 3, 9, 10, 11, 40):
        path = write_run(tmp_path / str(steps), steps)
        with Store.open(path / "run.db", readonly=True) as store:
            whole = [value for _, value in store.metrics(["reward"])["reward"]]
            ends = tuple(map(mean_of, store.curve_ends("reward", ENDS)))
            assert ends == reward_ends(whole), steps
            assert store.curve_ends("none", ENDS) == ([], [])


def test_one_folder_that_cannot_be_read_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c", "d"):
        write_run(tmp_path / name, 1)
    is_file, info_and = Path.is_file, module.run_info_and

    def forbidden(path: Path) -> bool:
        if path.parent.name == "a":
            raise PermissionError(13, "Permission denied")
        return is_file(path)

    def odd(path: Path, look: Any) -> Any:
        if path.name == "b":
            raise RuntimeError("nobody thought of this")
        return info_and(path, look)

    monkeypatch.setattr(Path, "is_file", forbidden)
    monkeypatch.setattr(module, "run_info_and", odd)
    found = {each.info.name: each.info.broken for each in RunsIndex(tmp_path).all_runs(10.0).runs}
    assert (found["c"], found["d"]) == (None, None)
    assert "Permission denied" in (found["a"] or "")
    assert found["b"] == "RuntimeError: nobody thought of this"


async def test_odd_facts_of_a_run_take_no_page_down(tmp_path: Path) -> None:
    for number, odd in enumerate(("yesterday", float("nan"), 1e20, -1.0, [1])):
        facts = {"created_at": odd, "model": odd, "task": [odd]}
        write_run(tmp_path / "runs" / f"odd-{number}", 1, facts=facts)
    write_run(tmp_path / "runs" / "fine", 1)
    async with asking(tmp_path / "runs") as client:
        odd_pages = [f"/runs/odd-{number}" for number in range(5)]
        for page in ("/runs", "/evaluations", *odd_pages, "/runs/fine/examples/0", "/runs?q=odd"):
            assert (await client.get(page)).status_code == 200, page
        [first] = (await client.get("/runs?q=fine&format=json")).json()["runs"]
    assert first["name"] == "fine"
