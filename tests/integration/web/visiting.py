"""A dashboard, its visitors in a real Chromium, and a run that goes on meanwhile."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, ViewportSize, expect

from groupwise.api.schemas.keys import Keyring
from groupwise.dashboard.access import AccessControl
from groupwise.dashboard.app import make_app
from groupwise.dashboard.context import DashboardContext
from groupwise.dashboard.sources.cached_values import ending
from groupwise.dashboard.sources.fleet import WatchedFleet
from groupwise.dashboard.sources.runs import RunsIndex
from groupwise.jobs.fleet.local import LocalFleet
from groupwise.runs.lock import RunLock
from groupwise.runs.store import Store
from tests.fake_openai_server import listening
from tests.web_runs import add_step, write_run

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
TIMEOUT_MS = 15_000
LONG_NAME = "third-of-qwen2.5-1.5b-instruct-on-gsm8k-with-lr-1e-5-and-seed-3"
"""Of a run."""
PHONE: ViewportSize = {"width": 390, "height": 844}
TABLET: ViewportSize = {"width": 768, "height": 1024}
DESK: ViewportSize = {"width": 1280, "height": 900}


@contextmanager
def shown(
    runs: Path, keys: Keyring | None = None, fleet: LocalFleet | None = None
) -> Iterator[str]:
    watched = None if fleet is None else WatchedFleet(fleet)
    place = DashboardContext(RunsIndex(runs), AccessControl(keys, allow_actions=True), watched)
    with (
        nullcontext() if watched is None else ending(watched),
        listening(make_app(place)) as address,
    ):
        yield address
        place.ending.set()


class Visitor:
    """A page, and what went wrong in it."""

    def __init__(self, page: Page, address: str) -> None:
        self.page, self.address = page, address
        self.wrong: list[str] = []
        page.set_default_timeout(TIMEOUT_MS)
        page.on("pageerror", lambda error: self.wrong.append(str(error)))
        page.on("console", self._heard)

    def _heard(self, message: Any) -> None:
        away = "Failed to load resource" in message.text or "net::" in message.text
        if message.type in ("error", "warning") and not away:
            self.wrong.append(message.text)

    def goes(self, path: str) -> Page:
        answer = self.page.goto(self.address + path)
        assert answer is None or answer.status < 500, f"{path}: {answer.status} {answer.text()}"
        return self.page


@contextmanager
def going_on(folder: Path, steps: int = 1, name: str = "live") -> Iterator[Path]:
    """A run that a process, this one, works on."""
    path = write_run(folder / name, steps, state="running", facts={"max_steps": 50})
    lock = RunLock.acquire(path)
    try:
        yield path
    finally:
        lock.release()


def take_steps(path: Path, *steps: int) -> None:
    with Store.open(path / "run.db") as store:
        for step in steps:
            add_step(store, step)


def is_live(page: Page) -> None:
    expect(page.locator("#live.on")).to_be_visible(timeout=TIMEOUT_MS)


def serious_in(page: Page) -> list[tuple[str, str]]:
    """What axe finds that keeps somebody out: the rule, and where."""
    return [
        (each["id"], each["nodes"][0]["html"][:200])
        for each in Axe().run(page).response["violations"]
        if each["impact"] in ("serious", "critical")
    ]


def too_wide(page: Page) -> bool:
    """Whether it, or a table in it, has to be scrolled sideways."""
    return page.evaluate(
        "[document.documentElement, ...document.querySelectorAll('.scroll')].some(each => each.scrollWidth > each.clientWidth)"
    )
