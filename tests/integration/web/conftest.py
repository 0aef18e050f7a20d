"""One Chromium and one dashboard of the same runs for all files; tests that need others start them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, sync_playwright

from groupwise.runs import checkpoints
from groupwise.runs.records import EvaluationRecord
from groupwise.runs.store import Store
from tests.integration.web.visiting import CHROMIUM, DESK, LONG_NAME, Visitor, shown
from tests.unit.dashboard.test_fleet import local, migrated_file, small
from tests.web_runs import HOSTILE, write_run

__all__ = ["local", "migrated_file", "small"]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with sync_playwright() as player:
        started = player.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., Visitor]]:
    """Somebody comes to an address; in the browsers of all who came nothing may have gone wrong."""
    visitors: list[Visitor] = []

    def begin(address: str, **how: Any) -> Visitor:
        context = browser.new_context(viewport=how.pop("viewport", DESK), **how)
        visitors.append(Visitor(context.new_page(), address))
        return visitors[-1]

    yield begin
    wrong = [each for visitor in visitors for each in visitor.wrong]
    for each in visitors:
        each.page.context.close()
    assert wrong == []


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A dashboard of four runs: one has a long name, one is made of hostile texts."""
    folder = tmp_path_factory.mktemp("runs")
    for name, steps in (("first", 30), ("second", 20), (LONG_NAME, 4)):
        write_run(folder / name, steps)
    hostile = write_run(
        folder / "hostile", 3, write=lambda *_: HOSTILE, facts={"task": HOSTILE[:80]}
    )
    (hostile / "config.json").write_text(json.dumps({"task": {HOSTILE: HOSTILE}}))
    (hostile / "log.txt").write_text(HOSTILE.encode("utf-8", "replace").decode())
    answer = {"example": 0, "sample": 0, "prompt": HOSTILE, "completion": HOSTILE, "reward": 1.0}
    rows = (answer | {"parts": {HOSTILE: 1.0}, "outcome": "scored", "tokens": 9},)
    with Store.open(hostile / "run.db") as store:
        for step in (1, 2):
            store.add_evaluation(
                EvaluationRecord(step, HOSTILE[:60], HOSTILE, {"reward": 1.0}, rows)
            )
    for name in ("first", "hostile"):
        checkpoints.save(folder / name / "checkpoints", 2, _fill)
    with shown(folder) as address:
        yield address


def _fill(checkpoint: Path) -> None:
    (checkpoint / "adapter.safetensors").write_bytes(b"weights")
    (checkpoint / "<img src=x onerror=document.title='owned'>").write_bytes(b"x")
