"""Plots in a real Chromium.

1. A legend says what each line is, not what is drawn: in a stack its own part, beside others of the same step.
2. What stands out is shown, in a spread and among many runs too, and a chosen range is asked for in finer columns.
3. What is new comes into the plot that is there: its range, its hidden lines and the cursor stay.
4. Lines can be told apart, read without seeing them, and hidden by keyboard.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from playwright.sync_api import Locator, Page, expect

from groupwise.runs.records import EvaluationRecord, StepRecord
from groupwise.runs.store import Store
from tests.integration.web.test_browser import SOON, Visitor, browser, pytestmark, shown, visit
from tests.integration.web.test_live import going_on, is_live
from tests.web_runs import write_run

__all__ = ["browser", "pytestmark", "visit"]


def add_metrics(path: Path, steps: Sequence[Mapping[str, float]]) -> None:
    """One step each, without rollouts."""
    with Store.open(path / "run.db") as store:
        last = store.last_step()
        for step, metrics in enumerate(steps, 0 if last is None else last + 1):
            store.commit_step(
                StepRecord(step, step, step + 1, f"w{step}", (), 0.01, 1.7e9), [], metrics
            )


def chart(page: Page, title: str) -> Locator:
    found = page.locator("figure.chart").filter(has=page.locator("b", has_text=title))
    expect(found.locator("canvas")).to_be_visible(timeout=SOON)
    return found


def point(plot: Locator, share: float) -> None:
    """To this place of its width."""
    over = plot.locator(".u-over")
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    assert box is not None
    plot.page.mouse.move(box["x"] + share * (box["width"] - 1), box["y"] + box["height"] / 2)


def drag(plot: Locator, begin: float, end: float) -> None:
    point(plot, begin)
    plot.page.mouse.down()
    point(plot, (begin + end) / 2)
    point(plot, end)
    plot.page.mouse.up()


def legend(plot: Locator) -> dict[str, str]:
    rows = plot.locator(".u-legend .u-series").all()
    return {
        (row.locator("th").text_content() or ""): row.locator("td").text_content() or ""
        for row in rows
    }


def legend_at(plot: Locator, share: float) -> dict[str, str]:
    point(plot, share)
    return legend(plot)


# --- 1: what a legend says -------------------------------------------------------------------------


def test_a_part_of_a_stack_says_its_own_value(
    visit: Callable[..., Visitor], tmp_path: Path
) -> None:
    path = write_run(tmp_path / "odd", 0)
    times = [
        {"rollouts/failed": 2.0, "rollouts/timed_out": 0.0, "time/sampling": 10.0 + step}
        | ({"time/publishing": 100.0 + step} if step > 1 else {})
        for step in range(4)
    ]
    add_metrics(path, times)
    with shown(tmp_path) as address:
        visitor = visit(address)
        page = visitor.page
        visitor.goes("/runs/odd")
        failed = chart(page, "Rollouts without a score")
        point(failed, 1.0)
        assert legend(failed) == {"step": "3", "failed": "2", "timed out": "0"}
        tops = failed.locator(".u-cursor-pt").evaluate_all(
            "points => points.map(each => each.getBoundingClientRect()).map(each => each.top + each.height / 2)"
        )
        over = failed.locator(".u-over").bounding_box()
        assert over is not None
        assert all(0.75 < 1 - (top - over["y"]) / over["height"] < 0.98 for top in tops), (
            "the axis begins at 0"
        )
        time = chart(page, "Where the time went")
        point(time, 1.0)
        assert legend(time) == {"step": "3", "sampling": "13", "publishing": "103"}
        point(time, 0.0)
        assert legend(time) == {"step": "0", "sampling": "10", "publishing": "–"}
        assert visitor.wrong == []


def test_a_spread_belongs_to_its_own_step(visit: Callable[..., Visitor], tmp_path: Path) -> None:
    path = write_run(tmp_path / "odd", 0)
    add_metrics(
        path,
        [{"reward": 1.0} | ({"reward_std": step / 10} if step > 1 else {}) for step in range(4)],
    )
    with shown(tmp_path) as address:
        visitor = visit(address)
        visitor.goes("/runs/odd")
        reward = chart(visitor.page, "Reward")
        point(reward, 1.0)
        assert legend(reward) == {"step": "3", "reward": "1", "+ spread": "1.3", "− spread": "0.7"}
        point(reward, 0.0)
        assert legend(reward) == {"step": "0", "reward": "1", "+ spread": "–", "− spread": "–"}


# --- 2: what stands out ----------------------------------------------------------------------------


def long_run(path: Path, steps: int = 2100) -> list[dict[str, float]]:
    """One step of it earns far more, and none near it."""
    metrics = [{"reward": 0.5, "reward_std": 0.01} for _ in range(steps)]
    metrics[1000]["reward"] = 9.0
    add_metrics(path, metrics)
    return metrics


def test_what_stands_out_of_a_spread_is_shown_and_looked_at_closely(
    visit: Callable[..., Visitor], tmp_path: Path
) -> None:
    long_run(write_run(tmp_path / "long", 0))
    with shown(tmp_path) as address:
        visitor = visit(address)
        page = visitor.page
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        visitor.goes("/runs/long")
        reward = chart(page, "Reward")
        told = [
            at_place for share in range(470, 484) if (at_place := legend_at(reward, share / 1000))
        ]
        highest = next(each for each in told if each["highest"] == "9")
        assert highest["lowest"] == "0.5"
        assert float(highest["reward"]) < 4
        assert not any("from=" in url for url in asked)
        for begin, end in ((0.4, 0.6), (0.3, 0.5)):
            with page.expect_response(lambda answer: "from=" in answer.url):
                drag(reward, begin, end)
        near = [url for url in asked if "from=" in url]
        assert re.search(r"from=8\d\d&to=1[23]\d\d", near[0])
        assert re.search(r"from=9\d\d&to=10\d\d", near[-1])
        seen = {legend_at(reward, share / 100)["reward"] for share in range(101)}
        assert "9" in seen, "the very step"
        reward.locator(".u-over").dblclick()
        point(reward, 1.0)
        assert int(float(legend(reward)["step"])) > 2000
        assert visitor.wrong == []


def test_many_runs_show_what_stands_out_and_can_be_told_apart(
    visit: Callable[..., Visitor], tmp_path: Path
) -> None:
    names = [f"run-{number:02}" for number in range(12)]
    for name in names:
        path = write_run(tmp_path / name, 0)
        add_metrics(path, [{"reward": float(step == 700)} for step in range(1450)])
    with shown(tmp_path) as address:
        visitor = visit(address)
        page = visitor.page
        visitor.goes("/compare?" + "&".join(f"run={name}" for name in names))
        plot = chart(page, "reward")
        point(plot, 700 / 1449)
        told = plot.locator(".u-legend .u-series")
        expect(told.locator("visible=true").locator("th")).to_have_count(13)
        assert plot.locator(".u-series.edge-of-many").count() == 24
        assert set(plot.locator(".u-series.edge-of-many td").all_text_contents()) == {"0", "1"}
        marks = "rows => rows.map(row => getComputedStyle(row.querySelector('.u-marker')).border)"
        lines = plot.locator(".u-series:not(.edge-of-many)").evaluate_all(
            marks.replace("rows.map", "rows.slice(1).map")
        )
        assert len(set(lines)) == 12
        swatches = page.locator("#runs .swatch line").evaluate_all(
            "lines => lines.map(getComputedStyle).map(each => each.stroke + each.strokeDasharray)"
        )
        assert len(set(swatches)) == 12
        box = plot.locator(".u-legend").bounding_box()
        table = page.locator("#runs").bounding_box()
        assert box is not None
        assert table is not None
        assert box["y"] + box["height"] <= table["y"], "the legend has room"
        assert visitor.wrong == []


# --- 3: what is new --------------------------------------------------------------------------------


def test_range_cursor_and_hidden_lines_stay_while_a_run_goes_on(
    visit: Callable[..., Visitor], tmp_path: Path
) -> None:
    with going_on(tmp_path, 0) as path:
        parts = {"completions/mean_length": 4.0, "completions/min_length": 1.0}
        add_metrics(path, [{**parts, "completions/max_length": float(n)} for n in range(40)])
        with shown(tmp_path) as address:
            visitor = visit(address)
            page = visitor.page
            visitor.goes("/runs/live")
            is_live(page)
            plot = chart(page, "Completion length")
            plot.locator("canvas").evaluate("canvas => { canvas.mine = true; }")
            plot.get_by_role("button", name="shortest").click()
            drag(plot, 10 / 39, 30 / 39)
            point(plot, 0.0)
            before = legend(plot)
            assert before["step"] == "10"
            add_metrics(path, [{**parts, "completions/max_length": 100.0}])
            expect(page.locator("body")).to_have_attribute("data-refreshed", "1", timeout=SOON)
            last = plot.locator("canvas")
            expect(last).to_have_attribute("aria-label", containing("longest: first 0, last 100"))
            assert legend(plot) == before
            assert last.evaluate("canvas => canvas.mine"), "it is the same plot"
            expect(plot.locator(".u-series.u-off")).to_have_count(1)
            point(plot, 1.0)
            assert legend(plot)["step"] in ("29", "30"), "as near as a pixel is"
            plot.locator(".u-over").dblclick()
            point(plot, 1.0)
            assert legend(plot)["longest"] == "100"
            assert visitor.wrong == []


def containing(text: str) -> re.Pattern[str]:
    return re.compile(f".*{re.escape(text)}.*")


# --- 4: without a mouse, without eyes --------------------------------------------------------------


def test_a_plot_is_told_and_its_lines_are_hidden_by_keyboard(
    visit: Callable[..., Visitor], tmp_path: Path
) -> None:
    path = write_run(tmp_path / "one", 0)
    add_metrics(path, [{"reward": n / 4, "reward_std": 0.1} for n in (1, 4, 0, 2)])
    with shown(tmp_path) as address:
        visitor = visit(address)
        page = visitor.page
        visitor.goes("/runs/one")
        plot = chart(page, "Reward")
        picture = plot.get_by_role("img", name="Reward over the steps")
        expect(picture).to_have_attribute(
            "aria-label", containing("reward: first 0.25, last 0.5, lowest 0, highest 1.")
        )
        button = plot.get_by_role("button", name="reward")
        expect(button).to_have_attribute("aria-pressed", "true")
        button.focus()
        page.keyboard.press("Enter")
        expect(button).to_have_attribute("aria-pressed", "false")
        expect(plot.locator(".u-series.u-off")).to_have_count(3)
        page.keyboard.press("Space")
        expect(button).to_have_attribute("aria-pressed", "true")
        expect(plot.locator(".u-series.u-off")).to_have_count(0)
        assert visitor.wrong == []


def test_pass_at_k_has_its_interval_beside_it(
    visit: Callable[..., Visitor], tmp_path: Path
) -> None:
    run = write_run(tmp_path / "often", 0)
    row = {"prompt": "p", "completion": "", "outcome": "scored", "parts": {}, "tokens": 1}
    rows = [
        {**row, "example": n, "key": str(n), "sample": k, "reward": 1.0, "success": k < n % 5}
        for n in range(40)
        for k in range(4)
    ]
    metrics = {"pass@1": 0.5, "pass@2": 0.7, "pass@4": 0.8}
    with Store.open(run / "run.db") as store:
        store.add_evaluation(EvaluationRecord(2, "several", "often@2", metrics, rows))
    with shown(tmp_path) as address:
        visitor = visit(address)
        visitor.goes("/runs/often/evaluations")
        said = legend_at(chart(visitor.page, "pass@k"), 0.0)
        assert list(said) == ["k", "several after 2 steps", "95 % to", "95 % from"]
        value, high, low = (float(said[each]) for each in list(said)[1:])
        assert value == 0.5
        assert 0.3 < low < 0.5 < high < 0.7
        assert visitor.wrong == []
