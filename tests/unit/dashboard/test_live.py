"""The events that make open pages reload."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from groupwise.api.schemas.problems import Refusal
from groupwise.dashboard.access import AccessControl
from groupwise.dashboard.context import DashboardContext
from groupwise.dashboard.live import Streams, stamp_function
from groupwise.dashboard.sources.runs import RunsIndex
from groupwise.runs.store import Store
from tests.web_runs import add_step, write_run


def request_with(query: str) -> Request:
    scope: dict[str, Any] = {"type": "http", "query_string": query.encode(), "headers": []}
    return Request(scope)


def test_a_run_is_new_after_a_step_and_after_an_evaluation_beside_it(tmp_path: Path) -> None:
    path = write_run(tmp_path / "one", 2)
    write_run(tmp_path / "two", 2)
    look = stamp_function(
        DashboardContext(RunsIndex(tmp_path), AccessControl(None)), request_with("run=one&run=two")
    )
    seen = [look()]
    assert look() == seen[0]
    with Store.open(path / "run.db") as store:
        add_step(store, 2)
    seen.append(look())
    (path / "results").mkdir()
    (path / "results" / "held-out.json").write_text("{}")
    seen.append(look())
    assert look() == seen[-1]
    assert all(one != other for one, other in pairwise(seen))


@pytest.mark.parametrize("place", ["one/results", "../results", "."])
def test_evaluations_are_new_once_a_result_is_there(tmp_path: Path, place: str) -> None:
    runs = tmp_path / "runs"
    write_run(runs / "one", 2)
    now = [0.0]
    look = stamp_function(
        DashboardContext(RunsIndex(runs, lambda: now[0]), AccessControl(None)), request_with("")
    )
    before = look()
    now[0] += 10
    assert look() == before
    folder = runs / place
    folder.mkdir(exist_ok=True)
    (folder / "held-out.json").write_text("{}")
    now[0] += 10
    assert look() != before


def test_only_so_many_pages_are_followed_at_once() -> None:
    streams = Streams(2)
    streams.acquire()
    streams.acquire()
    with pytest.raises(Refusal, match="close some"):
        streams.acquire()
    streams.release()
    streams.acquire()
