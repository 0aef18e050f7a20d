"""Pages that bring themselves up to date in a real Chromium.

1. Whoever looks at a page knows whether it is up to date: without an answer the lamp is off and a line says since when, until there is one.
2. Everything that a page says of something that goes on is brought up to date: states, evaluations, pages of lists.
3. Nothing is taken from under a reader: what somebody chose or scrolled to stays, and a list waits to be asked.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Route, expect

from groupwise.runs.store import Store
from tests.integration.web.visiting import (
    TIMEOUT_MS,
    Visitor,
    going_on,
    is_live,
    needs_chromium,
    shown,
    take_steps,
)
from tests.web_runs import evaluation_of

pytestmark = needs_chromium
Visit = Callable[..., Visitor]


def test_a_page_without_an_answer_or_a_stream_says_so_until_there_is_one(
    visit: Visit, tmp_path: Path
) -> None:
    with going_on(tmp_path / "runs") as path, shown(path.parent) as address:
        visitor = visit(address)
        page = visitor.page
        asked = 0

        def refuse(route: Route) -> None:
            nonlocal asked
            asked += 1
            if asked < 3:
                route.fulfill(status=502, body="a proxy")
            else:
                route.continue_()

        page.route("**/live?run=live", refuse)
        visitor.goes("/runs/live")
        expect(page.locator("#live")).to_have_text("not live")
        is_live(page)
        assert asked == 3
        moved = tmp_path / "away"
        path.rename(moved)
        line = page.get_by_text(re.compile(r"No answer since \d\d:\d\d: there is no run"))
        expect(line).to_be_visible(timeout=TIMEOUT_MS)
        expect(page.locator("#live")).to_have_text("not live")
        expect(page.locator(".progress")).to_contain_text("1 of 50 steps")
        take_steps(moved, 1)
        moved.rename(path)
        expect(page.locator("#away")).to_be_empty(timeout=2 * TIMEOUT_MS)
        expect(page.locator(".progress")).to_contain_text("2 of 50 steps", timeout=TIMEOUT_MS)
        expect(page.locator("#live.on")).to_be_visible(timeout=2 * TIMEOUT_MS)


def test_pages_follow_a_run_through_its_states(visit: Visit, tmp_path: Path) -> None:
    with going_on(tmp_path) as path, shown(tmp_path) as address:
        first = visit(address).page
        pages = [first, *(first.context.new_page() for _ in range(2))]
        run, rollouts, evaluations = pages
        for page, end in zip(pages, ("", "/rollouts", "/evaluations"), strict=True):
            page.goto(f"{address}/runs/live{end}")
            expect(page.locator(".title .state")).to_have_text("running")
            is_live(page)
        expect(run.locator(".progress")).to_contain_text("1 of 50 steps")
        expect(rollouts.locator(".rollout")).to_have_count(8)
        take_steps(path, 1, 2, 3)
        expect(run.locator(".progress")).to_contain_text("4 of 50 steps", timeout=TIMEOUT_MS)
        expect(rollouts.get_by_role("link", name="after →")).to_be_visible(timeout=TIMEOUT_MS)
        expect(rollouts.locator(".rollout")).to_have_count(30)
        rows = evaluations.locator("#evaluations tbody tr")
        lines = evaluations.locator(".u-legend .u-series:not(.edge)")
        expect(lines).to_have_count(3)
        with Store.open(path / "run.db") as store:
            store.add_evaluation(evaluation_of("live", 3, 0.7))
        expect(rows).to_have_count(3, timeout=TIMEOUT_MS)
        expect(lines).to_have_count(4, timeout=TIMEOUT_MS)
        expect(rows.last.locator("input").last).to_be_checked()
        rows.nth(1).locator("input").last.check()
        with Store.open(path / "run.db") as store:
            store.add_evaluation(evaluation_of("live", 4, 0.8))
            store.set_meta({"state": "finished"})
        expect(rows).to_have_count(4, timeout=TIMEOUT_MS)
        expect(rows.nth(1).locator("input").last).to_be_checked()
        for page in pages:
            expect(page.locator(".title .state")).to_have_text("finished", timeout=TIMEOUT_MS)


def test_rollouts_do_not_move_under_their_reader(visit: Visit, tmp_path: Path) -> None:
    with going_on(tmp_path, 3) as path, shown(path.parent) as address:
        page = visit(address).goes("/runs/live/rollouts")
        is_live(page)
        take_steps(path, 3)
        expect(page.locator(".rollout header a").first).to_have_text(
            "Rollout 4 of group 8", timeout=TIMEOUT_MS
        )
        before = page.evaluate(
            """() => {
                const there = document.querySelectorAll(".rollout");
                scrollTo(0, there[5].offsetTop);
                return there[6].getBoundingClientRect().top;
            }"""
        )
        for step, new in ((4, 8), (5, 16)):
            take_steps(path, step)
            more = page.get_by_role("button", name=f"{new} new rollouts")
            expect(more).to_be_visible(timeout=TIMEOUT_MS)
        top = "element => element.getBoundingClientRect().top"
        assert page.locator(".rollout").nth(6).evaluate(top) == pytest.approx(before, abs=2)
        more.click()
        expect(page.locator(".rollout header a").first).to_have_text("Rollout 4 of group 12")
        expect(page.locator(".rollout").first).to_be_in_viewport()
        expect(page.locator(".news")).to_have_count(0)
